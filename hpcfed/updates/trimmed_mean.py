"""Trimmed mean: of each entry the mean of the clients' values without the largest and the smallest ones.

    Δ̄_j = mean of v_(k+1)j … v_(m−k)j,  sorted;      k = ⌊β m⌋

    β     ``fraction``, below ½

Each client counts once, whatever its samples. Each rank holds all updates of the cohort. Packed: as before, for the
rule is the server's. State: none.

Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018, Definition 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from hpcfed.arithmetic.elementary import quotient
from hpcfed.arithmetic.sums import sum_over_first
from hpcfed.updates._base import PartContext
from hpcfed.updates._robust import ClientVectors, RobustMean, by_columns

if TYPE_CHECKING:
    from torch import Tensor


class TrimmedMean(RobustMean):
    """The mean of each entry without its extremes."""

    fraction: float = Field(ge=0, lt=0.5)

    def cut(self, size: int) -> int:
        """Return k, the values that are left out at each end, for so many clients."""
        floor = math.floor(self.fraction * size + 1e-9)  # as 0.29 · 100 is 28.999999999999996
        return min(floor, max(size - 1, 0) // 2)

    def of(self, vectors: ClientVectors, context: PartContext) -> Tensor:
        rows = vectors.rows()
        cut = self.cut(len(rows))
        left = slice(cut, len(rows) - cut)
        return by_columns(rows, lambda values: quotient(sum_over_first(values[left]), len(values) - 2 * cut))


MEANS = TrimmedMean
TITLE, REFERENCES = "trimmed mean", ("yin2018byzantine",)
EXAMPLE = {"fraction": 0.3}
