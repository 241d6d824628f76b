"""IID: samples in random order, cut into clients."""

from __future__ import annotations

import numpy as np

from data_prep.partition._sizes import SIGMA, draw


def assign(
    labels: np.ndarray,
    num_clients: int,
    rng: np.random.Generator,
    *,
    sizes: str = "equal",
    sigma: float = SIGMA,
    min_samples: int = 1,
) -> np.ndarray:
    """Return owner (n,) int64; sizes are equal up to one, or lognormal with `sigma`, and at least `min_samples`.

    Raises:
        InputError: not enough samples for the clients, or options out of range.
    """
    counts = draw(sizes, sigma, len(labels), num_clients, rng, min_samples)
    return rng.permutation(np.repeat(np.arange(num_clients), counts))
