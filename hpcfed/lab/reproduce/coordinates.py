"""Metrics for the two coordinates of w: outputs of the model w ↦ aᵀw on a test set of the plane's unit vectors a."""

from __future__ import annotations

from torch import Tensor


def first(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Return w_1, the output on the first unit vector."""
    return float(output[0]), 1


def second(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Return w_2, the output on the second unit vector, the last sample."""
    return float(output[-1]), 1
