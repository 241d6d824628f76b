"""Everything that ranks tell each other in a training round, in one buffer and one Allreduce.

    [ vectors: V × words × d  |  cohort slots: S × len(CLIENT_FIELDS)  |  rank slots: P × len(RANK_FIELDS) ]

The vectors are exact sums in int64 (`hpcfed.reduce.exact`), or float32 ones (`hpcfed.reduce.fast`). A slot is an int64
written by one rank and left 0 by all others, so its sum is what that rank wrote: integers as they are, float64 as their
bit patterns. Every rank thus knows every client's scalars and every rank's hash exactly, in either kind of sum.

Large sums that lie on a GPU and are reduced on the host go in pieces, an Allreduce each, so that the pieces that follow
are copied meanwhile. On a CPU that brings nothing: a waiting rank computes as fast as MPI does, which is a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.reduce.exact import ExactSum
from hpcfed.reduce.fast import FastSum
from hpcfed.reduce.rows import rows_of
from hpcfed.world import World

KINDS: Mapping[str, type[ExactSum] | type[FastSum]] = {"exact": ExactSum, "fast": FastSum}
"""By the recipe's ``reduction``."""

PIECE_BYTES = 4 << 20
"""Bytes of a piece, where sums are copied from a GPU: enough for a network to be at its full speed."""

CLIENT_FIELDS = ("status", "largest", "delta_sq", "loss_sum", "steps")
RANK_FIELDS = ("hash", "asks", "written", "local_seconds")
DONE, FAILED, SKIPPED = 1, 2, 3


@dataclass(frozen=True)
class Sums:
    """What a reduction brought to every rank.

    Attributes:
        vectors: sum of each named vector, (d,) float64 on the host.
        status, steps: (S,) int64, by place in the cohort. A status is DONE, FAILED, SKIPPED, or 0 where a rank stopped
            early.
        largest, delta_sq, loss_sum: (S,) float64; `largest` is a bound on a client's largest entry.
        hashes: (P,) int64, of each rank's replicated state at the start of the round.
        asks: (P,) int64, what each rank asks of all (`hpcfed.types.Ask`).
        written: (P,) int64, round of the last checkpoint of which each rank's part is on disk.
        local_seconds: (P,) float64, spent in local work.
    """

    vectors: Mapping[str, Tensor]
    status: np.ndarray
    largest: np.ndarray
    delta_sq: np.ndarray
    loss_sum: np.ndarray
    steps: np.ndarray
    hashes: np.ndarray
    asks: np.ndarray
    written: np.ndarray
    local_seconds: np.ndarray


class _Report(NamedTuple):
    """What a report that waits to be added counts for, and its scalars."""

    place: int
    weight: float
    factor: float
    loss_sum: float
    steps: int


class RoundBuffer:
    """The buffer of a round: filled client by client, reduced once, read by all.

    Args:
        num_entries: d.
        dtype: of the vectors to come.
        device: where they will lie, and where the sums are kept until they are reduced.
        world: the ranks.
        kind: of the sums, ``exact`` or ``fast``.
        sum_on_device: sums the device's memory over ranks; None: MPI sums a copy on the host, in page-locked memory.

    Attributes:
        seconds: what this rank has spent on the open round: in `add` (``pack``), in the Allreduce, waiting for other
            ranks included (``allreduce``), and on turning its result into float64 (``unpack``).
    """

    def __init__(
        self,
        num_entries: int,
        dtype: torch.dtype,
        device: torch.device,
        world: World,
        *,
        kind: str = "exact",
        sum_on_device: Callable[[Tensor], None] | None = None,
    ):
        self._num_entries, self._dtype, self._device, self._world = num_entries, dtype, device, world
        self._kind, self._sum_on_device = KINDS[kind], sum_on_device
        self._piece_bytes = PIECE_BYTES if device.type == "cuda" and sum_on_device is None else 0
        self._memory = self._device_memory = torch.empty(0, dtype=self._kind.word)
        self._host = self._on_device = self._memory
        self._sums: dict[str, ExactSum | FastSum] = {}
        self._at_once, self._waiting = rows_of(num_entries), list[_Report]()
        self._slots = np.empty(0, np.int64)
        self._clients = self._ranks = np.empty((0, 0), np.int64)
        self.seconds: dict[str, float] = {}

    def open(self, names: Sequence[str], cohort_size: int) -> None:
        """Start sums of 0 for a round of S clients that report vectors of these names."""
        vectors, clients, ranks = self.sizes(len(names), cohort_size)
        words = vectors + clients + ranks
        self._memory = _at_least(self._memory, words, pinned=self._device.type == "cuda")
        self._host = self._memory[:words]
        if self._device.type == "cpu" and self._sum_on_device is None:  # then clients add into the buffer itself
            self._device_memory = self._memory
        else:
            self._device_memory = _at_least(self._device_memory, words, self._device)
        self._on_device = self._device_memory[:vectors].view(len(names), -1, self._num_entries)
        if tuple(self._sums) != tuple(names):
            self._sums = {name: self._kind(self._on_device[i], self._dtype) for i, name in enumerate(names)}
        for memory, total in zip(self._on_device, self._sums.values(), strict=True):
            total.begin(memory)
        self._slots = np.zeros((clients + ranks) // self._kind.slot_words, np.int64)
        first_of_ranks = clients // self._kind.slot_words
        self._clients = self._slots[:first_of_ranks].reshape(cohort_size, len(CLIENT_FIELDS))
        self._ranks = self._slots[first_of_ranks:].reshape(self._world.size, len(RANK_FIELDS))
        self._waiting.clear()
        self.seconds = {"pack": 0.0, "allreduce": 0.0, "unpack": 0.0}

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors of the open round."""
        return tuple(self._sums)

    @property
    def range(self) -> float:
        """The magnitude that sums must stay below."""
        return self._kind.range_of(self._dtype)

    def sizes(self, num_vectors: int, cohort_size: int) -> tuple[int, int, int]:
        """Return the words of the buffer's three sections, for V vectors and S clients."""
        vectors = num_vectors * self._kind.words_of(self._dtype) * self._num_entries
        each = self._kind.slot_words
        return vectors, each * cohort_size * len(CLIENT_FIELDS), each * self._world.size * len(RANK_FIELDS)

    def add(
        self,
        place: int,
        weight: float,
        vectors: Mapping[str, Tensor],
        *,
        factor: float = 1.0,
        loss_sum: float,
        steps: int,
        most: float = math.inf,
    ) -> bool:
        """Add one client's report, and fill the slot of its `place` in the cohort.

        Every vector counts `weight` times, p_i; the first one, Δ_i, and its norm are multiplied by `factor` besides. A
        report with an entry that is not below `most`, or not a number, is not added but skipped, where `most` is given.

        Returns:
            Whether it was added.
        """
        if most < math.inf and not all(float(vectors[name].abs().max()) < most for name in self._sums):
            self.skip(place)
            return False
        started = time.perf_counter()
        report = _Report(place, weight, factor, loss_sum, steps)
        if self._at_once > 1:
            for name, total in self._sums.items():
                total.rows.put(len(self._waiting), vectors[name])
            self._waiting.append(report)
            if len(self._waiting) == self._at_once:
                self._add_waiting()
        else:
            own_weights = (weight if number else weight * factor for number in range(len(self._sums)))
            told = [
                total.add(vectors[name], own)
                for (name, total), own in zip(self._sums.items(), own_weights, strict=True)
            ]
            self._fill([report], [(np.array([squared]), np.array([largest])) for squared, largest in told])
        self._clients[place, 0] = DONE
        self.seconds["pack"] += time.perf_counter() - started
        return True

    def _add_waiting(self) -> None:
        """Add the reports that wait, if any do, to the sums."""
        if not self._waiting:
            return
        _, weights, factors, _, _ = zip(*self._waiting, strict=True)
        delta_weights = np.multiply(weights, factors)
        told = [
            total.add_rows(np.array(weights) if number else delta_weights)
            for number, total in enumerate(self._sums.values())
        ]
        self._fill(self._waiting, told)
        self._waiting.clear()

    def _fill(self, reports: Sequence[_Report], told: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fill in the scalars of reports (n,), with the squared norm and largest entry, (n,), told of each vector."""
        places, _, factors, loss_sums, steps = zip(*reports, strict=True)
        squared = told[0][0] * np.square(factors)
        largest = np.maximum.reduce([largest for _, largest in told])  # NaN, where there is one
        scalars = np.array([largest, squared, loss_sums]).view(np.int64)
        self._clients[list(places), 1:] = np.vstack([scalars, steps]).T

    def is_filled(self, place: int) -> bool:
        """Whether the slot of a place says anything already."""
        return bool(self._clients[place, 0])

    def skip(self, place: int) -> None:
        """Say that the round goes on without the client at this place."""
        self._clients[place, 0] = SKIPPED

    def fail(self, place: int) -> None:
        """Say that this rank could not train the client at this place."""
        self._clients[place, 0] = FAILED

    def reduce(self, state_hash: int, local_seconds: float, *, asks: int = 0, written: int = 0) -> Sums:
        """Sum the buffer over all ranks: the round's one Allreduce."""
        started = time.perf_counter()
        self._add_waiting()
        self.seconds["pack"] += time.perf_counter() - started
        self._ranks[self._world.rank] = state_hash, asks, written, _bits(local_seconds)
        vectors = self._on_device.numel()
        tail = self._host[vectors:].numpy()
        self._kind.write_slots(self._slots, tail)
        summed = {name: torch.empty(self._num_entries, dtype=torch.float64) for name in self._sums}
        host = self._host[:vectors].view(self._on_device.shape)
        if 0 < self._piece_bytes < host.nbytes:
            self._reduce_in_pieces(host, summed, self._piece_bytes // host.element_size())
            self._world.sum_in_place(tail)
        else:
            self._reduce_whole(host, summed)
        self._kind.read_slots(tail, self._slots)
        as_float = self._clients.view(np.float64)
        return Sums(
            vectors=summed,
            status=self._clients[:, 0].copy(),
            largest=as_float[:, 1].copy(),
            delta_sq=as_float[:, 2].copy(),
            loss_sum=as_float[:, 3].copy(),
            steps=self._clients[:, 4].copy(),
            hashes=self._ranks[:, 0].copy(),
            asks=self._ranks[:, 1].copy(),
            written=self._ranks[:, 2].copy(),
            local_seconds=self._ranks[:, 3].copy().view(np.float64),
        )

    def _reduce_whole(self, host: Tensor, summed: Mapping[str, Tensor]) -> None:
        """Sum the whole buffer over ranks by one Allreduce, and read its vectors."""
        started = time.perf_counter()
        for total in self._sums.values():
            total.settle()
        packed = time.perf_counter()
        if self._sum_on_device is not None:
            whole, vectors = self._device_memory[: self._host.numel()], self._on_device.numel()
            whole[vectors:].copy_(self._host[vectors:])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # MPI knows nothing of torch's stream
            self._sum_on_device(whole)
            self._host.copy_(whole)
        else:
            if host.data_ptr() != self._on_device.data_ptr():
                host.copy_(self._on_device)
            self._world.sum_in_place(self._host.numpy())
        reduced = time.perf_counter()
        for words, out in zip(host, summed.values(), strict=True):
            self._kind.read(words, self._dtype, out)
        self.seconds["pack"] += packed - started
        self.seconds["allreduce"] += reduced - packed
        self.seconds["unpack"] += time.perf_counter() - reduced

    def _reduce_in_pieces(self, host: Tensor, summed: Mapping[str, Tensor], piece: int) -> None:
        """Sum the vectors over ranks and read them, `piece` entries at a time, while those that follow are copied."""
        bounds = [(first, min(first + piece, self._num_entries)) for first in range(0, self._num_entries, piece)]
        arrivals = [
            self._arrival(i, first, last, host) for i in range(len(host)) for first, last in bounds
        ]  # all copies are on their way before the first one is waited for
        for number, arrive in enumerate(arrivals):
            i, (first, last) = number // len(bounds), bounds[number % len(bounds)]
            started = time.perf_counter()
            arrive()
            packed = time.perf_counter()
            for row in host[i]:
                self._world.sum_in_place(row[first:last].numpy())
            reduced = time.perf_counter()
            name = self.names[i]
            self._kind.read(host[i, :, first:last], self._dtype, summed[name][first:last])
            self.seconds["pack"] += packed - started
            self.seconds["allreduce"] += reduced - packed
            self.seconds["unpack"] += time.perf_counter() - reduced

    def _arrival(self, i: int, first: int, last: int, host: Tensor) -> Callable[[], None]:
        """Return what makes the entries ``first:last`` of vector `i` ready on the host; a GPU's begin to be copied."""
        total = self._sums[self.names[i]]
        if self._device.type != "cuda":
            return partial(total.settle, first, last)
        total.settle(first, last)
        for row, own in zip(host[i], self._on_device[i], strict=True):
            row[first:last].copy_(own[first:last], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return copied.synchronize


def _at_least(memory: Tensor, words: int, device: torch.device | None = None, *, pinned: bool = False) -> Tensor:
    """Return `memory` where it holds that many words, else new memory that does."""
    if memory.numel() >= words:
        return memory
    if pinned or (device is not None and device.type != "cpu"):
        return torch.empty(words, dtype=memory.dtype, device=device, pin_memory=pinned)
    return torch.from_numpy(np.empty(words, memory.numpy().dtype))  # numpy asks for huge pages: fewer for MPI to map


def _bits(number: float) -> int:
    """The bit pattern of a float64 as an int64."""
    return int(np.float64(number).view(np.int64))
