"""Sums of floating-point vectors that do not depend on their order: fixed-point numbers in int64.

A number is rounded to a multiple of a unit and added as an integer, which is associative, so any split of the clients
over ranks gives the same bits. A sum has one or more words, x = Σ_k word_k · unit_k with decreasing units: each word
holds the remainder of the word before it. `hpcfed.reduce.units` chooses the units beforehand and checks them afterwards
against the largest entries of the contributions, not against the sum, which may have wrapped.

Rounding is one addition: the last bit of x + 1.5·2^52 in float64 has the value 1, so its bit pattern as an integer is
round(x) plus a constant. The constants of many contributions are subtracted together: those expected while the first is
written, and what is left by `ExactSum.settle`. This holds for |x| < 2^51 units; a block of a vector with a larger entry
is rounded and converted, to the same integers.

Reference: Demmel and Nguyen, "Fast reproducible floating-point summation", ARITH 2013, rounds to a common unit first.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import count, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.ranks.graphs import Graphs, Inputs
from hpcfed.reduce.rows import Number, Numbers, Rows, Words, rows_of
from hpcfed.reduce.units import RANGE, ROUNDABLE, Units

BLOCK = 1 << 18  # entries worked on at a time: few calls, and 2 MiB of scratch for any model
BIAS = 1.5 * 2.0**52
BIAS_BITS = 0x4338000000000000  # BIAS as an integer
ROUNDABLE_UNITS = 2.0**ROUNDABLE  # units; half of what the addition can round
_numbers = count()


class ExactSum:
    """Accumulates weighted vectors (d,) into ``words·d`` integers.

    Args:
        integers: (words, d) int64, memory of the sum, or its words, (d,) each; 0 to begin with.
        units: of its words.
        arithmetic: of vectors' norms on a host.
        graphs: records the adding of rows on a device.

    Attributes:
        integers: the running sum; correct only after `settle`.
        rows: vectors that wait for `add_rows`.
    """

    word: ClassVar[torch.dtype] = torch.int64
    slot_words: ClassVar[int] = 1
    """Words that an int64 takes up beside the sums."""
    range: ClassVar[float] = RANGE
    """Magnitude that a sum must stay below, in any units."""

    def __init__(self, integers: Words, units: Units, arithmetic: Arithmetic = LIBRARIES, graphs: Graphs | None = None):
        self.integers, like = integers, integers[0]
        self._units, self._arithmetic = units, arithmetic
        self._graphs = graphs or Graphs(like.device, records=False)
        self._number = next(_numbers)
        self._inputs, self._found = Inputs(like.device), like.new_empty(0, dtype=torch.float64)
        self._biased = self._expected = 0
        self._empty = False
        self._block = BLOCK if like.device.type == "cpu" else len(like)
        self._scaled = torch.empty(min(self._block, len(like)), dtype=torch.float64, device=like.device)
        self._rounded = torch.empty_like(self._scaled)
        self.rows = Rows(len(like), torch.float64, like.device)

    def begin(self, integers: Words, units: Units, number: int = 1, expected: int = 1) -> None:
        """Start a sum in this memory, (words, d), that `read` divides by `number`; its content is overwritten.

        Where there are `expected` calls of `add`, `settle` has nothing to do.
        """
        self.integers, self._units = integers, units
        self._biased, self._expected = 0, expected
        self._empty = True

    def add(self, vector: Tensor, weight: float) -> tuple[Number, Number]:
        """Add ``weight·vector``; return the vector's squared norm, and its largest magnitude, on its device.

        Both are NaN or infinite where the vector is; the sum is then meaningless, and the caller must say so.
        """
        if vector.device.type != "cpu":
            return self._add_async(vector, weight)
        squared, largest, offset = 0.0, 0.0, -self._expected if self._empty else 0
        for start in range(0, vector.numel(), self._block):
            piece = vector[start : start + self._block]
            low, high = torch.aminmax(piece)
            bound = max(-float(low), float(high))
            largest = max(largest, bound) if math.isfinite(bound) else math.inf
            scaled = self._scaled[: piece.numel()].copy_(piece)
            squared += self._arithmetic.squared_norm(scaled)
            scaled.mul_(weight / self._units[0])
            small = abs(weight) * bound < ROUNDABLE_UNITS * self._units[0]  # false for NaN, too
            self._add_block(start, scaled, small, offset if small else offset + 1)
        self._biased += offset + 1
        self._empty = False
        return squared, largest

    def add_rows(self, weights: np.ndarray) -> tuple[Numbers, Numbers]:
        """Add the first of `rows` by weights (n,); return squared norms and largest magnitudes, (n,), as `add` does."""
        rows = self.rows.first(len(weights))
        if rows.device.type != "cpu":
            return self._add_rows_async(rows, weights)
        largest = np.maximum(-rows.amin(1).numpy(), rows.amax(1).numpy())  # aminmax takes twenty times as long
        if not (np.abs(weights) * largest < ROUNDABLE_UNITS * self._units[0]).all():
            squares = [self.add(row, weight)[0] for row, weight in zip(rows, weights.tolist(), strict=True)]
            return np.array(squares), largest
        squared = self._arithmetic.squared_norms(rows)
        rows.mul_(torch.from_numpy(weights / self._units[0]).unsqueeze(1))
        rounded, last = torch.empty_like(rows), len(self._units) - 1
        for word, integers in enumerate(self.integers):
            torch.add(rows, BIAS, out=rounded)
            total = rounded.view(torch.int64).sum(0).sub_(_wrapped(len(rows) * BIAS_BITS))
            if self._empty:
                integers.copy_(total)
            else:
                _sum(integers, total, out=integers)
            if word < last:
                rows.sub_(rounded.sub_(BIAS)).mul_(self._units[word] / self._units[word + 1])
        self._empty = False
        return squared, largest

    def _add_async(self, vector: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """`add` for a vector on a GPU: no host synchronisation, the same integers."""
        low, high = torch.aminmax(vector)
        scaled = self._scaled.copy_(vector)
        squared = torch.dot(scaled, scaled)
        self._add_block(0, scaled.mul_(weight / self._units[0]), small=False)
        self._empty = False
        return squared, torch.maximum(-low, high)

    def _add_rows_async(self, rows: Tensor, weights: np.ndarray) -> tuple[Tensor, Tensor]:
        """`add_rows` for rows on a GPU: no host synchronisation, the same integers."""
        if not len(self._found):
            self._found = self._scaled.new_zeros(2, rows_of(len(self._scaled), rows.device))
        ratios = [own / finer for own, finer in pairwise(self._units)]
        self._inputs({"scales": weights / self._units[0], "ratios": np.array(ratios, np.float64)})
        integers = tuple((word.data_ptr(), len(word)) for word in self.integers)
        kind = "rows", self._number, len(weights), integers, self._empty, self._inputs.layout
        self._graphs(kind, partial(self._add_rows, len(weights), empty=self._empty))
        self._empty = False
        return tuple(self._found[:, : len(weights)].clone())

    def _add_rows(self, size: int, *, empty: bool) -> None:
        """Add rows by what was copied to the device: work that can be recorded."""
        rows, (squared, largest) = self.rows.first(size), self._found[:, :size]
        scales, ratios = self._inputs.tensors["scales"], self._inputs.tensors["ratios"].unbind()
        low, high = torch.aminmax(rows, dim=1)
        torch.maximum(-low, high, out=largest)
        torch.stack([torch.dot(row, row) for row in rows], out=squared)
        rows.mul_(scales.unsqueeze(1))
        rounded = torch.empty_like(rows)
        for word, integers in enumerate(self.integers):
            total = torch.round(rows, out=rounded).to(torch.int64).sum(0)
            if empty:
                integers.copy_(total)
            else:
                integers.add_(total)
            if word < len(ratios):
                rows.sub_(rounded).mul_(ratios[word])

    def _add_block(self, start: int, scaled: Tensor, small: bool, offset: int = 0) -> None:
        """Add a block in units of the coarsest word; what a word leaves over goes to the next.

        Each word gets `offset` constants besides.
        """
        stop, last = start + scaled.numel(), len(self._units) - 1
        constant = _wrapped(offset * BIAS_BITS)
        for word, row in enumerate(self.integers):
            own, scratch = row[start:stop], scaled if word == last else self._rounded[: scaled.numel()]
            if small:
                rounded = torch.add(scaled, BIAS, out=scratch)
                whole = rounded.view(torch.int64)
            else:
                rounded = torch.round(scaled, out=scratch)
                whole = rounded.to(torch.int64)
            if self._empty:
                _sum(whole, constant, out=own)
            else:
                _sum(own, _sum(whole, constant, out=whole) if constant else whole, out=own)
            if word < last:
                scaled.sub_(torch.sub(rounded, BIAS, out=scratch) if small else rounded)
                scaled.mul_(self._units[word] / self._units[word + 1])

    def settle(self, first: int = 0, last: int | None = None) -> None:
        """Subtract the rounding constants left in the entries ``first:last``; once, after the last contribution."""
        for word in self.integers:
            entries = word[first:last]
            if self._empty:
                entries.zero_()
            elif self._biased:
                _sum(entries, _wrapped(-self._biased * BIAS_BITS), out=entries)

    @staticmethod
    def words_of(units: Units) -> int:
        """Return how many words an entry of the sum takes."""
        return len(units)

    @staticmethod
    def usual_words(dtype: torch.dtype) -> int:
        """Return how many words an entry takes in a round whose magnitudes are those of earlier rounds."""
        return 2 if dtype == torch.float64 else 1

    @staticmethod
    def read(integers: Words, units: Units, number: int, out: Tensor) -> None:
        """Write the sum over `number` as float64, (d,), from its (words, d) integers; `out` may be its first word."""
        to_float64(integers, units, number, out)

    @staticmethod
    def write_slots(slots: np.ndarray, words: np.ndarray) -> None:
        """Write int64 slots (n,), all but one rank's 0, as words (n,) to be summed."""
        words[:] = slots

    @staticmethod
    def read_slots(words: np.ndarray, slots: np.ndarray) -> None:
        """Read them back, (n,) from (n,)."""
        slots[:] = words


def to_float64(integers: Words, units: Units, number: int = 1, out: Tensor | None = None) -> Tensor:
    """Return the sum over `number` as float64, (d,), from its (words, d) integers; written into `out`, if any."""
    size, device = len(integers[0]), integers[0].device
    total = torch.empty(size, dtype=torch.float64, device=device) if out is None else out
    block = BLOCK if device.type == "cpu" else max(size, 1)
    in_place = total.data_ptr() == integers[0].data_ptr()
    for start in range(0, size, block):
        rows = [word[start : start + block] for word in integers]
        whole = total[start : start + block]
        piece = torch.empty_like(whole) if in_place else whole
        if len(units) == 1:
            _divide(piece.copy_(rows[0]), number, units[0])
        else:
            piece.copy_(rows[-1]).mul_(units[-1])
            for word in range(len(units) - 2, -1, -1):  # the finest first: one rounding that counts
                piece.add_(rows[word].to(torch.float64), alpha=units[word])
            _divide(piece, number, 1.0)
        if in_place:
            whole.copy_(piece)
    return total


def _divide(numbers: Tensor, number: int, unit: float) -> None:
    """Divide by number / unit, a whole number over a power of two, with one rounding."""
    if not number & (number - 1):  # the inverse of a power of two is exact, and a product takes half as long
        numbers.mul_(unit / number)
    elif numbers.device.type == "cpu":
        numbers.div_(number / unit)
    else:  # by a number of Python's, a GPU would multiply by the rounded inverse
        numbers.div_(numbers.new_full((), number / unit))


def _sum(integers: Tensor, other: Tensor | int, out: Tensor) -> Tensor:
    """Add int64 into `out`, and return it; on a host by numpy, where torch takes three times as long."""
    if integers.device.type == "cpu":
        np.add(integers.numpy(), other if isinstance(other, int) else other.numpy(), out=out.numpy())
        return out
    return torch.add(integers, other, out=out)


def _wrapped(number: int) -> int:
    """The int64 with the same last 64 bits, as wrapping addition sees it."""
    return (number + 2**63) % 2**64 - 2**63
