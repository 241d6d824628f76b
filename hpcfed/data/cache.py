"""Cache of prepared samples, least recently used out first, and the aligned layout of many clients in one tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from math import gcd, prod

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import InputError
from hpcfed.ranks.accelerators import upload

Samples = tuple[Tensor, Tensor]
"""x (n, …) and y (n, …), of the dtypes of `hpcfed.data.shards.types_of`."""


class Resident(tuple[Tensor, Tensor]):
    """`Samples` that are rows of a table on a device.

    Attributes:
        table: x and y of all clients, (rows, …).
        first: the row where these begin.
    """

    table: Samples
    first: int


Key = tuple[str, int]
Versions = tuple[int, int]
"""torch's counts of the writes to x and y."""
ALIGNED = 64
"""Bytes: torch's own alignment; the last bits of a matrix product may depend on it."""


class SampleCache:
    """Cache of samples by key, in pieces of memory; the least recently used piece is evicted with all its samples.

    Args:
        capacity: bytes; the newest piece is kept even if it is larger.
    """

    def __init__(self, capacity: int):
        self._room = capacity
        self._samples: dict[Key, tuple[Samples, int, Versions]] = {}
        self._pieces: OrderedDict[int, tuple[list[Key], int]] = OrderedDict()
        self._numbers = count()

    def __contains__(self, key: Key) -> bool:
        return key in self._samples

    def get(self, key: Key) -> Samples | None:
        """Return cached samples, whose piece becomes the most recently used; None where they are not cached.

        Raises:
            InputError: they were written to since they were cached.
        """
        found = self._samples.get(key)
        if found is None:
            return None
        samples, piece, versions = found
        refuse_written(samples, versions)
        self._pieces.move_to_end(piece)
        return samples

    def add(self, members: Mapping[Key, Samples], nbytes: int) -> None:
        """Cache samples that share one piece of memory, of `nbytes`."""
        self._room -= nbytes
        while self._room < 0 and self._pieces:
            _, (keys, freed) = self._pieces.popitem(last=False)
            self._room += freed
            for key in keys:
                del self._samples[key]
        piece = next(self._numbers)
        self._pieces[piece] = list(members), nbytes
        self._samples |= {key: (samples, piece, versions_of(samples)) for key, samples in members.items()}


def versions_of(samples: Samples) -> Versions:
    """Return how often samples were written to, for `refuse_written`."""
    x, y = samples
    return x._version, y._version


def refuse_written(samples: Samples, versions: Versions) -> None:
    """Check that samples were not written to since they had these `versions`: later rounds have the same memory.

    Raises:
        InputError: they were, which only code of the user does.
    """
    if versions_of(samples) != versions:
        raise InputError(
            "the samples of the federation",
            where="a model, loss, metric or step of yours",
            expected="left as they are",
            got="written to in place",
            remedy="compute in new tensors there: x = 2 * x, not x *= 2",
        )


def aligned(rows: Tensor, sizes: np.ndarray) -> tuple[list[Tensor], int]:
    """Return the rows of each client as aligned views of one tensor, and the bytes of that tensor.

    Args:
        rows: (n, …) of all clients, concatenated, aligned.
        sizes: rows of each client, (C,), of sum n.
    """
    multiple = ALIGNED // gcd(ALIGNED, prod(rows.shape[1:]) * rows.element_size())
    room = -(-sizes // multiple) * multiple
    gaps = room - sizes
    if not gaps.any():
        return list(rows.split(sizes.tolist())), rows.nbytes
    places = np.arange(len(rows)) + np.repeat(np.cumsum(gaps) - gaps, sizes)
    spread = rows.new_zeros(int(room.sum()), *rows.shape[1:])
    spread.index_copy_(0, upload(torch.from_numpy(places), rows.device), rows)
    return list(spread.split(np.column_stack((sizes, gaps)).ravel().tolist())[::2]), spread.nbytes
