"""Dirichlet over clients, per class: each class is divided among the clients, whose sizes are left to chance.

    shares_c ~ Dir(α·1_N) for each class c;  client k gets the share shares_ck of the samples of c (in random order)

Not to be confused with `dirichlet_client`, which fixes the sizes and draws a class mixture per client; Hsu et al. are
commonly cited for both.

With ``capped`` a client that has its n/N samples already gets none of the further classes, in whose order they are
dealt: the label skew of NIID-Bench, which asks for ``min_samples`` 10.

References: Hsu, Qi, Brown, arXiv 1909.06335; in this form Yurochkin et al., ICML 2019, section 4; capped Li et al.,
"Federated learning on non-IID data silos", ICDE 2022 (`noniid-labeldir` of NIID-Bench).
"""

from __future__ import annotations

import numpy as np

from data_prep.partition._sizes import DRAWS, counts_of, enough, none_drawn, positive


def assign(
    labels: np.ndarray,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.3,
    min_samples: int = 1,
    capped: bool = False,
) -> np.ndarray:
    """Return owner (n,) int64 for labels (n,) of 0 … K-1, drawn again until every client has `min_samples`.

    Raises:
        InputError: α not positive, or no draw of 1000 gave every client its `min_samples`.
    """
    positive("alpha", alpha)
    enough(len(labels), num_clients, min_samples)
    classes = [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]
    for _ in range(DRAWS):
        most = len(labels) / num_clients if capped else np.inf
        counts, had = list[np.ndarray](), np.zeros(num_clients, np.int64)
        for rows in classes:
            shares = rng.dirichlet(np.full(num_clients, alpha)) * (had < most)
            counts.append(counts_of(shares if shares.sum() else (had < most).astype(float), len(rows)))
            had = had + counts[-1]
        if np.sum(counts, axis=0).min() >= min_samples:
            break
    else:
        raise none_drawn(num_clients, min_samples)
    owner = np.empty(len(labels), np.int64)
    for rows, sizes in zip(classes, counts, strict=True):
        owner[rows] = rng.permutation(np.repeat(np.arange(num_clients), sizes))
    return owner
