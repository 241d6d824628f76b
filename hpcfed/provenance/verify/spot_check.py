"""The rounds of a spot check."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from hpcfed.provenance.verify.recompute import Segment


def drawn(rounds: int, checkpoints: Sequence[int], count: int, seed: int) -> list[Segment]:
    """Return segments with `count` rounds drawn at random, those that follow a recorded state first.

    Args:
        rounds: T.
        checkpoints: rounds whose state is recorded.
        count: rounds to draw.
        seed: of the draw.
    """
    starts = sorted({0, *(round for round in checkpoints if round < rounds)})
    chances = np.random.default_rng(seed).random(rounds)

    def order(round: int) -> tuple[int, float]:
        return round - starts[bisect_left(starts, round) - 1], float(chances[round - 1])

    chosen = sorted(sorted(range(1, rounds + 1), key=order)[:count])
    last = {starts[bisect_left(starts, round) - 1]: round for round in chosen}
    return [Segment(start, stop) for start, stop in last.items()]
