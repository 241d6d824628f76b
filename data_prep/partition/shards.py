"""Shards: samples sorted by class and cut into N·s equal pieces, of which every client gets s (McMahan's pathological).

With two shards, ten classes and many clients, a client holds two classes, some one or three. Clients differ by `shards`
samples at most.

Reference: McMahan et al., AISTATS 2017, section 3: "we first sort the data by digit label, divide it into 200 shards of
size 300, and assign each of 100 clients 2 shards".
"""

from __future__ import annotations

import numpy as np

from data_prep.partition._sizes import by_class, enough
from hpcfed.errors import InputError


def assign(labels: np.ndarray, num_clients: int, rng: np.random.Generator, *, shards: int = 2) -> np.ndarray:
    """Return owner (n,) int64 for labels (n,) of 0 … K-1; the samples of a class are shuffled before they are cut.

    Raises:
        InputError: fewer than one shard a client, or more shards than samples.
    """
    if shards < 1:
        raise InputError("--shards", expected="at least 1 a client", got=str(shards))
    enough(len(labels), num_clients, shards)
    order, number = by_class(labels, rng), num_clients * shards
    shard = np.arange(len(labels)) * number // len(labels)
    owner = np.empty(len(labels), np.int64)
    owner[order] = rng.permutation(np.repeat(np.arange(num_clients), shards))[shard]
    return owner
