"""Sums of squares of a mean update on a device, whose many small operations are recorded."""

from __future__ import annotations

from itertools import count

from torch import Tensor

from hpcfed.arithmetic.sums import sums_of_squares
from hpcfed.ranks.graphs import Graphs

MOST_RECORDED = 1 << 20
"""Entries of a vector; the operations on longer ones take longer than their launches."""
_numbers = count()


class Squares:
    """`sums_of_squares` of vectors of one length, (d,) float64 on a device.

    Args:
        graphs: records the work; None where nothing is recorded.
    """

    def __init__(self, graphs: Graphs | None):
        self._graphs, self._number = graphs, next(_numbers)
        self._vector: Tensor | None = None

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the sums, on the device; they are valid until the next call."""
        if self._graphs is None or len(vector) > MOST_RECORDED:
            return sums_of_squares(vector)
        if self._vector is None:
            self._vector = vector.clone()
            self._sums = sums_of_squares(vector)
        self._vector.copy_(vector)
        self._graphs(("squares", self._number), self._work)
        return self._sums

    def _work(self) -> None:
        assert self._vector is not None
        self._sums.copy_(sums_of_squares(self._vector))
