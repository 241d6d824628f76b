"""The coordinates of a model w ↦ aᵀw in the plane, as metrics: a test set of unit vectors a has them as outputs."""

from __future__ import annotations

from torch import Tensor


def first(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Return w_1, the answer to the first unit vector."""
    return float(output[0]), 1


def second(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Return w_2, the answer to the second and last one."""
    return float(output[-1]), 1
