"""All clients' samples in one tensor, from which a tile's minibatches are gathered in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.cache import ALIGNED, Resident, Samples
from hpcfed.ranks.accelerators import upload


class ClientTable:
    """Rows for the samples of every client, aligned; the memory is taken, and a client's rows filled, at first use.

    Args:
        sizes: samples of each client, (N,).
        shapes, dtypes: of a sample's x and y.
        device: where it lies.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ):
        self._sizes, self._shapes, self._dtypes, self._device = sizes, shapes, dtypes, device
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        multiple = math.lcm(*(ALIGNED // math.gcd(ALIGNED, width) for width in widths))
        self._starts = np.concatenate([[0], np.cumsum(-(-sizes // multiple) * multiple)])
        self.nbytes = int(self._starts[-1]) * sum(widths)
        self._table: Samples | None = None

    def put(self, clients: Sequence[int], x: Tensor, y: Tensor) -> dict[int, Resident]:
        """Copy the samples of some clients, one after another, to their rows, and return them there."""
        if self._table is None:
            self._table = self._made(0), self._made(1)
        firsts, found = [int(self._starts[client]) for client in clients], dict[int, Resident]()
        for client, first in zip(clients, firsts, strict=True):
            # .data: the version of a client's rows is its own, not that of all rows
            own = found[client] = Resident(part[first : first + self._sizes[client]].data for part in self._table)
            own.table, own.first = self._table, first
            if len(clients) == 1:
                for rows, part in zip(own, (x, y), strict=True):
                    rows.copy_(part)
        if len(clients) > 1:
            each = [np.arange(first, first + self._sizes[k]) for k, first in zip(clients, firsts, strict=True)]
            places = upload(torch.from_numpy(np.concatenate(each)), self._device)
            for table, part in zip(self._table, (x, y), strict=True):
                table.index_copy_(0, places, part)
        return found

    def _made(self, part: int) -> Tensor:
        shape = (int(self._starts[-1]), *self._shapes[part])
        return torch.zeros(shape, dtype=self._dtypes[part], device=self._device)
