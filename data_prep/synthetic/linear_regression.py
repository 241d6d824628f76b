"""FedExP's linear regression: 20 clients of 30 samples, float64, no test set; overparameterized in its 1000 dimensions.

    (A_i)_j ~ N(m_i, I)     b_ij = w_iᵀ (A_i)_j     m_i ~ N(u_i, I)   w_i ~ N(v_i, I)   u_i, v_i ~ N(0, 0.1²)

Then every row of A_i and every vector b_i is scaled to unit norm, as in the authors' code, so that
mean_i ‖A_i w − b_i‖² = 1 at w = 0. The 0.1 is a standard deviation there. In fewer than 600 dimensions no w fits all
clients, whose gradients at the common minimum then differ.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, appendix D.2; linear_regression.ipynb of its code.
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin
from data_prep.streams import stream

NUM_CLIENTS = 20
SAMPLES_PER_CLIENT = 30
DIMENSION = 1000
SPREAD = 0.1


def generate(seed: int, *, dimension: int = DIMENSION) -> Dataset:
    """Return x (600, d) and y (600, 1), float64, split into 20 clients of 30 adjacent rows; `dimension` is d."""
    rng = stream(seed, "linear regression")
    features, targets = zip(*(_client(rng, dimension) for _ in range(NUM_CLIENTS)), strict=True)
    return Dataset(
        name="linear-regression",
        task="regression",
        x=np.concatenate(features),
        y=np.concatenate(targets)[:, None],
        source={"generator": "FedExP, appendix D.2: linear regression", "dimension": dimension, "seed": seed},
        owner=np.repeat(np.arange(NUM_CLIENTS), SAMPLES_PER_CLIENT),
    )


def _client(rng: np.random.Generator, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw A_i (30, d) with rows of unit norm, and b_i (30,) of unit norm."""
    mean = rng.normal(rng.normal(0, SPREAD), 1, dimension)
    weights = rng.normal(rng.normal(0, SPREAD), 1, dimension)
    features = rng.normal(mean, 1, (SAMPLES_PER_CLIENT, dimension))
    targets = features @ weights
    return features / np.linalg.norm(features, axis=1, keepdims=True), targets / np.linalg.norm(targets)


SOURCES = {"linear-regression": DataSource(generate, Origin("FedExP's linear regression, made from the seed"))}
