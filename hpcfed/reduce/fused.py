"""Everything that ranks tell each other in a training round, in one buffer and one Allreduce.

    [ vectors: V × words × d  |  cohort slots: S × len(CLIENT_FIELDS)  |  rank slots: P × len(RANK_FIELDS) ]     int64

The vectors are exact sums (`hpcfed.reduce.exact`). A slot is written by one rank and left 0 by all others, so its sum
is what that rank wrote: integers as they are, float64 as their bit patterns. Every rank thus knows every client's
scalars and every rank's hash exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.reduce.exact import ExactSum, to_float64, units_of
from hpcfed.world import World

CLIENT_FIELDS = ("status", "largest", "delta_sq", "loss_sum", "steps")
RANK_FIELDS = ("hash", "local_seconds")
DONE, FAILED = 1, 2


@dataclass(frozen=True)
class Sums:
    """What a reduction brought to every rank.

    Attributes:
        vectors: sum of each named vector, (d,) float64 on the host.
        status, steps: (S,) int64, by place in the cohort. A status is DONE, FAILED, or 0 where a rank stopped early.
        largest, delta_sq, loss_sum: (S,) float64.
        hashes: (P,) int64, of each rank's replicated state at the start of the round.
        local_seconds: (P,) float64, spent in local work.
    """

    vectors: Mapping[str, Tensor]
    status: np.ndarray
    largest: np.ndarray
    delta_sq: np.ndarray
    loss_sum: np.ndarray
    steps: np.ndarray
    hashes: np.ndarray
    local_seconds: np.ndarray


class RoundBuffer:
    """The buffer of a round: filled client by client, reduced once, read by all."""

    def __init__(self, names: Sequence[str], num_entries: int, dtype: torch.dtype, device: torch.device, world: World):
        self._names = tuple(names)
        self._dtype = dtype
        self._world = world
        self._shape = (len(self._names), len(units_of(dtype)), num_entries)
        self._on_device = torch.zeros(self._shape, dtype=torch.int64, device=device)
        self._sums = {name: ExactSum(self._on_device[i], dtype) for i, name in enumerate(self._names)}
        self._host = torch.empty(0, dtype=torch.int64)
        self._clients = self._ranks = np.empty((0, 0), np.int64)

    def open(self, cohort_size: int) -> None:
        """Set everything to zero for a round of S clients."""
        vectors, clients, ranks = self.sizes(cohort_size)
        if self._host.numel() != vectors + clients + ranks:
            self._host = torch.empty(vectors + clients + ranks, dtype=torch.int64)
            if self._on_device.device.type == "cpu":  # then clients add into the buffer itself
                self._on_device = self._host[:vectors].view(self._shape)
                for i, name in enumerate(self._names):
                    self._sums[name].integers = self._on_device[i]
        for total in self._sums.values():
            total.clear()
        slots = self._host.numpy()[vectors:]
        slots[:] = 0
        self._clients = slots[:clients].reshape(cohort_size, len(CLIENT_FIELDS))
        self._ranks = slots[clients:].reshape(self._world.size, len(RANK_FIELDS))

    def sizes(self, cohort_size: int) -> tuple[int, int, int]:
        """Return the int64 words of the buffer's three sections."""
        vectors = self._on_device.numel()
        return vectors, cohort_size * len(CLIENT_FIELDS), self._world.size * len(RANK_FIELDS)

    def add(self, place: int, weight: float, vectors: Mapping[str, Tensor], *, loss_sum: float, steps: int) -> None:
        """Add one client's report, times its weight p_i, and fill the slot of its `place` in the cohort."""
        added = {name: self._sums[name].add(vectors[name], weight) for name in self._names}
        delta_sq = added["delta"][0]
        largest = max((entry for _, entry in added.values()), key=lambda entry: (entry != entry, entry))  # NaN first
        self._clients[place] = DONE, _bits(largest), _bits(delta_sq), _bits(loss_sum), steps

    def fail(self, place: int) -> None:
        """Say that this rank could not train the client at this place."""
        self._clients[place, 0] = FAILED

    def reduce(self, state_hash: int, local_seconds: float) -> Sums:
        """Sum the buffer over all ranks: the round's one Allreduce."""
        self._ranks[self._world.rank] = state_hash, _bits(local_seconds)
        for total in self._sums.values():
            total.settle()
        host = self._host[: self._on_device.numel()].view(self._shape)
        if host.data_ptr() != self._on_device.data_ptr():
            host.copy_(self._on_device)
        self._world.sum_in_place(self._host.numpy())
        as_float = self._clients.view(np.float64)
        return Sums(
            vectors={name: to_float64(host[i], self._dtype) for i, name in enumerate(self._names)},
            status=self._clients[:, 0].copy(),
            largest=as_float[:, 1].copy(),
            delta_sq=as_float[:, 2].copy(),
            loss_sum=as_float[:, 3].copy(),
            steps=self._clients[:, 4].copy(),
            hashes=self._ranks[:, 0].copy(),
            local_seconds=self._ranks[:, 1].copy().view(np.float64),
        )


def _bits(number: float) -> int:
    """The bit pattern of a float64 as an int64."""
    return int(np.float64(number).view(np.int64))
