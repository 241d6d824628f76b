"""LEAF's synthetic classification, as in GeL's experiments: 1000 clients of very different size, and a test set.

Client k of N has n_k samples (x, y) with x in R^d and y in {0, …, K−1}; z stands for fresh standard normal numbers:

    n_k = min(5 + ⌊exp(3 + 2 z)⌋, 1000)
    u_k ~ N(m, 0.1²)     m ~ N(l, 1)     l ~ N(0, 1)     Q = z (d + 1, K)     common to all clients: l, m, Q
    x ~ N(v_k, Σ)        v_k ~ N(B_k, 1) entry by entry   B_k ~ N(0, 1)       Σ diagonal, Σ_jj = j^−1.2
    y = argmax(u_k Qᵀ (1, x) + 0.1 z)

The u_k only scale the logits: clients agree on how to classify, and differ in features and in size. Of each client
⌊0.9 n_k⌋ samples are for training, the rest for the common test set; with LEAF's own numbers, N = 1000, K = 5, d = 60
and seed 931231, that makes the 96,374 training samples of GeL's table 4, and 11,179 to test.

n_k, x and y are LEAF's, number for number: numpy's legacy generator, seeded once for the sizes and once more for all
else (so that the sizes and Q come from the same normal numbers), with a draw for the cluster, of which LEAF has one.
The training samples are drawn with a seed here: LEAF's scripts seed that draw from the clock by default.

References: Caldas et al., "LEAF: a benchmark for federated settings", arXiv 1812.01097, appendix on the synthetic data;
data/synthetic/ and data/utils/split_data.py of its code. Boukhari et al., arXiv 2110.11486, table 4.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin
from data_prep.synthetic._draws import TRAIN_FRACTION, deviations, for_training
from hpcfed.errors import InputError

NAME = "leaf-synthetic"
SEED = 931231
LARGEST_SEED = 2**32 - 1
SMALLEST, LARGEST = 5, 1000
LOG_MEAN, LOG_DEVIATION = 3, 2
NOISE = 0.1


def generate(seed: int = SEED, *, clients: int = 1000, dimension: int = 60, classes: int = 5) -> Dataset:
    """Return x (n, d) float64 and y (n,) int64, split into clients of adjacent rows, and the common test set.

    Clients are in LEAF's order in both sets, and a client's samples are in the order they were drawn; `rows` counts
    the samples of both sets together.

    Raises:
        InputError: the seed is beyond the 32 bits that numpy's legacy generator takes.
    """
    if seed > LARGEST_SEED:
        raise InputError(f"seed of {NAME}", expected=f"at most {LARGEST_SEED}", got=str(seed))
    sizes = _sizes(seed, clients)
    x, y = _samples(seed, sizes, dimension, classes)
    dataset = Dataset(
        name=NAME,
        task="classification",
        x=x,
        y=y,
        num_classes=classes,
        source={
            "generator": "LEAF, data/synthetic, one cluster",
            "clients": clients,
            "dimension": dimension,
            "classes": classes,
            "train_fraction": TRAIN_FRACTION,
            "seed": seed,
        },
        owner=np.repeat(np.arange(clients), sizes),
    )
    return replace(dataset.with_tests(~for_training(NAME, seed, sizes)), test_owner=None)


def _sizes(seed: int, num_clients: int) -> np.ndarray:
    """Return n_k (N,) int64."""
    drawn = np.random.RandomState(seed).lognormal(LOG_MEAN, LOG_DEVIATION, num_clients)
    return np.minimum(SMALLEST + drawn.astype(np.int64), LARGEST)


def _samples(seed: int, sizes: np.ndarray, dimension: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, d) and y (n,) of all clients, drawn in LEAF's order."""
    rng = np.random.RandomState(seed)
    q = rng.normal(size=(dimension + 1, classes))
    mean_scale = rng.normal(rng.normal(), 1)
    deviation = deviations(dimension)
    x, y = np.empty((sizes.sum(), dimension)), np.empty(sizes.sum(), np.int64)
    stops = np.cumsum(sizes)
    for start, stop in zip(stops - sizes, stops, strict=True):
        rng.random_sample()  # the cluster
        centre = rng.normal(rng.normal(), 1, dimension)
        x[start:stop] = centre + deviation * rng.standard_normal((stop - start, dimension))
        model = q * rng.normal(mean_scale, NOISE)
        noise = rng.normal(0, NOISE, (stop - start, classes))
        y[start:stop] = np.argmax(model[0] + x[start:stop] @ model[1:] + noise, axis=1)
    return x, y


SOURCES = {NAME: DataSource(generate, Origin("LEAF's synthetic classification, made from the seed"), seed=SEED)}
