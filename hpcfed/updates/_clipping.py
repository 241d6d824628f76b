"""The norm of several vectors together, and the factor that bounds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING

from hpcfed.arithmetic.sums import squared_norm, squared_norms
from hpcfed.updates._base import Vectors

if TYPE_CHECKING:
    from torch import Tensor


def clip_factors(vectors: Vectors, norm: float, scales: Mapping[str, float]) -> list[float]:
    """Return min(1, C / √Σ ‖v/s‖²) of each of R clients, from their vectors, (R, n); 1 where one is not finite."""
    totals = [0.0] * len(next(iter(vectors.values())))
    for name, stack in vectors.items():
        for row, square in enumerate(_squared_norms(stack.double())):
            totals[row] += square / scales.get(name, 1.0) ** 2
    return [min(1.0, norm / sqrt(total)) if total > 0 else 1.0 for total in totals]


def factors_like(stack: Tensor, factors: Sequence[float]) -> Tensor:
    """Return a factor of each row, (R, 1)."""
    return stack.new_tensor(factors).unsqueeze(1)


def _squared_norms(rows: Tensor) -> list[float]:
    if rows.device.type == "cpu":
        return squared_norms(rows).tolist()
    return [squared_norm(row) for row in rows]
