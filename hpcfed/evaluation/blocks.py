"""Blocks: groups of small clients whose samples are read together for evaluation.

Scores are bit-identical for any division into blocks. If the federation has `MANY` clients or more, each rank reads one
contiguous share of the file, in large pieces. If it has fewer, each rank reads the clients placed on it, whose samples
it has cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import torch

from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.ranks.placement import Placement
from hpcfed.ranks.world import World

FLOAT64_BYTES = 8
"""Bytes of a float64 number."""
MANY = 4096
MAX_BLOCK_BYTES = 1 << 26
"""Largest size of a block's samples as float64, in bytes; a block of one client may be larger."""


class ClientBlocks:
    """The blocks of small clients that this rank reads.

    Args:
        split: ``train`` or ``test``: whether to read training or test samples.
        covered: (N,) bool, which clients are small; a block without any of them is not read.
        federation, shards: the samples.
        placement, world: decide which clients this rank reads.
    """

    def __init__(
        self,
        split: str,
        covered: np.ndarray,
        federation: Federation,
        shards: Shards,
        placement: Placement,
        world: World,
    ):
        self._split, self.covered, self._shards = split, covered, shards
        offsets = federation.offsets if split == "train" else federation.test_offsets
        self._offsets = np.zeros(1, np.int64) if offsets is None else offsets
        self._sizes = np.diff(self._offsets)
        self._rows = max(1, MAX_BLOCK_BYTES // (max(1, prod(federation.feature_shape)) * FLOAT64_BYTES))
        self._are_neighbours = len(self._sizes) >= MANY
        if self._are_neighbours:
            first, last = (len(self._sizes) * rank // world.size for rank in (world.rank, world.rank + 1))
            self._blocks = list(self._cut(np.arange(first, last)))
        else:
            mine = placement.at_home(world.rank)
            mine = mine[covered[mine]]
            self._blocks = list(self._cut(mine[np.argsort(self._sizes[mine], kind="stable")]))

    def own(self) -> Iterator[tuple[np.ndarray, np.ndarray, Samples]]:
        """Yield each block of this rank: client numbers, (C,), sample counts, (C,), and samples, client after client.

        A block may include clients outside `covered`, whose samples the caller must ignore.
        """
        read = self._shards.client if self._split == "train" else self._shards.client_test
        for clients in self._blocks:
            if not self.covered[clients].any():
                continue
            if self._are_neighbours:
                start, stop = self._offsets[[clients[0], clients[-1] + 1]].tolist()
                samples = self._shards.rows(self._split, start, stop)
            else:
                x, y = zip(*(read(client) for client in clients.tolist()), strict=True)
                samples = torch.cat(x), torch.cat(y)
            yield clients, self._sizes[clients], samples

    def _cut(self, clients: np.ndarray) -> Iterator[np.ndarray]:
        """Cut `clients` into blocks of consecutive entries, each of one client or of at most `MAX_BLOCK_BYTES`."""
        ends = np.cumsum(self._sizes[clients])
        first = 0
        while first < len(clients):
            before = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + self._rows, side="right")))
            yield clients[first:last]
            first = last
