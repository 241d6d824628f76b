"""FedExP's toy of two clients in the plane, in which the last iterate oscillates and the average of two does not.

    F_1(w) = (3 w_1 + w_2 − 3)²     F_2(w) = (w_1 + w_2 − 3)²     common minimum (0, 3)

Each client holds one row a_i with target 3, so that F_i(w) = (a_iᵀ w − 3)².

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, equation 12 and figure 2.
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin

ROWS = ((3.0, 1.0), (1.0, 1.0))
TARGET = 3.0


def generate() -> Dataset:
    """Return x (2, 2) and y (2, 1), float64: one row for each of the two clients."""
    return Dataset(
        name="toy2d",
        task="regression",
        x=np.array(ROWS),
        y=np.full((len(ROWS), 1), TARGET),
        source={"generator": "FedExP, equation 12: two quadratics in the plane"},
        owner=np.arange(len(ROWS)),
    )


SOURCES = {"toy2d": DataSource(generate, Origin("FedExP's toy of two clients in the plane"))}
