"""Krum: the vector that is nearest to its neighbours; multi-Krum: the mean of several such ones.

    s_i = Σ ‖v_i − v_j‖²  over the m − f − 2 nearest j ≠ i;      Δ̄ = mean of the vectors of the k smallest s_i

    f     ``attackers``, with m ≥ 2f + 3                k     ``selected``, at most m − f − 2; 1 is Krum

Each client counts once, whatever its samples; of equal scores the first. A method's vectors are chosen each by itself.
Each rank holds all updates of the cohort, and computes its share of the m² distances. Packed: as before, for the rule
is the server's. State: none.

Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NeurIPS 2017, Section 4; multi-Krum: Section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hpcfed.arithmetic.elementary import quotient
from hpcfed.arithmetic.sums import sum_over_first
from hpcfed.updates._base import PartContext
from hpcfed.updates._robust import ClientVectors, RobustMean

if TYPE_CHECKING:
    from torch import Tensor


class Krum(RobustMean):
    """Vectors that have many others near them."""

    attackers: int = Field(ge=0)
    selected: int = Field(1, ge=1)

    @property
    def least(self) -> int:
        return max(2 * self.attackers + 3, self.attackers + 2 + self.selected)

    def of(self, vectors: ClientVectors, context: PartContext) -> Tensor:
        import numpy as np

        squares = vectors.squared_distances()
        size = len(squares)
        others = np.sort(squares + np.diag(np.full(size, np.inf)), axis=1)
        scores = sum_over_first(others[:, : size - self.attackers - 2].T.copy())
        chosen = np.sort(np.argsort(scores, kind="stable")[: self.selected])
        return quotient(sum_over_first(vectors.rows()[chosen].double()), len(chosen))


MEANS = Krum
TITLE, REFERENCES = "Krum", ("blanchard2017machine",)
EXAMPLE = {"attackers": 1}
