"""Dirichlet over classes, per client: sizes are fixed, the class mixture of each client is drawn (FedExP, FedDyn).

    prior_k ~ Dir(α·1_K) for each client k;  then, until every sample has its client:
        pick a client that still has room;  a class from its prior, again while that class is used up;
        give it the next sample of that class (samples in random order, none twice)

Not to be confused with `dirichlet_class`, which divides each class over the clients and leaves the sizes to chance.

References: Acar et al., "FedDyn", ICLR 2021 (utils_dataset.py:112-194 of its code); Jhunjhunwala et al., "FedExP",
ICLR 2023, appendix D.2 (util_data.py:61-113), after Hsu et al., arXiv 1909.06335.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from data_prep.partition._sizes import SIGMA, draw, positive

BLOCK = 1 << 16


def assign(
    labels: np.ndarray,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.3,
    sizes: str = "equal",
    sigma: float = SIGMA,
    min_samples: int = 1,
) -> np.ndarray:
    """Return owner (n,) int64 for labels (n,) of 0 … K-1; sizes are equal up to one, or lognormal with `sigma`, and at
    least `min_samples`.

    Redrawing after a used-up class is the same as drawing from the prior over the classes left, so a client's prior is
    restricted to those when it first hits a used-up class, and redrawing always ends.

    Raises:
        InputError: not enough samples for the clients, or options out of range.
    """
    positive("alpha", alpha)
    room = draw(sizes, sigma, len(labels), num_clients, rng, min_samples).tolist()
    num_classes = int(labels.max()) + 1
    priors = rng.dirichlet(np.full(num_classes, alpha), num_clients)
    # For each class its samples in random order, taken from the end.
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(num_classes)]
    cumulative = _cumulative(priors, pools)

    owner = np.empty(len(labels), np.int64)
    with_room = list(range(num_clients))
    uniform = _uniform(rng)
    for _ in range(len(labels)):
        position = int(next(uniform) * len(with_room))
        k = with_room[position]
        c = _draw_class(cumulative[k], next(uniform))
        while not pools[c]:
            cumulative[k] = _cumulative(priors[k : k + 1], pools)[0]
            c = _draw_class(cumulative[k], next(uniform))
        owner[pools[c].pop()] = k
        room[k] -= 1
        if not room[k]:
            with_room[position] = with_room[-1]
            with_room.pop()
    return owner


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    """Yield uniform numbers in [0, 1), drawn in blocks: a call per number would dominate the run time."""
    while True:
        yield from rng.random(BLOCK).tolist()


def _draw_class(cumulative: list[float], uniform: float) -> int:
    """Return a class by inversion; classes of no weight have an empty interval and are never drawn."""
    return bisect_right(cumulative, uniform * cumulative[-1])


def _cumulative(priors: np.ndarray, pools: list[list[int]]) -> list[list[float]]:
    """Return the running sums (N, K) of priors (N, K) over the classes that still have samples.

    If small α leaves a client no weight on them, the numbers of samples left are its weights.
    """
    left = np.array([len(pool) for pool in pools], dtype=float)
    weights = priors * (left > 0)
    lost = weights.sum(axis=1) < np.finfo(float).tiny
    weights[lost] = left
    return np.cumsum(weights, axis=1).tolist()
