"""Which rank trains which client.

A client's home is fixed for the run: homes are balanced by samples. ``placement: static`` trains each client at home.
``balanced`` spreads each round's cohort over the ranks by the work to be done and the speed each rank has shown, and a
client's state, where it has one, moves to the rank that trains it next. Results do not depend on it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEARNED = 0.2
"""Share of the last round in what is held to be a rank's speed."""
FASTEST = 16.0
"""By what factor a rank is held to be faster or slower than the average at most."""


def homes(sizes: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return each client's home rank, (N,) int64, from the clients' samples, (N,).

    Clients are dealt largest first, back and forth over the ranks, so that any two ranks differ by at most the samples
    of one client, and N log N work is enough for a million clients.
    """
    if num_ranks == 1:
        return np.zeros(len(sizes), dtype=np.int64)
    back_and_forth = np.concatenate([np.arange(num_ranks), np.arange(num_ranks)[::-1]])
    owner = np.empty(len(sizes), dtype=np.int64)
    owner[np.argsort(-sizes, kind="stable")] = np.resize(back_and_forth, len(sizes))
    return owner


def spread(costs: Sequence[float], home: Sequence[int], num_ranks: int, speeds: np.ndarray | None = None) -> list[int]:
    """Return a rank for each cohort member: longest first, at home while home has room, else where it ends soonest.

    Args:
        costs: expected work of each member, in any unit, (S,).
        home: home rank of each member, (S,); trained there its data and state need not be fetched.
        num_ranks: P.
        speeds: work that each rank does in a unit of time, (P,); equal where not given.
    """
    takes = 1 / (np.ones(num_ranks) if speeds is None else np.asarray(speeds))
    fair_share = sum(costs) / float((1 / takes).sum())
    load = np.zeros(num_ranks)
    chosen = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        rank, cost = home[place], costs[place]
        if load[rank] + cost * takes[rank] > fair_share:
            rank = int(np.argmin(load + cost * takes))
        chosen[place] = rank
        load[rank] += cost * takes[rank]
    return chosen


class Placement:
    """Places cohorts on ranks, round after round; every rank comes to the same answer.

    Args:
        home: home rank of each client, (N,).
        num_ranks: P.
        balanced: whether clients are trained where they end soonest, instead of at home.

    Attributes:
        home: rank where each client's state is, (N,): at home, or where it was trained last.
    """

    def __init__(self, home: np.ndarray, num_ranks: int, *, balanced: bool):
        self.home = home
        self.balanced = balanced and num_ranks > 1
        self._num_ranks = num_ranks
        self._speeds = np.ones(num_ranks)

    def place(self, clients: np.ndarray, work: np.ndarray, together: int) -> list[int]:
        """Return the rank of each cohort member, (S,), from their numbers and expected work, (S,).

        `together` says how many members in a row must be on the same rank.
        """
        home = self.home[clients].tolist()
        if not self.balanced:
            return home
        costs = np.add.reduceat(work, np.arange(0, len(work), together)).tolist()
        ranks = spread(costs, home[::together], self._num_ranks, self._speeds)
        return np.repeat(ranks, together)[: len(home)].tolist()

    def learn(self, ranks: Sequence[int], work: np.ndarray, seconds: np.ndarray) -> None:
        """Take note of how long each rank, (P,), took for the work of its members, (S,)."""
        done = np.bincount(ranks, weights=work, minlength=self._num_ranks)
        known = (done > 0) & (seconds > 0)
        if not known.any():
            return
        rates = np.divide(done, seconds, out=np.zeros(self._num_ranks), where=known)
        shown = np.where(known, rates / rates[known].mean(), self._speeds)
        self._speeds += LEARNED * (np.clip(shown, 1 / FASTEST, FASTEST) - self._speeds)
