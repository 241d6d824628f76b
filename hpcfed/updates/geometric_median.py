"""Geometric median by smoothed Weiszfeld steps: the point whose weighted distance from the clients' vectors is least.

    v ← Σ β_i v_i / Σ β_i,   β_i = p_i / max(ν, ‖v − v_i‖);      v = Σ p_i v_i at first

    steps     ``steps``                 ν   ``smoothing``

Each rank holds the updates that it has trained, no more; a step takes two Allreduces, of m distances and of a vector,
which the record counts. A method's vectors have a median each. Packed: as before, for the rule is the server's. State:
none.

Reference: Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on Signal
Processing 70, 2022, Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpcfed.updates._base import PartContext
from hpcfed.updates._robust import ClientVectors, RobustMean

if TYPE_CHECKING:
    from torch import Tensor


class GeometricMedian(RobustMean):
    """The point nearest to all."""

    holds_all: ClassVar[bool] = False

    steps: int = Field(8, ge=1)
    smoothing: float = Field(1e-6, gt=0)

    def of(self, vectors: ClientVectors, context: PartContext) -> Tensor:
        point = vectors.mean
        for _ in range(self.steps):
            beta = vectors.weights / vectors.distances(point).clip(min=self.smoothing)
            point = vectors.weighted(beta / beta.sum())
        return point


MEANS = GeometricMedian
TITLE, REFERENCES = "geometric median", ("pillutla2022robust",)
EXAMPLE = {"steps": 4}
