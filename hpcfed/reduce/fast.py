"""Sums of float32 vectors in float32: half the bytes of exact ones, and bits that depend on the order of addition.

A round's scalars stay exact: the 64 bits of a slot go as four float32 of 16 bits each, to which all other ranks add 0.
MPI gives every rank the same sums; should it not, the hashes of the next round differ.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hpcfed.ranks.accelerators import upload
from hpcfed.reduce.rows import Number, Numbers, Rows, Words
from hpcfed.reduce.units import Units

BLOCK = 1 << 18  # entries worked on at a time: few calls, and squares summed in float32 over no more than these
SQUARES = 1e-25, 1e37
"""Sums of squares that float32 can hold, and in which none that counts has vanished."""


class FastSum:
    """Accumulates weighted vectors (d,) into d float32; the same interface as `hpcfed.reduce.exact.ExactSum`.

    It has no units: where one names them, they are not looked at.

    Attributes:
        floats: (1, d) float32, the running sum; correct only after `settle`.
        rows: vectors that wait for `add_rows`.
    """

    word: ClassVar[torch.dtype] = torch.float32
    slot_words: ClassVar[int] = 4
    """Words that an int64 takes up beside the sums."""
    range: ClassVar[float] = torch.finfo(torch.float32).max
    """Magnitude that a sum must stay below."""

    def __init__(self, floats: Words, units: Units = ()):
        self.floats, like = floats, floats[0]
        self._empty, self._number = False, 1
        self.rows = Rows(len(like), torch.float32, like.device)
        self._block = BLOCK if like.device.type == "cpu" else max(len(like), 1)

    def begin(self, floats: Words, units: Units = (), number: int = 1, expected: int = 1) -> None:
        """Start a sum over `number` in this memory; its content is overwritten."""
        self.floats, self._number = floats, number
        self._empty = True

    def add(self, vector: Tensor, weight: float) -> tuple[Number, Number]:
        """Add ``weight·vector / number``; return the vector's squared norm, and a bound on its largest entry, the norm.

        The norm is right to some 1e-6 of itself. Both are NaN or infinite where the vector is.
        """
        if vector.device.type != "cpu":
            return self._add_async(vector, weight)
        squared, share = 0.0, weight / self._number
        for start in range(0, vector.numel(), self._block):
            piece, total = vector[start : start + self._block], self.floats[0][start : start + self._block]
            squared += float(torch.dot(piece, piece))
            if self._empty:
                torch.mul(piece, share, out=total)
            else:
                total.add_(piece, alpha=share)
        self._empty = False
        if not SQUARES[0] < squared < SQUARES[1]:  # squares that float32 cannot hold
            squared = float(vector.double().square_().sum())
        return squared, math.sqrt(squared)

    def add_rows(self, weights: np.ndarray) -> tuple[Numbers, Numbers]:
        """Add the first of `rows` by weights (n,); return squared norms and bounds, (n,), as `add` does."""
        rows, total = self.rows.first(len(weights)), self.floats[0]
        dots = torch.stack([torch.dot(row, row) for row in rows])
        shares = torch.from_numpy(weights / self._number)
        added = torch.mv(rows.T, upload(shares, rows.device).to(rows.dtype))
        if self._empty:
            total.copy_(added)
        else:
            total.add_(added)
        self._empty = False
        if rows.device.type != "cpu":
            return _norms_async(dots, rows)
        squared = dots.double().numpy()
        for row in np.flatnonzero(~((SQUARES[0] < squared) & (squared < SQUARES[1]))):
            squared[row] = float(rows[row].double().square_().sum())
        return squared, np.sqrt(squared)

    def _add_async(self, vector: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """`add` for a vector on a GPU: no host synchronisation."""
        if self._empty:
            torch.mul(vector, weight / self._number, out=self.floats[0])
        else:
            self.floats[0].add_(vector, alpha=weight / self._number)
        self._empty = False
        return _norms_async(torch.dot(vector, vector), vector)

    def settle(self, first: int = 0, last: int | None = None) -> None:
        """Set the entries ``first:last`` to 0 if no vector was added."""
        if self._empty:
            self.floats[0][first:last].zero_()

    @staticmethod
    def words_of(units: Units) -> int:
        """Return the words of an entry."""
        return 1

    @staticmethod
    def usual_words(dtype: torch.dtype) -> int:
        """Return the words of an entry in a round whose magnitudes are like those of rounds before."""
        return 1

    @staticmethod
    def read(floats: Words, units: Units, number: int, out: Tensor) -> None:
        """Write the sum over `number`, which it is already, as float64, (d,), from its (1, d) numbers."""
        out.copy_(floats[0])

    @staticmethod
    def write_slots(slots: np.ndarray, words: np.ndarray) -> None:
        """Write int64 slots (n,), all but one rank's 0, as words (4n,) to be summed."""
        words[:] = slots.view(np.uint16)

    @staticmethod
    def read_slots(words: np.ndarray, slots: np.ndarray) -> None:
        """Read them back, (n,) from (4n,)."""
        slots.view(np.uint16)[:] = words


def _norms_async(squared: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared norms in float64, and norms, from float32 dot products where these can hold them."""
    holds = (squared > SQUARES[0]) & (squared < SQUARES[1])
    exact = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).square()
    right = torch.where(holds, squared.double(), exact)
    return right, right.sqrt()
