"""A number of classes per client: #C = k. Client i holds class i modulo K and k − 1 random others.

A class is divided into equal parts, one for each client that holds it. With fewer clients than classes the others are
first those that nobody holds yet, so that no sample is lost.

Not to be confused with `shards`, by which a client may hold fewer or more classes.

Reference: Li et al., "Federated learning on non-IID data silos", ICDE 2022 (`noniid-#label` of NIID-Bench).
"""

from __future__ import annotations

import numpy as np

from hpcfed.errors import InputError, counted


def assign(labels: np.ndarray, num_clients: int, rng: np.random.Generator, *, per_client: int = 2) -> np.ndarray:
    """Return owner (n,) int64 for labels (n,) of 0 … K-1.

    Raises:
        InputError: a class would have no client, fewer samples than clients, or there are fewer than k classes.
    """
    sizes = np.bincount(labels)
    num_classes = len(sizes)
    if not 1 <= per_client <= num_classes:
        raise InputError("--per-client", expected=f"1 to {num_classes} classes", got=str(per_client))
    if num_clients * per_client < num_classes:
        got = f"{counted(num_clients, 'client')} of {per_client}"
        raise InputError("classes without a client", expected=f"room for {num_classes}", got=got)
    holders: list[list[int]] = [[k for k in range(num_clients) if k % num_classes == c] for c in range(num_classes)]
    held: list[set[int]] = [{k % num_classes} for k in range(num_clients)]
    for k, own in enumerate(held):
        while len(own) < per_client:
            unheld = [c for c in range(num_classes) if not holders[c]]
            c = int(rng.choice(unheld or [c for c in range(num_classes) if c not in own]))
            own.add(c)
            holders[c].append(k)
    owner = np.empty(len(labels), np.int64)
    for c, clients in enumerate(holders):
        if 0 < sizes[c] < len(clients):
            got = f"{counted(int(sizes[c]), 'sample')} of class {c} for {counted(len(clients), 'client')}"
            raise InputError("more clients than samples of a class", got=got, remedy="ask for fewer clients")
        own_rows = rng.permutation(np.flatnonzero(labels == c))
        for k, rows in zip(clients, np.array_split(own_rows, len(clients)), strict=True):
            owner[rows] = k
    return owner
