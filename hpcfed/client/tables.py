"""The tensors of samples that minibatches are gathered from on a device, by row, all clients' of a tile in one call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcfed.data.cache import Resident, Samples


class Tables:
    """Rows of samples: the federation's where they lie on the device, else copies of those of the clients at work.

    Attributes:
        x, y: (rows, …), in memory that stays while `number` is the same.
        number: of the memory.
    """

    x: Tensor
    y: Tensor

    def __init__(self) -> None:
        self._held: Samples | None = None
        self._copies: Samples | None = None
        self.number = 0

    def hold(self, samples: Sequence[Samples]) -> list[int]:
        """Hold these clients' samples; return the row where each begins."""
        resident = [own for own in samples if isinstance(own, Resident)]
        if len(resident) == len(samples):
            self._use(resident[0].table)
            return [own.first for own in resident]
        firsts, end = [], 0
        for _, y in samples:
            firsts.append(end)
            end += len(y)
        if self._copies is None or len(self._copies[0]) < end:
            x, y = (part.new_zeros(max(1, end + end // 2), *part.shape[1:]) for part in samples[0])
            self._copies = x, y
        for own, first in zip(samples, firsts, strict=True):
            for part, copy in zip(own, self._copies, strict=True):
                copy[first : first + len(part)].copy_(part)
        self._use(self._copies)
        return firsts

    def _use(self, held: Samples) -> None:
        if held is not self._held:
            self._held, (self.x, self.y) = held, held
            self.number += 1
