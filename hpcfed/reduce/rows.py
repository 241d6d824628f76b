"""Small vectors that wait to be added together: a few operations on all of them, in place of a few on each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Number = float | Tensor
"""A scalar; on a device one that nothing has waited for."""
Numbers = np.ndarray | Tensor
"""Scalars, (n,)."""
Words = Tensor | list[Tensor]
"""Words of a sum: (words, d), or (d,) each, in memory of their own."""
MOST_ROWS, ROWS_BYTES = 64, 1 << 20
ALIGNED = 16
"""Entries to which rows are padded, since the last bits of a dot product may depend on where in memory it begins."""


def rows_of(num_entries: int) -> int:
    """Return how many vectors (d,) are best added together: many small ones, but a large one by itself."""
    return max(1, min(MOST_ROWS, ROWS_BYTES // (8 * max(num_entries, 1))))


class Rows:
    """Copies of vectors, one a row; the memory is taken at the first one.

    Args:
        num_entries: d.
        dtype, device: of the copies.
    """

    def __init__(self, num_entries: int, dtype: torch.dtype, device: torch.device):
        self._num_entries = num_entries
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._rows: tuple[Tensor, ...] = ()

    def put(self, row: int, vector: Tensor) -> None:
        """Keep a copy of a vector (d,) in a row below `rows_of`."""
        self._take_memory()
        self._rows[row].copy_(vector)

    def put_all(self, first: int, vectors: Sequence[Tensor]) -> None:
        """Keep copies of vectors (d,) in the rows from `first` on."""
        self._take_memory()
        self._memory[first : first + len(vectors)].copy_(torch.stack(list(vectors)))

    def _take_memory(self) -> None:
        if not self._rows:
            width = -(-self._num_entries // ALIGNED) * ALIGNED
            self._memory = self._memory.new_empty(rows_of(self._num_entries), width)[:, : self._num_entries]
            self._rows = self._memory.unbind()

    def first(self, count: int) -> Tensor:
        """Return the first rows, (count, d); they may be changed."""
        return self._memory[:count]
