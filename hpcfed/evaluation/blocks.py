"""Evaluation of many small clients at once: neighbours in the federation file, read and computed together.

From `MANY` clients on, clients are cut into blocks of `BLOCK` neighbours, whatever the ranks. The samples of a block
are read in one piece and go through the model together, and the results of single samples are added client by client. A
matrix product's last bits may depend on its number of rows, so a client's may differ from those of its samples alone;
on any number of ranks they are the same. Blocks of more than `MAX_BLOCK_BYTES` are left to evaluation client by client,
as is everything in smaller federations, and where a sample's output depends on others'.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.ranks.world import World

FLOAT64_BYTES = 8
"""Bytes of a number."""
MANY = 4096
BLOCK = 512
MAX_BLOCK_BYTES = 1 << 26
"""Bytes of a block's samples as float64, and of outputs that are kept."""


class ClientBlocks:
    """The blocks of a federation's clients, for one of its splits, ``train`` or ``test``.

    Args:
        split: whose samples.
        federation, shards: the samples.
        world: the ranks; each evaluates every P-th block.
        kept: numbers of an output that are kept for each sample.

    Attributes:
        covered: (N,) bool, clients that are in a block.
    """

    def __init__(self, split: str, federation: Federation, shards: Shards, world: World, kept: int = 0):
        self._split, self._shards, self._world = split, shards, world
        offsets = federation.offsets if split == "train" else federation.test_offsets
        self._offsets = np.zeros(1, np.int64) if offsets is None else offsets
        firsts = np.arange(0, len(self._offsets) - 1 if federation.num_clients >= MANY else 0, BLOCK)
        lasts = np.minimum(firsts + BLOCK, len(self._offsets) - 1)
        entries = max(prod(federation.feature_shape), kept)
        small = (self._offsets[lasts] - self._offsets[firsts]) * entries * FLOAT64_BYTES <= MAX_BLOCK_BYTES
        self._bounds = np.column_stack((firsts, lasts))[small].tolist()
        self.covered = np.full(federation.num_clients, False)
        for first, last in self._bounds:
            self.covered[first:last] = True

    def own(self) -> Iterator[tuple[slice, np.ndarray, Samples]]:
        """Yield the blocks of this rank: its clients, how many samples each has, and the samples of all."""
        for first, last in self._bounds[self._world.rank :: self._world.size]:
            start, stop = int(self._offsets[first]), int(self._offsets[last])
            if start < stop:
                sizes = np.diff(self._offsets[first : last + 1])
                yield slice(first, last), sizes, self._shards.rows(self._split, start, stop)
