"""Spot checks: which rounds of a run to compute again, drawn at random, and from which kept states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Rounds ``start + 1`` to ``stop``, computed from the checkpoint of round `start`; 0: from the initial model."""

    start: int
    stop: int

    @property
    def rounds(self) -> range:
        """The rounds to compute, in order."""
        return range(self.start + 1, self.stop + 1)


NEAR, AT_ALL, FEW = 20, 4, 6
"""A spot check takes rounds at most T / `NEAR` after a kept state; all rounds between two states if these are at most
T / `AT_ALL`, or `FEW`, rounds apart. T: rounds of the run.
"""


def reachable(starts: Sequence[int], last: int, rounds: int, count: int) -> Iterator[int]:
    """Yield the rounds that a spot check can draw: those near enough after a kept state, by `NEAR`, `AT_ALL` and `FEW`.

    Args:
        starts: rounds whose state is kept, ascending; 0: the initial model.
        last: the last round to consider.
        rounds: T, the number of rounds of the run.
        count: number of rounds to be drawn.
    """
    most, near = max(count, FEW, ceil(rounds / AT_ALL)), max(count, ceil(rounds / NEAR))
    for start, end in pairwise([*(one for one in starts if one < last), last]):
        yield from range(start + 1, 1 + (end if end - start <= most else start + near))


def drawn(rounds: Sequence[int], weights: np.ndarray, count: int, seed: int) -> tuple[list[int], int]:
    """Return `count` different rounds drawn uniformly, ascending; and one more, drawn in proportion to `weights`.

    Args:
        rounds: the rounds to draw from.
        weights: of each of them, (len(rounds),); larger for rounds whose last bits are likelier to be wrong.
        count: all rounds are returned if there are fewer.
        seed: seed of the draw.
    """
    rng = np.random.default_rng(seed)
    evenly = sorted(rng.choice(np.array(rounds), size=min(count, len(rounds)), replace=False).tolist())
    return evenly, int(rng.choice(np.array(rounds), p=weights / weights.sum()))


def oddness(cohorts: Sequence[Sequence[int]], sizes: np.ndarray, batch: int | str) -> np.ndarray:
    """Return each round's weight in the draw, (len(cohorts),): 1 + its clients whose last minibatch is not full.

    Args:
        cohorts: client numbers of each round.
        sizes: samples of each client, (N,).
        batch: the recipe's ``local.batch_size``.
    """
    short = sizes % batch != 0 if isinstance(batch, int) else np.full(len(sizes), False)
    several = ([k for k in cohort if 0 <= k < len(sizes)] if len(cohort) > 1 else [] for cohort in cohorts)
    return np.array([1.0 + short[members].sum() for members in several])


def segments(rounds: Sequence[int], starts: Sequence[int]) -> list[Segment]:
    """Return the segments that cover `rounds`, each begun at the last kept state before it; `starts`: their rounds."""
    last: dict[int, int] = {}
    for round in sorted(rounds):
        last[max(start for start in starts if start < round)] = round
    return [Segment(start, stop) for start, stop in last.items()]
