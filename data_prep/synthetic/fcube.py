"""FCUBE: a cube whose eight corners are dealt to four clients, two opposite ones each; a plane divides the classes.

    client k = 0 … 3 has u_j ~ U(0, 1), the second feature negated for k ≥ 2, the third for odd k:
    every other sample is u, of class 0, the others are −u, of class 1;     test: U(−1, 1)³, class 1 where x_1 ≤ 0

so that clients agree on the plane x_1 = 0 that separates the classes, and differ in their features.

Reference: Li et al., "Federated learning on non-IID data silos", ICDE 2022 (`generated` of NIID-Bench, utils.py).
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin
from data_prep.streams import stream

NAME = "fcube"
CLIENTS, SAMPLES, TEST = 4, 1000, 1000


def generate(seed: int) -> Dataset:
    """Return x (4000, 3) float32 and y (4000,) int64, 1,000 adjacent rows a client, and 1,000 samples to test on."""
    owner, place = np.repeat(np.arange(CLIENTS), SAMPLES), np.tile(np.arange(SAMPLES), CLIENTS)
    x = stream(seed, f"{NAME}: features").random((len(owner), 3))
    x[owner > 1, 1] *= -1
    x[owner % 2 == 1, 2] *= -1
    y = place % 2
    x[y == 1] *= -1
    test_x = stream(seed, f"{NAME}: test").uniform(-1, 1, (TEST, 3))
    return Dataset(
        name=NAME,
        task="classification",
        x=x.astype(np.float32),
        y=y,
        num_classes=2,
        test_x=test_x.astype(np.float32),
        test_y=(test_x[:, 0] <= 0).astype(np.int64),
        source={"generator": "FCUBE of NIID-Bench", "seed": seed},
        owner=owner,
    )


SOURCES = {NAME: DataSource(generate, Origin("NIID-Bench's cube of two classes, four clients, made from the seed"))}
