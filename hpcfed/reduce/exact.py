"""Sums of floating-point vectors that do not depend on their order: fixed-point numbers in int64.

A number is rounded to a multiple of a fixed unit and added as an integer, which is associative, so any split of the
clients over ranks gives the same bits.

    float32 runs: one word in units of 2^-44, range ±2^19;
    float64 runs: two words, x = hi·2^-20 + lo·2^-64, range ±2^43.

Both leave headroom for 2^20 clients in the low word. A sum that leaves the range is told from the largest entries of
the contributions (see `largest`), never from a wrapped sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 15  # entries worked on at a time: their float64 and int64 copies stay in a core's cache


class ExactSum:
    """Accumulates weighted vectors (d,) into ``words·d`` integers.

    Attributes:
        integers: (words, d) int64, the running sum.
    """

    def __init__(self, integers: Tensor, dtype: torch.dtype):
        self.integers = integers
        self.units = units_of(dtype)
        block = min(BLOCK, integers.shape[1])
        self._floats = torch.empty(block, dtype=torch.float64, device=integers.device)
        self._rounded = torch.empty(block, dtype=torch.float64, device=integers.device)
        self._words = torch.empty(block, dtype=torch.int64, device=integers.device)

    def add(self, vector: Tensor, weight: float) -> tuple[float, float]:
        """Add ``weight·vector``; return the vector's squared norm, and the largest magnitude that was added.

        Both are NaN or infinite where the vector is; the sum is then meaningless, and the caller must say so.
        """
        squared, largest = [], []
        for start in range(0, vector.numel(), BLOCK):
            piece = vector[start : start + BLOCK]
            floats, rounded = self._floats[: piece.numel()], self._rounded[: piece.numel()]
            words = self._words[: piece.numel()]
            floats.copy_(piece)
            squared.append(torch.dot(floats, floats))
            floats.mul_(weight)
            largest.append(torch.linalg.vector_norm(floats, torch.inf))
            for row, unit in zip(self.integers, self.units, strict=True):
                torch.mul(floats, 1.0 / unit, out=rounded).round_()
                row[start : start + piece.numel()].add_(words.copy_(rounded))
                if unit != self.units[-1]:
                    floats.sub_(rounded.mul_(unit))
        return float(torch.stack(squared).sum()), float(torch.stack(largest).max())


def units_of(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the unit of each word, coarsest first."""
    return (2.0**-20, 2.0**-64) if dtype == torch.float64 else (2.0**-44,)


def range_of(dtype: torch.dtype) -> float:
    """Return the magnitude that a sum must stay below, with room for the rounding of its terms."""
    return 2.0**63 * units_of(dtype)[0] - 1.0


def to_float64(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum as float64, (d,), from its (words, d) integers."""
    units = units_of(dtype)
    total = integers[-1].to(torch.float64).mul_(units[-1])
    for row, unit in zip(integers[:-1], units[:-1], strict=True):
        total.add_(row.to(torch.float64), alpha=unit)
    return total
