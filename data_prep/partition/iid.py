"""IID: samples in random order, cut into clients."""

from __future__ import annotations

import numpy as np

from data_prep.partition.sizes import draw


def assign(
    labels: np.ndarray, num_clients: int, rng: np.random.Generator, *, sizes: str = "equal", sigma: float = 1.0
) -> np.ndarray:
    """Return owner (n,) int64; sizes are equal up to one, or lognormal with `sigma`.

    Raises:
        InputError: more clients than samples, or options out of range.
    """
    return rng.permutation(np.repeat(np.arange(num_clients), draw(sizes, sigma, len(labels), num_clients, rng)))
