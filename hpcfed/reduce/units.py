"""Units of the exact sums: powers of two that follow the size of the updates, vector by vector.

A reported vector v_i enters its sum as c_i v_i, with c_i = (|S| p_i) · factor_i known to all ranks beforehand. Its
largest entry b_i travels in the client's slot, so after the reduction every rank knows all of them and can tell

    range       Σ |c_i| b_i < 2^62 units of the coarsest word
    precision   u √(d |S| / 12) ≤ ε max |c_i| b_i · max(1, √|S| / 2)                 u: unit of the finest word

The left side of the second line is the standard deviation (l2) of |S| roundings of d entries to multiples of u; the
right one is a lower bound on the rounding error of a sum in the run's dtype: ε is 2^-26 (float32) or 2^-55 (float64),
a quarter of the machine epsilon or less, and half of the additions round a partial sum that holds the largest term.

A round's units are predicted from the bounds that a vector had before (`Magnitudes`). Where a prediction turns out
wrong, the round is run once more with units from the first attempt's bounds, which hold by construction.

Exponents alone are computed with (`math.frexp`), never logarithms, whose last bit depends on the C library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfed.types import DELTA

Units = tuple[float, ...]
"""The unit of each word of a sum, coarsest first."""

ROUNDABLE = 50
"""Bits of an entry, in units of a word, that the quick way of rounding takes (`hpcfed.reduce.exact`)."""
SUMMABLE = 62
"""Bits of a sum in a word, one less than an int64 has, for the rounding of its terms."""
EPSILON = {torch.float32: 26, torch.float64: 55}
"""−log2 ε of the precision kept."""
HEADROOM_BITS, FOOTROOM_BITS = 6, 3
"""Bits by which bounds may exceed what was predicted, and fall below it, before a round has to be repeated."""
SPAN_DECAY_BITS = 0.25
"""Bits by which the remembered span of a vector's bounds shrinks at each appearance: alternating rounds stay in it."""
INITIAL_SPAN = -34.0, 20.0
"""Span of bounds, as exponents of two, assumed at a vector's first appearance: 6e-11 to 1e6, and `HEADROOM_BITS`."""
FINEST = -1000
"""Exponent below which units are not refined: float64 ends soon after."""
RANGE = 2.0**960
"""Bound on a sum beyond which no unit is chosen, and the run has diverged: float64 ends at 2^1024."""


class Terms(NamedTuple):
    """Sizes of the terms of a vector's sum, as exponents of two.

    Attributes:
        total: above Σ |c_i| b_i.
        largest: above max |c_i| b_i.
        least: below the largest |c_i| b_i for which the sum is to be precise.
        number, entries: |S| and d.
    """

    total: float
    largest: float
    least: float
    number: int
    entries: int


def exponent(number: float) -> int:
    """Return the least e with number < 2^e, for a positive number."""
    return math.frexp(number)[1]


@lru_cache(maxsize=1024)
def units_for(terms: Terms, dtype: torch.dtype) -> Units:
    """Return the units that hold a sum of these terms: as few words as precision allows."""
    words = [math.ceil(max(terms.total - SUMMABLE, terms.largest - ROUNDABLE, FINEST))]
    ratio = min(ROUNDABLE, SUMMABLE - terms.number.bit_length())  # what a word leaves over fits |S| times in the next
    needed = max(_finest(terms, dtype), FINEST)
    while words[-1] > needed:
        words.append(max(words[-1] - ratio, FINEST))
    return tuple(2.0**word for word in words)


def _finest(terms: Terms, dtype: torch.dtype) -> int:
    """Return the exponent of the coarsest unit that is fine enough."""
    noise = math.sqrt(terms.entries * terms.number / 12) / max(1.0, math.sqrt(terms.number) / 2)
    return math.floor(terms.least - EPSILON[dtype] - exponent(noise))


def exact_terms(bounds: np.ndarray, counts: np.ndarray, entries: int) -> Terms | None:
    """Return the terms of clients' bounds b_i (S,), c_i (S,) and d; None where all are 0."""
    contributions = np.abs(counts) * bounds
    total = float(contributions.sum())
    if total == 0.0:
        return None
    largest = exponent(float(contributions.max()))
    return Terms(exponent(total) if total < RANGE else math.inf, largest, largest - 1, len(bounds), entries)


def suffice(units: Units, terms: Terms | None, dtype: torch.dtype) -> bool:
    """Return whether a sum in these units is in range and as precise as promised."""
    if terms is None:
        return True
    return exponent(units[0]) - 1 >= terms.total - SUMMABLE and (
        exponent(units[-1]) - 1 <= max(_finest(terms, dtype), FINEST)
    )


class Magnitudes:
    """The span of the bounds that each reported vector had, and what follows from it for the next round.

    The span follows the bounds at once where they leave it, and shrinks by `SPAN_DECAY_BITS` towards them, so that
    vectors whose size alternates get two words where that is needed, not repeated rounds. Part of the replicated state:
    the same on every rank, and in checkpoints.

    Args:
        entries: d.
        dtype: of the vectors.
        others: entries of vectors of another length, by name.

    Attributes:
        repeats: rounds that were run twice.
    """

    def __init__(self, entries: int, dtype: torch.dtype, others: Mapping[str, int] | None = None):
        self._entries, self._dtype, self._others = entries, dtype, others or {}
        self._spans: dict[str, tuple[float, float]] = {}
        self.repeats = 0

    def predict(self, counts: Mapping[str, np.ndarray]) -> dict[str, Units]:
        """Return units for a round's vectors, from the c_i, (S,), that each member will count in each of them."""
        return {
            name: self._predicted(self._spans.get(name, INITIAL_SPAN), own, self.entries_of(name))
            for name, own in counts.items()
        }

    def entries_of(self, name: str) -> int:
        """Return the length of a vector."""
        return self._others.get(name, self._entries)

    def _predicted(self, span: tuple[float, float], counts: np.ndarray, entries: int) -> Units:
        low, high = span
        counts = np.abs(counts)  # a user's normalisation may have factors below 0
        number, total, largest = len(counts), float(counts.sum()), float(counts.max())
        if total == 0.0:
            total = largest = 1.0  # a cohort without samples: all its vectors are 0
        terms = Terms(
            total=high + HEADROOM_BITS + exponent(total),
            largest=high + 1 + exponent(largest),
            least=low - 1 - FOOTROOM_BITS + exponent(total / number) - 1,
            number=number,
            entries=entries,
        )
        return units_for(terms, self._dtype)

    def learn(self, bounds: Mapping[str, np.ndarray]) -> None:
        """Take note of the bounds, (S,), of each vector of a round; a vector that is all zero keeps its span."""
        for name, own in bounds.items():
            largest = float(own.max())
            if largest > 0.0:
                seen = float(exponent(largest))
                low, high = self._spans.get(name, (seen, seen))
                self._spans[name] = min(seen, low + SPAN_DECAY_BITS), max(seen, high - SPAN_DECAY_BITS)

    def state(self) -> dict[str, Any]:
        """Return all of it as plain JSON."""
        return {"spans": {name: list(span) for name, span in self._spans.items()}, "repeats": self.repeats}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned."""
        self._spans = {name: (low, high) for name, (low, high) in state["spans"].items()}
        self.repeats = state["repeats"]


def counts_of(names: Sequence[str], counts: np.ndarray, factors: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each member, (S,), counts in each vector: a factor multiplies Δ_i alone."""
    return {name: counts * factors if name == DELTA else counts for name in names}
