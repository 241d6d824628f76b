"""The rounds of a spot check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Rounds ``start + 1 … stop``, computed from the state after round `start`: a kept one, or w⁰."""

    start: int
    stop: int

    @property
    def rounds(self) -> range:
        """The rounds to compute, in order."""
        return range(self.start + 1, self.stop + 1)


NEAR, AT_ALL, FEW = 20, 4, 6
"""Rounds farther from the state before them than T / `NEAR` are computed only if all up to the next state are near, by
T / `AT_ALL`, or few.
"""


def reachable(starts: Sequence[int], last: int, rounds: int, count: int) -> Iterator[int]:
    """Yield the rounds of a stretch that are near enough to a state for a spot check of `count` rounds.

    Args:
        starts: the stretch's rounds whose state is available, ascending; 0: the initial model.
        last: the stretch's last round.
        rounds: T.
        count: rounds to be drawn.
    """
    most, near = max(count, FEW, ceil(rounds / AT_ALL)), max(count, ceil(rounds / NEAR))
    for start, end in pairwise([*(one for one in starts if one < last), last]):
        yield from range(start + 1, 1 + (end if end - start <= most else start + near))


def drawn(rounds: Sequence[int], weights: np.ndarray, count: int, seed: int) -> tuple[list[int], int]:
    """Return `count` rounds drawn uniformly, ascending, and one more drawn by `weights`, (len(rounds),).

    Each round is among the `count` with probability count / len(rounds). The other one favours rounds whose last bits
    are likelier to go wrong.
    """
    rng = np.random.default_rng(seed)
    evenly = sorted(rng.choice(np.array(rounds), size=min(count, len(rounds)), replace=False).tolist())
    return evenly, int(rng.choice(np.array(rounds), p=weights / weights.sum()))


def oddness(cohorts: Sequence[Sequence[int]], sizes: np.ndarray, batch: int | str) -> np.ndarray:
    """Return the weight of each round in the draw: 1, plus the members whose last minibatch is short."""
    short = sizes % batch != 0 if isinstance(batch, int) else np.full(len(sizes), False)
    several = ([k for k in cohort if 0 <= k < len(sizes)] if len(cohort) > 1 else [] for cohort in cohorts)
    return np.array([1.0 + short[members].sum() for members in several])


def segments(rounds: Sequence[int], starts: Sequence[int]) -> list[Segment]:
    """Return the segments that cover these rounds, each from the nearest state before it."""
    last: dict[int, int] = {}
    for round in sorted(rounds):
        last[max(start for start in starts if start < round)] = round
    return [Segment(start, stop) for start, stop in last.items()]
