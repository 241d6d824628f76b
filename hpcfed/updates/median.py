"""Coordinate-wise median: of each entry the middle one of the clients' values.

    Δ̄_j = med {v_1j, …, v_mj};      of an even number the mean of the two in the middle

Each client counts once, whatever its samples. Each rank holds all updates of the cohort. Packed: as before, for the
rule is the server's. State: none.

Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018, Definition 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfed.updates._base import PartContext
from hpcfed.updates._robust import ClientVectors, RobustMean, by_columns

if TYPE_CHECKING:
    from torch import Tensor


class Median(RobustMean):
    """The median of each entry."""

    def of(self, vectors: ClientVectors, context: PartContext) -> Tensor:
        rows = vectors.rows()
        low, high = (len(rows) - 1) // 2, len(rows) // 2
        return by_columns(rows, lambda values: (values[low] + values[high]) / 2)


MEANS = Median
TITLE, REFERENCES = "coordinate-wise median", ("yin2018byzantine",)
EXAMPLE: dict[str, float] = {}
