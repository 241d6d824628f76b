"""Which rank trains which client.

A client's home is fixed for the run: homes are balanced by samples. ``placement: static`` trains each client at home.
``balanced`` spreads each round's cohort over the ranks by the work to be done, what samples and steps have been seen to
cost, and the speed each rank has shown; a client's state, where it has one, moves to the rank that trains it next.
Results do not depend on it, to the last bit, but where a client's bits depend on its group (`Engine.placement_counts`):
MKL rounds a product by where its operands begin, which for odd widths depends on the clients before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import ArrayLike

LEARNED, KEPT = 0.1, 0.95
"""Share of the last round in what is held to be a rank's speed; of what was seen before it in the costs."""
ALIKE = 1e-3
"""How different from each other the parts of the work must be, relatively, for the cost of each to be told."""
EXPLANATIONS = ((0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))
"""What may make up the cost of work, the simple first: samples (0), steps (1), clients (2).

Never steps alone: one client more in a group would then be free, and all would go to the rank that seems the fastest.
"""
CLEARLY = 4.0
"""Standard errors, squared, that are no accident."""
ROUNDING = 1e-9
"""By how much sums of the same work may differ, relatively, by the order of their additions."""
SMALL = 0.25
"""Of a rank's fair share: members up to this are placed many at a time."""
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


@dataclass(frozen=True)
class Cost:
    """What a rank's share of a round takes.

    Attributes:
        sample, step, client: for each sample visited, for each step taken after another one, and for each client; in
            any unit, the same for all.
        together: clients that take their steps together.
    """

    sample: float = 1.0
    step: float = 0.0
    client: float = 0.0
    together: int = 1

    def of(self, loads: np.ndarray) -> np.ndarray:
        """Return what ranks take, (P,), for loads (4, P): samples, steps, those of the longest client, clients."""
        samples, chain, clients = self.parts(loads)
        return self.sample * samples + self.step * chain + self.client * clients

    def parts(self, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what is paid for, (P,) each: samples, steps that follow one another, clients."""
        samples, steps, longest, clients = loads
        return samples, np.maximum(steps / self.together, longest), clients


def spread(
    samples: ArrayLike,
    home: ArrayLike,
    num_ranks: int,
    speeds: Sequence[float] | None = None,
    steps: ArrayLike | None = None,
    cost: Cost | None = None,
) -> list[int]:
    """Return a rank for each cohort member: longest first, at home while home has room, else where it ends soonest.

    Those that are small beside a rank's share stay at home together, as many of the longest as it has room for. Every
    rank comes to the same answer: sums are running ones, whose additions have an order.

    Args:
        samples: that each member visits, or its work in any unit, (S,).
        home: home rank of each member, (S,); trained there its data and state need not be fetched.
        num_ranks: P.
        speeds: work that each rank does in a unit of time, (P,); equal where not given.
        steps: minibatches of each member, (S,).
        cost: of samples, steps and clients; by default of samples alone.
    """
    cost, chosen = cost or Cost(), np.array(home, np.int64)
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

    is_small = alone * takes[chosen] <= SMALL * fair_share
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


def _whole(members: np.ndarray, num_ranks: int, cost: Cost) -> float:
    """Return what members, (4, S), take in all, at the least."""
    samples, steps, _, clients = np.cumsum(members, axis=1)[:, -1].tolist()
    side_by_side = np.cumsum(np.sort(members[2])[::-1][:num_ranks])[-1]
    return cost.sample * samples + cost.step * max(steps / cost.together, side_by_side) + cost.client * clients


def _with(loads: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return loads (4, n) with more (4, n) to do."""
    total = loads + more
    np.maximum(loads[2], more[2], out=total[2])
    return total


def _running(members: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the load, (4, S), of each member's rank up to it, for members (4, S) in the order of their ranks (S,)."""
    first, totals = np.searchsorted(rank, rank), np.cumsum(members, axis=1)
    loads = totals - (totals - members)[:, first]
    apart = rank * (members[2].max(initial=0) + 1)
    loads[2] = np.maximum.accumulate(members[2] + apart) - apart
    return loads


class Placement:
    """Places cohorts on ranks, round after round; every rank comes to the same answer, by additions in the same order.

    Args:
        home: home rank of each client, (N,).
        num_ranks: P.
        balanced: whether clients are trained where they end soonest, instead of at home.
        together: clients that take their steps together, where a rank has as many.
        inseparable: members of a cohort in a row that must be on the same rank.

    Attributes:
        home: rank where each client's state is, (N,): at home, or where it was trained last.
    """

    def __init__(self, home: np.ndarray, num_ranks: int, *, balanced: bool, together: int = 1, group_size: int = 1):
        self.home = home
        self.balanced = balanced and num_ranks > 1
        self._num_ranks, self._inseparable = num_ranks, group_size
        self._cost = Cost(together=together // group_size)
        self._speeds, self._rounds = [1.0] * num_ranks, 0
        self._products, self._seen = [[0.0] * 4 for _ in range(4)], 0.0

    def place(self, clients: np.ndarray, samples: np.ndarray, steps: np.ndarray) -> list[int]:
        """Return the rank of each cohort member, (S,), from their numbers, and the samples and steps of each, (S,)."""
        home = self.home[clients]
        if not self.balanced:
            return home.tolist()
        groups = np.arange(0, len(samples), self._inseparable)
        own, taken = np.add.reduceat(samples, groups), np.maximum.reduceat(steps, groups)
        ranks = spread(own, home[:: self._inseparable], self._num_ranks, self._speeds, taken, self._cost)
        return np.repeat(ranks, self._inseparable)[: len(home)].tolist()

    def learn(self, ranks: Sequence[int], samples: np.ndarray, steps: np.ndarray, seconds: np.ndarray) -> None:
        """Take note of how long each rank, (P,), took for its members, whose samples and steps are given, (S,)."""
        if not self.balanced:
            return
        groups = np.arange(0, len(samples), self._inseparable)
        of_groups, own = np.asarray(ranks)[groups], np.add.reduceat(samples, groups)
        taken, longest = np.maximum.reduceat(steps, groups), np.zeros(self._num_ranks)
        np.maximum.at(longest, of_groups, taken)
        visited, all_steps, clients = (
            np.bincount(of_groups, each, self._num_ranks) for each in (own, taken, np.ones(len(own)))
        )
        loads = np.array([visited, all_steps, longest, clients])
        paid = list(zip(*(part.tolist() for part in self._cost.parts(loads)), strict=True))
        self._learn_cost(paid, seconds.tolist())
        self._learn_speeds(self._cost.of(loads).tolist(), seconds.tolist())

    def _learn_cost(self, paid: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> None:
        """Fit the costs to what ranks had to do and the time they took, by least squares, older rounds less.

        The time is what it would be on a rank of average speed.
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
            self._cost = Cost(sample, step, client, self._cost.together)

    def _learn_speeds(self, work: Sequence[float], seconds: Sequence[float]) -> None:
        """Follow how fast each rank is beside the others, for what it had to do."""
        rates = [done / taken if done > 0 and taken > 0 else 0.0 for done, taken in zip(work, seconds, strict=True)]
        known = [rate for rate in rates if rate]
        if not known:
            return
        average = sum(known) / len(known)
        self._rounds += 1
        share = max(LEARNED, 1 / (1 + self._rounds))  # at first an average of what was held and what is seen
        for rank, rate in enumerate(rates):
            if rate:
                shown = min(max(rate / average, 1 / FASTEST), FASTEST)
                self._speeds[rank] += share * (shown - self._speeds[rank])


def costs_of(products: Sequence[Sequence[float]], seen: float) -> list[float]:
    """Return what a sample, a step and a client cost, (3,), none less than 0: as few of them as explain what was seen.

    Least squares over the sets in `EXPLANATIONS`. One takes the place of a simpler one where the squares that it leaves
    unexplained are fewer by more than `CLEARLY` times their variance; noise alone seldom does that. A set whose columns
    are all but the same is none.

    Args:
        products: of the equations' columns and right side, [A b]ᵀ[A b], (4, 4).
        seen: how many equations that is, older ones counting less.
    """
    best, found = math.inf, [0.0] * 3
    for chosen in EXPLANATIONS:
        solved = _solved([[products[i][j] for j in (*chosen, 3)] for i in chosen])
        freedom = seen - len(chosen)
        if solved is None or min(solved) < 0 or freedom <= 0:
            continue
        left = max(products[3][3] - sum(cost * products[i][3] for cost, i in zip(solved, chosen, strict=True)), 0.0)
        if best - left > CLEARLY * left / freedom:
            best, found = left, [0.0] * 3
            for cost, i in zip(solved, chosen, strict=True):
                found[i] = cost
    return found


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Return the solution of a positive definite system [M | r], None where it is all but singular."""
    size = len(rows)
    diagonal = [rows[i][i] for i in range(size)]
    for i in range(size):
        if not rows[i][i] > ALIKE * diagonal[i]:
            return None
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [row[size] / row[i] for i, row in enumerate(rows)]
