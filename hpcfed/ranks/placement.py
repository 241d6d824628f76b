"""Placement: which rank trains which client.

A client's home rank is fixed for the run; homes are balanced by samples. ``placement: static`` trains each client at
home. ``balanced`` spreads each round's cohort over the ranks by their work, the observed costs of samples and steps,
and each rank's observed speed; a client's state, if any, moves to the rank that trains it next. Results are
bit-identical either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import ArrayLike

LEARNED, KEPT = 0.1, 0.95
"""Weight of the last round in a rank's estimated speed; weight kept by earlier rounds in the fit of the costs."""
COLLINEAR_PIVOT = 1e-3
"""Relative size of a pivot below which terms of the work are too collinear to separate their costs."""
EXPLANATIONS = ((0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))
"""Candidate terms of the cost, simplest first: samples (0), steps (1), clients (2).

Never steps alone: one more client in a group would then be free, and all would go to the rank that seems the fastest.
"""
SIGNIFICANT = 4.0
"""Squared standard errors from which an improvement of the fit is significant."""
ROUNDING = 1e-9
"""Relative tolerance for sums of the same work in different orders of addition."""
SMALL_SHARE = 0.25
"""Share of a rank's fair share up to which members are placed in bulk."""
FASTEST = 16.0
"""Largest factor by which a rank's estimated speed departs from the average."""


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


@dataclass(frozen=True)
class WorkCost:
    """Cost model of a rank's share of a round.

    Attributes:
        sample, step, client: cost of each sample visited, each sequential step, and each client, in any one unit.
        tile: slots in which clients take their steps together: a rank takes the steps of ⌈clients / tile⌉ of them.
    """

    sample: float = 1.0
    step: float = 0.0
    client: float = 0.0
    tile: int = 1

    def of(self, loads: np.ndarray) -> np.ndarray:
        """Return ranks' costs, (P,), of loads (4, P): samples, steps, steps of the longest client, clients."""
        samples, chain, clients = self.parts(loads)
        return self.sample * samples + self.step * chain + self.client * clients

    def parts(self, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the terms of the cost, (P,) each: samples, sequential steps, clients."""
        samples, steps, longest, clients = loads
        tiles = np.ceil(clients / self.tile)
        return samples, np.maximum(tiles * steps / np.maximum(clients, 1), longest), clients


def spread(
    samples: ArrayLike,
    home: ArrayLike,
    num_ranks: int,
    speeds: Sequence[float] | None = None,
    steps: ArrayLike | None = None,
    cost: WorkCost | None = None,
) -> list[int]:
    """Return a rank for each cohort member: longest first, at home while home has room, else where it ends soonest.

    Members small beside a rank's fair share stay at home in bulk, the longest first, while home has room. All ranks
    compute the same answer: sums are cumulative, with a fixed order of additions.

    Args:
        samples: visited by each member, or its work in any unit, (S,).
        home: home rank of each member, (S,), where its data and state need not be fetched.
        num_ranks: P.
        speeds: work of each rank per unit of time, (P,); default: equal.
        steps: minibatches of each member, (S,).
        cost: of samples, steps and clients; default: of samples alone.
    """
    cost, chosen = cost or WorkCost(), np.array(home, np.int64)
    if not len(chosen):
        return []
    takes = np.ones(num_ranks) if speeds is None else 1 / np.asarray(speeds)
    taken = np.zeros(len(chosen)) if steps is None else np.asarray(steps, np.float64)
    members = np.array([np.asarray(samples, np.float64), taken, taken, np.ones(len(chosen))])
    alone, loads = cost.of(members), np.zeros((4, num_ranks))
    longest_first = np.argsort(-alone, kind="stable")
    fair_share = _whole(members, num_ranks, cost) / np.cumsum(1 / takes)[-1] * (1 + ROUNDING)

    def place_one_by_one(places: np.ndarray) -> None:
        for place in places.tolist():
            more = _with(loads, members[:, place : place + 1])
            ends = cost.of(more) * takes
            if ends[chosen[place]] > fair_share:
                soonest = int(ends.argmin())
                if ends[soonest] < ends[chosen[place]]:
                    chosen[place] = soonest
            loads[:, chosen[place]] = more[:, chosen[place]]

    is_small = alone * takes[chosen] <= SMALL_SHARE * fair_share
    place_one_by_one(longest_first[~is_small[longest_first]])
    small = longest_first[is_small[longest_first]]
    by_home = small[np.argsort(chosen[small], kind="stable")]
    rank = chosen[by_home]
    up_to_each = _with(loads[:, rank], _running(members[:, by_home], rank))
    stays = np.zeros(len(chosen), bool)
    stays[by_home] = cost.of(up_to_each) * takes[rank] <= fair_share
    for part in (0, 1, 3):
        loads[part] += np.bincount(chosen[stays], members[part, stays], num_ranks)
    np.maximum.at(loads[2], chosen[stays], taken[stays])
    place_one_by_one(small[~stays[small]])
    return chosen.tolist()


def _whole(members: np.ndarray, num_ranks: int, cost: WorkCost) -> float:
    """Return a lower bound on the total cost of members, (4, S)."""
    samples, steps, _, clients = np.cumsum(members, axis=1)[:, -1].tolist()
    side_by_side = np.cumsum(np.sort(members[2])[::-1][:num_ranks])[-1]
    return cost.sample * samples + cost.step * max(steps / cost.tile, side_by_side) + cost.client * clients


def _with(loads: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return the sum of two loads, (4, n) each, in which the longest client is the longer of the two."""
    total = loads + more
    np.maximum(loads[2], more[2], out=total[2])
    return total


def _running(members: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the load, (4, S), of each member's rank up to that member, for members (4, S) sorted by rank, (S,)."""
    first, totals = np.searchsorted(rank, rank), np.cumsum(members, axis=1)
    loads = totals - (totals - members)[:, first]
    apart = rank * (members[2].max(initial=0) + 1)
    loads[2] = np.maximum.accumulate(members[2] + apart) - apart
    return loads


class Placement:
    """Places each round's cohort on ranks; all ranks compute the same answer, by additions in the same order.

    Args:
        home: home rank of each client, (N,).
        num_ranks: P.
        balanced: whether clients are trained where they end soonest, instead of at home.
        tile: slots in which clients take their steps together, filled or not.

    A client's home moves with its state, to the rank that trained it last.
    """

    def __init__(self, home: np.ndarray, num_ranks: int, *, balanced: bool, tile: int = 1):
        self._home = home.copy()
        self.balanced = balanced and num_ranks > 1
        self._num_ranks = num_ranks
        self._cost = WorkCost(tile=tile)
        self._speeds, self._rounds = [1.0] * num_ranks, 0
        self._products, self._seen = [[0.0] * 4 for _ in range(4)], 0.0

    def home_of(self, clients: ArrayLike) -> np.ndarray:
        """Return the rank that holds each client's state, (S,), from client numbers (S,)."""
        return self._home[np.asarray(clients, np.int64)]

    def at_home(self, rank: int) -> np.ndarray:
        """Return the clients whose state a rank holds, in order, int64."""
        return np.flatnonzero(self._home == rank)

    def move(self, clients: np.ndarray, ranks: Sequence[int]) -> None:
        """Make these ranks, (S,), the homes of clients, (S,)."""
        self._home[clients] = ranks

    def place(self, clients: np.ndarray, samples: np.ndarray, steps: np.ndarray) -> list[int]:
        """Return the rank of each cohort member, (S,), from its client number, samples and steps, (S,) each."""
        home = self.home_of(clients)
        if not self.balanced or not len(home):
            return home.tolist()
        return spread(samples, home, self._num_ranks, self._speeds, steps, self._cost)

    def learn(self, ranks: Sequence[int], samples: np.ndarray, steps: np.ndarray, seconds: np.ndarray) -> None:
        """Update costs and speeds from each rank's seconds, (P,), and its members' samples and steps, (S,) each."""
        if not self.balanced:
            return
        longest = np.zeros(self._num_ranks)
        np.maximum.at(longest, ranks, steps)
        visited, all_steps, clients = (
            np.bincount(ranks, each, self._num_ranks) for each in (samples, steps, np.ones(len(samples)))
        )
        loads = np.array([visited, all_steps, longest, clients])
        paid = list(zip(*(part.tolist() for part in self._cost.parts(loads)), strict=True))
        self._learn_cost(paid, seconds.tolist())
        self._learn_speeds(self._cost.of(loads).tolist(), seconds.tolist())

    def _learn_cost(self, paid: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> None:
        """Fit the costs to the ranks' work and time by least squares, with smaller weights for older rounds.

        Times are scaled to a rank of average speed.
        """
        rows = [(*parts, taken * speed) for parts, taken, speed in zip(paid, seconds, self._speeds, strict=True)]
        columns = list(zip(*rows, strict=True))
        self._products = [
            [KEPT * seen + sum(map(mul, columns[i], columns[j])) for j, seen in enumerate(line)]
            for i, line in enumerate(self._products)
        ]
        self._seen = KEPT * self._seen + len(rows)
        sample, step, client = costs_of(self._products, self._seen)
        if sample or step or client:
            self._cost = WorkCost(sample, step, client, self._cost.tile)

    def _learn_speeds(self, work: Sequence[float], seconds: Sequence[float]) -> None:
        """Update each rank's speed relative to the average, from its work and its time."""
        rates = [done / taken if done > 0 and taken > 0 else 0.0 for done, taken in zip(work, seconds, strict=True)]
        known = [rate for rate in rates if rate]
        if not known:
            return
        average = sum(known) / len(known)
        self._rounds += 1
        share = max(LEARNED, 1 / (1 + self._rounds))  # at first a plain average over rounds
        for rank, rate in enumerate(rates):
            if rate:
                shown = min(max(rate / average, 1 / FASTEST), FASTEST)
                self._speeds[rank] += share * (shown - self._speeds[rank])


def costs_of(products: Sequence[Sequence[float]], seen: float) -> list[float]:
    """Return the costs of a sample, a step and a client, (3,), ≥ 0, with as few nonzero as explain the data.

    Least squares over the sets in `EXPLANATIONS`. A set replaces a simpler one if its sum of squared residuals is
    smaller by more than `SIGNIFICANT` times their variance, which noise alone seldom achieves. Sets with nearly
    collinear columns, or a negative cost, are skipped. Solved by hand, in Python's floats: all hosts must find the same
    costs to the last bit, and LAPACK's results differ between processors.

    Args:
        products: [A b]ᵀ[A b] of the equations' columns and right side, (4, 4).
        seen: number of equations, older ones with smaller weights.
    """
    best, found = math.inf, [0.0] * 3
    for chosen in EXPLANATIONS:
        solved = _solved([[products[i][j] for j in (*chosen, 3)] for i in chosen])
        freedom = seen - len(chosen)
        if solved is None or min(solved) < 0 or freedom <= 0:
            continue
        left = max(products[3][3] - sum(cost * products[i][3] for cost, i in zip(solved, chosen, strict=True)), 0.0)
        if best - left > SIGNIFICANT * left / freedom:
            best, found = left, [0.0] * 3
            for cost, i in zip(solved, chosen, strict=True):
                found[i] = cost
    return found


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Return the solution of a positive definite system [M | r], None if it is nearly singular."""
    size = len(rows)
    diagonal = [rows[i][i] for i in range(size)]
    for i in range(size):
        if not rows[i][i] > COLLINEAR_PIVOT * diagonal[i]:
            return None
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [row[size] / row[i] for i, row in enumerate(rows)]
