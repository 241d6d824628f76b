"""Small vectors that wait to be added together: a few operations on all of them, in place of a few on each."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

Number = float | Tensor
"""A scalar; on a device one that nothing has waited for."""
Numbers = np.ndarray | Tensor
"""Scalars, (n,)."""
Words = Tensor | list[Tensor]
"""Words of a sum: (words, d), or (d,) each, in memory of their own."""
MOST_ROWS, ROWS_BYTES, GPU_ROWS_BYTES = 64, 1 << 20, 1 << 26
ALIGNED = 16
"""Entries to which rows are padded, since the last bits of a dot product may depend on where in memory it begins."""


def rows_of(num_entries: int, device: torch.device) -> int:
    """Return how many vectors (d,) are best added together: many small ones, but a large one by itself.

    A GPU, where a launch takes as long as a megabyte, adds larger ones together than a CPU does.
    """
    most = ROWS_BYTES if device.type == "cpu" else GPU_ROWS_BYTES
    return max(1, min(MOST_ROWS, most // (8 * max(num_entries, 1))))


def read_together(numbers: Sequence[Tensor]) -> list[np.ndarray]:
    """Return numbers on a device, () or (n,) each, as float64 on the host: one copy, and one wait."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place, number in enumerate(numbers):
        kinds.setdefault(number.dtype, []).append(place)
    if not kinds:
        return []
    flat = [torch.cat([numbers[place].reshape(-1) for place in places]).double() for places in kinds.values()]
    read = torch.cat(flat).cpu().numpy()
    order = [place for places in kinds.values() for place in places]
    pieces = np.split(read, np.cumsum([numbers[place].numel() for place in order])[:-1])
    return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=itemgetter(0))]


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
            self._memory = self._memory.new_empty(rows_of(self._num_entries, self._memory.device), width)[
                :, : self._num_entries
            ]
            self._rows = self._memory.unbind()

    def first(self, count: int) -> Tensor:
        """Return the first rows, (count, d); they may be changed."""
        return self._memory[:count]
