"""Quantity skew: sizes are drawn, and every client's samples are random ones of all.

    shares ~ Dir(α·1_N);  client k gets the share shares_k of the samples, in random order

Drawn again until every client has ``min_samples``, for which NIID-Bench takes 10.

Reference: Li et al., "Federated learning on non-IID data silos", ICDE 2022 (`iid-diff-quantity` of NIID-Bench).
"""

from __future__ import annotations

import numpy as np

from data_prep.partition._sizes import DRAWS, counts_of, enough, none_drawn, positive


def assign(
    labels: np.ndarray, num_clients: int, rng: np.random.Generator, *, alpha: float = 0.5, min_samples: int = 1
) -> np.ndarray:
    """Return owner (n,) int64 for labels (n,), of which their number alone matters.

    Raises:
        InputError: α not positive, or no draw of 1000 gave every client its `min_samples`.
    """
    positive("alpha", alpha)
    enough(len(labels), num_clients, min_samples)
    for _ in range(DRAWS):
        sizes = counts_of(rng.dirichlet(np.full(num_clients, alpha)), len(labels))
        if sizes.min() >= min_samples:
            return rng.permutation(np.repeat(np.arange(num_clients), sizes))
    raise none_drawn(num_clients, min_samples)
