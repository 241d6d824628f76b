"""Metrics that read the two coordinates of w: a linear model's outputs aᵀw on a test set of the two unit vectors a."""

from __future__ import annotations

from torch import Tensor


def first(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Return w_1, the output on the first unit vector, and the count 1."""
    return float(output[0]), 1


def second(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Return w_2, the output on the second unit vector (the last sample), and the count 1."""
    return float(output[-1]), 1
