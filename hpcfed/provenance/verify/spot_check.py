"""Spot checks: the random choice of a run's rounds to compute again, and of the kept states to start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Rounds to compute, one after another: `start` + 1 to `stop`.

    Attributes:
        start: round of the checkpoint to begin from; 0: the initial model.
        stop: the last round to compute.
    """

    start: int
    stop: int

    @property
    def rounds(self) -> range:
        """The rounds to compute, in order."""
        return range(self.start + 1, self.stop + 1)


NEAR, AT_ALL, FEW = 20, 4, 6
"""A spot check draws from the rounds at most T / `NEAR` after a kept state, and from all rounds between two states that
are at most T / `AT_ALL`, or `FEW`, rounds apart. T: number of rounds of the run.
"""


def reachable(starts: Sequence[int], last: int, rounds: int, count: int) -> Iterator[int]:
    """Yield the rounds that a spot check can draw: those soon after a kept state (see `NEAR`).

    Args:
        starts: rounds whose state is kept, ascending; 0: the initial model.
        last: the last round to consider.
        rounds: T, the number of rounds of the run.
        count: number of rounds to be drawn; smaller limits of `NEAR` are raised to this number of rounds.
    """
    most, near = max(count, FEW, ceil(rounds / AT_ALL)), max(count, ceil(rounds / NEAR))
    for start, end in pairwise([*(one for one in starts if one < last), last]):
        yield from range(start + 1, 1 + (end if end - start <= most else start + near))


def drawn(rounds: Sequence[int], weights: np.ndarray, count: int, seed: int) -> tuple[list[int], int]:
    """Return `count` different rounds drawn uniformly, ascending; and one round drawn in proportion to `weights`.

    Args:
        rounds: the rounds to draw from.
        weights: weight of each round, (len(rounds),); larger for rounds whose last bits are likelier to be wrong.
        count: number of uniform draws; all rounds are returned if there are fewer.
        seed: seed of the draw.
    """
    rng = np.random.default_rng(seed)
    evenly = sorted(rng.choice(np.array(rounds), size=min(count, len(rounds)), replace=False).tolist())
    return evenly, int(rng.choice(np.array(rounds), p=weights / weights.sum()))


def oddness(cohorts: Sequence[Sequence[int]], sizes: np.ndarray, batch: int | str) -> np.ndarray:
    """Return each round's weight in `drawn`, (len(cohorts),): 1 + number of clients with a partial last minibatch.

    The weight is 1 for a cohort of one client, and for all rounds if `batch` is ``full``.

    Args:
        cohorts: client numbers of each round.
        sizes: number of samples of each client, (N,).
        batch: ``local.batch_size`` of the recipe.
    """
    short = sizes % batch != 0 if isinstance(batch, int) else np.full(len(sizes), False)
    several = ([k for k in cohort if 0 <= k < len(sizes)] if len(cohort) > 1 else [] for cohort in cohorts)
    return np.array([1.0 + short[members].sum() for members in several])


def segments(rounds: Sequence[int], starts: Sequence[int]) -> list[Segment]:
    """Return segments that cover `rounds`, each beginning at the last of the kept states before it (`starts`)."""
    last: dict[int, int] = {}
    for round in sorted(rounds):
        last[max(start for start in starts if start < round)] = round
    return [Segment(start, stop) for start, stop in last.items()]
