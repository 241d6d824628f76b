"""The norm of several vectors together, and the factor that bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from hpcfed.arithmetic.sums import squared_norm
from hpcfed.updates._base import Vectors


def clip_factor(vectors: Vectors, norm: float, scales: Mapping[str, float]) -> float:
    """Return min(1, C / √Σ ‖v/s‖²); 1 where a vector is not finite, so that it stays so."""
    total = sum(squared_norm(vector.double()) / scales.get(name, 1.0) ** 2 for name, vector in vectors.items())
    return min(1.0, norm / sqrt(total)) if total > 0 else 1.0
