"""Placement: which rank trains which client.

A client's home rank is fixed for the run; homes are balanced by samples. ``placement: static`` trains each client at
home. ``balanced`` keeps members of a round's cohort at home up to the round's least duration, and spreads the others
over the ranks, by the observed costs of samples and steps and each rank's observed speed; a client's state, if any,
moves to the rank that trains it next. Results are bit-identical either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import ArrayLike

LEARNED, KEPT = 0.1, 0.95
"""Weight of the last round in a rank's estimated speed; weight kept by earlier rounds in the fit of the costs."""
COLLINEAR_PIVOT = 1e-3
"""Relative size of a pivot below which terms of the work are too collinear to separate their costs."""
EXPLANATIONS = ((0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))
"""Candidate terms of the cost, simplest first: samples (0), steps of tiles (1), clients (2).

Never steps alone: one more client in a tile would then be free, and all would go to the rank that seems the fastest.
"""
SIGNIFICANT = 4.0
"""Squared standard errors from which an improvement of the fit is significant."""
TOLERANCE = 0.02
"""Relative difference of ends that is within the noise of estimated costs and speeds: members stay at home for it."""
KEPT_AT_HOME = (1.0, 0.75, 0.5)
"""Shares of a round up to which members stay at home, tried in turn: the fewer stay, the better the rest fits in."""
LIKE = 2.0
"""Largest ratio of the costs of members that are dealt out with one order of ranks."""
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
        sample, step, client: cost of each sample visited, each step of a tile, and each client, in any one unit.
        tile: R, slots in which clients take their steps together, filled or not: a tile takes its longest member's.
    """

    sample: float = 1.0
    step: float = 0.0
    client: float = 0.0
    tile: int = 1

    def of(self, loads: np.ndarray) -> np.ndarray:
        """Return ranks' costs, (P,), of loads (3, P): samples, steps of tiles, clients."""
        samples, steps, clients = loads
        return self.sample * samples + self.step * steps + self.client * clients


def loads_of(
    ranks: ArrayLike,
    samples: np.ndarray,
    steps: np.ndarray,
    num_ranks: int,
    tile: int = 1,
    slots: np.ndarray | None = None,
) -> np.ndarray:
    """Return what each rank has to do, (3, P): samples, steps of tiles, clients.

    Args:
        ranks, samples, steps: of each member, (S,).
        num_ranks, tile: P and R.
        slots: each member's slot where it is fixed, (S,).
    """
    ranks, leads = np.asarray(ranks, np.int64), np.arange(len(steps))
    if tile > 1:
        order = np.lexsort((-steps, ranks))
        leads = order[_leads(ranks[order], _tiles(ranks[order], tile, None if slots is None else slots[order]))]
    led = np.bincount(ranks[leads], steps[leads], num_ranks)
    return np.array([np.bincount(ranks, samples, num_ranks), led, np.bincount(ranks, minlength=num_ranks)])


def _number(groups: np.ndarray) -> np.ndarray:
    """Return how many members of its group precede each, (S,), from groups in increasing order, (S,)."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def _tiles(ranks: np.ndarray, tile: int, slots: np.ndarray | None) -> np.ndarray:
    """Return each member's tile on its rank, (S,), from ranks in increasing order, as `tiles.cut` cuts them."""
    if slots is None or tile == 1:
        return _number(ranks) // tile
    keys = ranks * tile + slots
    by_slot, found = np.argsort(keys, kind="stable"), np.empty(len(keys), np.int64)
    found[by_slot] = _number(keys[by_slot])
    return found


def _leads(ranks: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """Return the index of the first member of each tile, from each member's rank and tile there, (S,)."""
    return np.unique(ranks * (tiles.max(initial=0) + 1) + tiles, return_index=True)[1]


def spread(
    samples: ArrayLike,
    home: ArrayLike,
    num_ranks: int,
    speeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    cost: WorkCost | None = None,
    slots: np.ndarray | None = None,
) -> list[int]:
    """Return a rank for each cohort member, (S,): at home where that delays no round, else where it ends soonest.

    Members stay at home, the longest first, up to the least end that a round can have; the rest is dealt out. Where a
    round would last longer so than with whole tiles dealt out, wherever their members are at home, that end is the
    bound; and fewer stay at home until it is met. All ranks compute the same answer: sums are cumulative, with a fixed
    order of additions.

    Args:
        samples: visited by each member, or its work in any unit, (S,).
        home: home rank of each member, (S,), where its data and state need not be fetched.
        num_ranks: P.
        speeds: work of each rank per unit of time, (P,); default: equal.
        steps: minibatches of each member, (S,).
        cost: of samples, steps and clients; default: of samples alone.
        slots: each member's slot where it is fixed, (S,): a tile has each slot once.
    """
    home = np.asarray(home, np.int64)
    if not len(home):
        return []
    taken = np.zeros(len(home)) if steps is None else np.asarray(steps, np.float64)
    takes = np.ones(num_ranks) if speeds is None else 1 / np.asarray(speeds, np.float64)
    members = _Members(np.asarray(samples, np.float64), taken, home, takes, cost or WorkCost(), slots)
    bound = members.least_end()
    chosen = members.at_home_until(bound)
    if members.end(chosen) > bound * (1 + TOLERANCE):
        dealt = members.dealt()
        bound, kept = members.end(dealt), iter(KEPT_AT_HOME)
        while members.end(chosen) > bound * (1 + TOLERANCE):
            share = next(kept, 0.0)
            chosen = members.at_home_until(bound, share) if share else dealt
    if members.end(members.home) <= members.end(chosen) * (1 + TOLERANCE):
        return home.tolist()
    return members.in_cohort(chosen).tolist()


class _Members:
    """A cohort to be placed: its members in an order in which the longest come first.

    Args:
        samples, steps, home: of each member, (S,).
        takes: time of each rank for a unit of work, (P,).
        cost: of samples, steps and clients.
        slots: each member's slot where it is fixed, (S,).

    Attributes:
        home: of each member in this order, (S,).
    """

    def __init__(
        self,
        samples: np.ndarray,
        steps: np.ndarray,
        home: np.ndarray,
        takes: np.ndarray,
        cost: WorkCost,
        slots: np.ndarray | None,
    ):
        self._tile, self._takes = cost.tile, takes
        own, led = cost.sample * samples + cost.client, cost.step * steps
        self._order = np.lexsort((-own, -led)) if cost.tile > 1 else np.argsort(-(own + led), kind="stable")
        self._own, self._led = own[self._order], led[self._order]  # cost in a tile of as many steps; of these steps
        self.home = home[self._order]
        self._slots = None if slots is None or cost.tile == 1 else slots[self._order]

    def in_cohort(self, ranks: np.ndarray) -> np.ndarray:
        """Return ranks of members, (S,), in the cohort's order."""
        chosen = np.empty(len(ranks), np.int64)
        chosen[self._order] = ranks
        return chosen

    def end(self, ranks: np.ndarray) -> float:
        """Return when the last rank ends, from the members' ranks, (S,)."""
        by_rank = np.argsort(ranks, kind="stable")
        rank = ranks[by_rank]
        slots = None if self._slots is None else self._slots[by_rank]
        leads = by_rank[_leads(rank, _tiles(rank, self._tile, slots))] if self._tile > 1 else slice(None)
        loads = np.bincount(ranks, self._own, len(self._takes))
        return float(((loads + np.bincount(ranks[leads], self._led[leads], len(loads))) * self._takes).max())

    def least_end(self) -> float:
        """Return a lower bound on the end; the least end itself if no rank of similar speed needs two members."""
        fastest_first, alone = np.sort(self._takes), self._own + self._led
        if self._tile == 1 and len(alone) <= len(fastest_first):
            ends = alone * fastest_first[: len(alone)]
            last = int(ends.argmax())
            if fastest_first[last] <= 2 * fastest_first[0]:
                return float(ends[last])
        nowhere = np.zeros(len(alone), np.int64)
        led = self._led[_leads(nowhere, _tiles(nowhere, self._tile, self._slots))]
        fair_share = (_sum(self._own) + _sum(led)) / _sum(1 / self._takes)
        return float(max(fair_share, alone.max() * fastest_first[0]))

    def at_home_until(self, end: float, share: float = 1.0) -> np.ndarray:
        """Return ranks, (S,): at home for those whose tiles end there before a share of `end`; the rest is dealt out.

        Members who end later even if they are alone at home are dealt out first.
        """
        end *= 1 + TOLERANCE
        chosen, dealer = self.home.copy(), _Dealer(self._takes, self._tile)
        roams = (self._own + self._led) * self._takes[self.home] > end
        self._deal(np.flatnonzero(roams), dealer, chosen)
        at_home = np.flatnonzero(~roams)
        by_home = at_home[np.argsort(self.home[at_home], kind="stable")]
        tiles = _tiles(self.home[by_home], self._tile, None if self._slots is None else self._slots[by_home])
        if self._slots is not None:
            by_tile = np.lexsort((tiles, self.home[by_home]))
            by_home, tiles = by_home[by_tile], tiles[by_tile]
        rank, more = self.home[by_home], self._own[by_home]
        leads = _leads(rank, tiles)
        more[leads] += self._led[by_home[leads]]
        totals = np.cumsum(more)
        up_to_each = dealer.load[rank] + totals - (totals - more)[np.searchsorted(rank, rank)]
        stays = up_to_each * self._takes[rank] <= share * end
        leads = leads[stays[leads]]
        dealer.load += np.bincount(rank[stays], more[stays], len(self._takes))
        dealer.clients += np.bincount(rank[stays], minlength=len(self._takes))
        dealer.longest[rank[leads]] = self._led[by_home[leads]]  # of several tiles the last one's counts
        self._deal(np.sort(by_home[~stays]), dealer, chosen)
        return chosen

    def _deal(self, places: np.ndarray, dealer: _Dealer, chosen: np.ndarray) -> None:
        """Deal members out, the longest first; as whole tiles where slots are fixed."""
        if self._slots is not None:
            chosen[places] = self._dealt(places, dealer)
            return
        longest_first = places[np.argsort(-(self._own + self._led)[places], kind="stable")]
        chosen[longest_first] = dealer.deal(self._own[longest_first], self._led[longest_first])

    def dealt(self) -> np.ndarray:
        """Return ranks, (S,), of whole tiles that are dealt out, wherever their members are at home."""
        return self._dealt(np.arange(len(self.home)), _Dealer(self._takes))

    def _dealt(self, places: np.ndarray, dealer: _Dealer) -> np.ndarray:
        """Return ranks, (n,), of some members in whole tiles."""
        nowhere = np.zeros(len(places), np.int64)
        tile_of = _tiles(nowhere, self._tile, None if self._slots is None else self._slots[places])
        whole = np.bincount(tile_of, self._own[places]) + self._led[places[_leads(nowhere, tile_of)]]
        longest_first = np.argsort(-whole, kind="stable")
        ranks = np.empty(len(whole), np.int64)
        ranks[longest_first] = dealer.deal(whole[longest_first], np.zeros(len(whole)))
        return ranks[tile_of]


class _Dealer:
    """Deals members out, the longest first, each to the rank where it ends soonest.

    Args:
        takes: time of each rank for a unit of work, (P,).
        tile: R; 1 also where each of the members is a whole tile.

    Attributes:
        load, clients: work and number of each rank's members so far, (P,).
        longest: work of the steps of each rank's last tile, (P,).
    """

    def __init__(self, takes: np.ndarray, tile: int = 1):
        self._takes, self._tile = takes, tile
        self.load, self.longest = np.zeros(len(takes)), np.zeros(len(takes))
        self.clients = np.zeros(len(takes), np.int64)

    def deal(self, own: np.ndarray, led: np.ndarray) -> list[int]:
        """Return a rank for each of some members, from their costs in a tile of as many steps, and of steps, (n,)."""
        alone, ranks, first = own + led, [], 0
        while first < len(own):
            like = first + int((alone[first:] >= alone[first] / LIKE).sum())
            ranks += self._deal_like(own[first:like], led[first:like])
            first = like
        return ranks

    def _deal_like(self, own: np.ndarray, led: np.ndarray) -> list[int]:
        """Deal out members of similar cost: the ranks' order by the first one's end holds for all."""
        typical, steps, tile = float(own[0]), float(led[0]), self._tile
        opens = self.clients % tile == 0
        ends = (self.load + typical + np.where(opens, steps, np.maximum(steps - self.longest, 0.0))) * self._takes
        order = np.lexsort((opens, ends)) if tile > 1 else np.argsort(ends, kind="stable")
        soonest = order[: len(own)]  # no more ranks than members can be needed
        load, clients, longest, takes = (
            each[soonest].tolist() for each in (self.load, self.clients, self.longest, self._takes)
        )
        heap = list(zip(ends[soonest].tolist(), range(len(soonest)), strict=True))
        places = []
        for more, length in zip(own.tolist(), led.tolist(), strict=True):
            place = heap[0][1]
            begun = longest[place] if clients[place] % tile else 0.0
            longest[place] = begun if begun > length else length
            load[place] += more + longest[place] - begun
            clients[place] += 1
            begun = longest[place] if clients[place] % tile else 0.0
            next_end = load[place] + typical + (steps - begun if steps > begun else 0.0)
            heapreplace(heap, (next_end * takes[place], place))
            places.append(place)
        self.load[soonest], self.clients[soonest], self.longest[soonest] = load, clients, longest
        return soonest[places].tolist()


class Placement:
    """Places each round's cohort on ranks; all ranks compute the same answer, by additions in the same order.

    Args:
        home: home rank of each client, (N,).
        num_ranks: P.
        balanced: whether clients are trained where they end soonest, instead of at home.
        tile: R, slots in which clients take their steps together, filled or not.
        fixed_slots: whether the slot of a member is its place in the cohort modulo R.

    A client's home moves with its state, to the rank that trained it last.
    """

    def __init__(self, home: np.ndarray, num_ranks: int, *, balanced: bool, tile: int = 1, fixed_slots: bool = False):
        self._home = home.copy()
        self.balanced = balanced and num_ranks > 1
        self._num_ranks = num_ranks
        self._cost, self._fixed_slots = WorkCost(tile=tile), fixed_slots
        self._speeds, self._rounds = np.ones(num_ranks), 0
        self._products, self._seen = [[0.0] * 4 for _ in range(4)], 0.0

    def home_of(self, clients: ArrayLike) -> np.ndarray:
        """Return the rank that holds each client's state, (S,), from client numbers (S,)."""
        return self._home[np.asarray(clients, np.int64)]

    def has(self, clients: np.ndarray) -> bool:
        """Whether all these numbers, (S,), are those of clients."""
        return bool(((clients >= 0) & (clients < len(self._home))).all())

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
        return spread(samples, home, self._num_ranks, self._speeds, steps, self._cost, self._slots(len(home)))

    def learn(self, ranks: Sequence[int], samples: np.ndarray, steps: np.ndarray, seconds: np.ndarray) -> None:
        """Update costs and speeds from each rank's seconds, (P,), and its members' samples and steps, (S,) each."""
        if not self.balanced:
            return
        loads = loads_of(ranks, samples, steps, self._num_ranks, self._cost.tile, self._slots(len(ranks)))
        self._learn_cost(loads, seconds)
        self._learn_speeds(self._cost.of(loads), seconds)

    def _slots(self, members: int) -> np.ndarray | None:
        return np.arange(members) % self._cost.tile if self._fixed_slots else None

    def _learn_cost(self, loads: np.ndarray, seconds: np.ndarray) -> None:
        """Fit the costs to the ranks' work and time by least squares, with smaller weights for older rounds.

        Times are scaled to a rank of average speed.
        """
        columns = [*loads, seconds * self._speeds]
        self._products = [
            [KEPT * seen + _sum(columns[i] * columns[j]) for j, seen in enumerate(line)]
            for i, line in enumerate(self._products)
        ]
        self._seen = KEPT * self._seen + self._num_ranks
        sample, step, client = costs_of(self._products, self._seen)
        if sample or step or client:
            self._cost = WorkCost(sample, step, client, self._cost.tile)

    def _learn_speeds(self, work: np.ndarray, seconds: np.ndarray) -> None:
        """Update each rank's speed relative to the average, from its work and its time."""
        known = (work > 0) & (seconds > 0)
        if not known.any():
            return
        rates = work[known] / seconds[known]
        shown = np.clip(rates / (_sum(rates) / len(rates)), 1 / FASTEST, FASTEST)
        self._rounds += 1
        share = max(LEARNED, 1 / (1 + self._rounds))  # at first a plain average over rounds
        self._speeds[known] += share * (shown - self._speeds[known])


def _sum(values: np.ndarray) -> float:
    """Return the sum in the order of the values, on every processor."""
    return float(np.cumsum(values)[-1])


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
