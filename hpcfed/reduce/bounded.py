"""Units of sums whose terms have a known bound: they follow from it alone, and tell nothing of the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from hpcfed.reduce.units import Magnitudes, Terms, Units, exponent, units_for


class BoundedMagnitudes(Magnitudes):
    """Magnitudes that are known beforehand, so that no round is run twice.

    A sum is as precise as if a client's largest entry were as large as its norm may be: d times finer than its noise.

    Args:
        entries, dtype: as in `Magnitudes`.
        bound: of a vector's norm, by its name.
        most: clients that a cohort may have.
    """

    def __init__(self, entries: int, dtype: torch.dtype, bound: Callable[[str], float], most: int):
        super().__init__(entries, dtype)
        self._bound, self._most = bound, most

    def predict(self, counts: Mapping[str, np.ndarray]) -> dict[str, Units]:
        """Return units for a round's vectors; the same in every round."""
        return {name: self._of_bound(name) for name in counts}

    def _of_bound(self, name: str) -> Units:
        largest = exponent(self._bound(name))
        total = largest + exponent(self._most)
        return units_for(Terms(total, largest, largest - 1, self._most, self.entries_of(name)), self._dtype)

    def learn(self, bounds: Mapping[str, np.ndarray]) -> None:
        """Nothing: bounds of clients are no part of the state."""
