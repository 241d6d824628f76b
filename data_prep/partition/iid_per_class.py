"""Exact IID: each class is dealt out like cards, so that all clients hold the same classes in the same numbers.

Per class, and over all classes, clients differ by one sample at most. Where the number of clients divides every class,
as FedDyn's 100 or 500 clients do CIFAR-100's 500 images a class, they do not differ at all. Not to be confused with
`iid`, which leaves the classes of a client to chance.

Reference: Acar et al., "FedDyn", ICLR 2021 (utils_dataset.py:179-199 of its code, CIFAR-100).
"""

from __future__ import annotations

import numpy as np

from data_prep.partition._sizes import by_class, enough


def assign(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Return owner (n,) int64 for labels (n,) of 0 … K-1.

    Raises:
        InputError: more clients than samples.
    """
    enough(len(labels), num_clients, 1)
    owner = np.empty(len(labels), np.int64)
    order = by_class(labels, rng)
    owner[order] = rng.permutation(num_clients)[np.arange(len(labels)) % num_clients]
    return owner
