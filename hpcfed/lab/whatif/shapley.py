"""Leave-one-out and Shapley values of clients, from the scores v(S) of models trained on subsets S of them.

    leave-one-out   v(all) − v(all without i)
    Shapley         φ_i = Σ_{S without i} |S|! (N − |S| − 1)! / N! · (v(S and i) − v(S))

or, sampled, the mean increase of v when i joins the clients before it, over random orders of all clients. The φ_i sum
to v(all) − v(none).

References: Shapley, "A value for n-person games", 1953; Castro, Gómez, Tejada, "Polynomial calculation of the Shapley
value based on sampling", Computers & Operations Research 2009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hpcfed.lab.report.paired import MeanEstimate, estimated

Subset = frozenset[int]
Orders = Sequence[Sequence[int]]
ROUNDING = 64 * np.finfo(np.float64).eps
"""Largest difference that counts as rounding, relative to the largest score: the 2^(N − 1) = 32 terms of a Shapley
value of N = 6 clients are each rounded twice, by half an ε or less, before they are averaged over seeds."""


def all_subsets(num_clients: int) -> list[Subset]:
    """Return all subsets of the clients, the smallest first."""
    members = range(num_clients)
    return [frozenset(own) for size in range(num_clients + 1) for own in itertools.combinations(members, size)]


def without_one(num_clients: int) -> list[Subset]:
    """Return the set of all clients, then the N subsets that leave out one client, in the clients' order."""
    every = frozenset(range(num_clients))
    return [every, *(every - {k} for k in range(num_clients))]


def random_orders(num_clients: int, count: int) -> list[list[int]]:
    """Return `count` random orders of the clients; a larger `count` only adds orders at the end."""
    rng = np.random.default_rng(0)
    return [rng.permutation(num_clients).tolist() for _ in range(count)]


def subsets_of(orders: Orders) -> list[Subset]:
    """Return the sets formed by the first 0, 1, … N clients of each order, each set once."""
    found = (frozenset(order[:size]) for order in orders for size in range(len(order) + 1))
    return list(dict.fromkeys(found))


def leave_one_out(values: Mapping[Subset, float], num_clients: int) -> np.ndarray:
    """Return each client's leave-one-out value, v(all) − v(all without the client), (N,)."""
    every, *others = without_one(num_clients)
    return np.array([values[every] - values[other] for other in others])


def shapley(values: Mapping[Subset, float], num_clients: int) -> np.ndarray:
    """Return the clients' Shapley values, (N,), from the values v(S) of all subsets S."""
    found = np.zeros(num_clients)
    for subset in all_subsets(num_clients):
        for k in set(range(num_clients)) - subset:
            weight = 1 / (num_clients * math.comb(num_clients - 1, len(subset)))
            found[k] += weight * (values[subset | {k}] - values[subset])
    return found


def added_in(orders: Orders, values: Mapping[Subset, float]) -> np.ndarray:
    """Return the increase of v(S) when each client joins the clients before it in each order, (orders, N)."""
    found = np.zeros((len(orders), len(orders[0])))
    for row, order in enumerate(orders):
        for before, k in enumerate(order):
            found[row, k] = values[frozenset(order[: before + 1])] - values[frozenset(order[:before])]
    return found


def estimates(samples: np.ndarray, scores: Iterable[float]) -> list[MeanEstimate]:
    """Return mean and Student's t interval of each column of `samples`, (n, N), which are differences of `scores`.

    Their rounding errors may reach `ROUNDING` times the largest of `scores`: a mean up to this size becomes 0, and
    values of a column that differ by no more count as equal.
    """
    noise = ROUNDING * max((abs(score) for score in scores if math.isfinite(score)), default=0.0)
    return [estimated(own, noise) for own in samples.T]


def mean_over(values: Sequence[Mapping[Subset, float]]) -> dict[Subset, float]:
    """Return subset → mean of its value over seeds; `values` has a mapping per seed."""
    return {subset: float(np.mean([one[subset] for one in values])) for subset in values[0]}


def as_numbers(subset: Subset) -> str:
    """Return the members' numbers as text, ``0+3``; ``none`` for the empty subset."""
    return "+".join(map(str, sorted(subset))) or "none"
