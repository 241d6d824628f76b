"""Memory of a round's sums and slots, and its reduction over ranks.

One Allreduce sums all of it, with three exceptions:

- If all ranks are on one host, they share the memory of sums of `SHARED_BYTES` or more. Each rank sums its slice of all
  ranks' words, in rank order, and turns it into float64, which all then copy. Only the slots take an Allreduce; the
  ranks meet twice besides, before and after the slices are summed.
- Large sums on a GPU that are reduced on the host go in pieces, one Allreduce each, so that the next pieces are copied
  meanwhile; on a CPU pieces gain no time, but beside ranks with a GPU those without one send the same pieces. Where the
  server's vectors lie on the GPU, the pieces go back to it, and the sums of a single rank never leave it.
- Sums of more than `LARGE_BYTES` on a CPU go in pieces to save memory: an MPI library may take as much again as it
  reduces. Each word of an entry is allocated by itself: exact sums overwrite the first with the float64 result, and the
  next round allocates them again.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import HpcfedError
from hpcfed.ranks.accelerators import accelerator
from hpcfed.ranks.shared import shared_memory
from hpcfed.ranks.world import World
from hpcfed.reduce.exact import ExactSum
from hpcfed.reduce.fast import FastSum
from hpcfed.reduce.rows import Words

Total = ExactSum | FastSum
Totals = dict[str, Total]
"""The sums of a round's vectors, by name, in the order of their memory."""
Read = Callable[[str, Words, Tensor], None]
"""Writes a vector's sum, or a part of it, from its words, (words, n), as float64, (n,)."""

HOST = torch.device("cpu")
PIECE_BYTES = 16 << 20
"""Bytes of a piece, where sums are copied from a GPU: enough for a network to be at its full speed."""
SHARED_BYTES = 1 << 21
"""Bytes of sums on a CPU from which the ranks of one host share their memory."""
SHARED_BLOCK = 1 << 18
"""Entries that a rank sums at a time: what lies in a cache is turned into float64 there."""
LARGE_BYTES, LARGE_PIECE_BYTES = 1 << 28, 1 << 22
"""Bytes of sums on a CPU from which they go in pieces, and of such a piece."""


class SumMemory:
    """The memory in which a rank adds up its clients' vectors; sums it over ranks.

    Args:
        word: type of the sums' words.
        device: where the sums are kept until they are reduced.
        world: the ranks.
        sum_on_device: sums the device's memory over ranks; None: MPI sums a copy on the host, in page-locked memory.
        home: where results are wanted: the host, or the device, on all ranks alike.
        mixed: whether some ranks have a GPU, and others none.
        whole: whether all of it is always one Allreduce.

    Attributes:
        parts: memory of each vector's sum.
        tail: the slots' words, on the host.
        is_large: whether each word of the sums has memory of its own.
        seconds: spent on settling the sums (``pack``), in the Allreduce, waiting for other ranks included
            (``allreduce``), and on turning its result into float64 (``unpack``); added to, by `reduce`.
    """

    def __init__(
        self,
        word: torch.dtype,
        device: torch.device,
        world: World,
        sum_on_device: Callable[[Tensor], None] | None,
        home: torch.device = HOST,
        *,
        mixed: bool = False,
        whole: bool = False,
    ):
        self._whole = whole
        self._device, self._world, self._sum_on_device = device, world, sum_on_device
        self._home, self._stays = home, home.type != "cpu"
        self._moves = not self._stays or world.size > 1
        self._mixed, leaves_gpus = mixed, device.type != "cpu" and sum_on_device is None and self._moves
        self._piece_bytes = PIECE_BYTES if leaves_gpus or mixed else 0
        self._memory = self._device_memory = torch.empty(0, dtype=word)
        self._host, self._num_words = self._memory, 0
        self._shapes = list[tuple[int, int]]()
        self._shared: list[Tensor] = []
        self._can_share, self._is_shared = True, False
        self.parts: list[Words] = []
        self.tail = self._host.numpy()
        self.is_large = False
        self.seconds: dict[str, float] = {}

    def free(self) -> None:
        """Give the memory up; the caller gives up the sums in it."""
        self._memory = self._device_memory = self._host = self._memory.new_empty(0)
        self._shared, self.parts = [], []

    def lay_out(self, shapes: Sequence[tuple[int, int]], tail: int) -> None:
        """Make room for vectors of (words, entries), and for so many words of slots."""
        self._shapes, vectors = list(shapes), sum(words * entries for words, entries in shapes)
        alone = self._device.type == "cpu" and self._sum_on_device is None
        self.is_large = (
            alone and not self._mixed and not self._whole and vectors * self._memory.element_size() > LARGE_BYTES
        )
        if self.is_large:
            self._memory, self._shared = self._memory.new_empty(0), []
            self._device_memory = self._memory
            self.parts = [[_mapped(size, self._memory.dtype) for _ in range(words)] for words, size in shapes]
            vectors = 0
        words = vectors + tail
        self._is_shared = self._share(vectors * self._memory.element_size(), words, willing=alone)
        self._memory = _at_least(self._memory, words, self._device, on_host=True)
        self._host = self._memory[:words]
        if alone:  # then clients add into the memory that MPI sums
            self._device_memory = self._memory
        else:
            self._device_memory = _at_least(self._device_memory, words, self._device)
        self._num_words, self.tail = vectors, self._host[vectors:].numpy()
        if not self.is_large:
            self.parts = list(_split(self._device_memory, shapes))

    def _share(self, sum_bytes: int, words: int, *, willing: bool) -> bool:
        """Map the sums of all ranks of the host, `words` long each, if they are large enough; return whether so."""
        if not self._can_share or self._mixed or self._whole or not SHARED_BYTES <= sum_bytes <= LARGE_BYTES:
            return False
        if not self._shared or len(self._shared[0]) < words:
            found = shared_memory(self._world, words * self._memory.element_size(), willing=willing)
            self._can_share = found is not None
            self._shared = [torch.from_numpy(one).view(self._memory.dtype) for one in found or []]
        if self._shared:
            self._memory = self._shared[self._world.rank]
        return self._can_share

    def reduce(self, totals: Totals, read: Read, failure: HpcfedError | None) -> dict[str, Tensor]:
        """Sum the vectors and the slots over ranks; return the vectors as float64, where they are wanted.

        Args:
            totals: the sums of the vectors; emptied where they are large, for they give up their memory.
            read: turns words into float64.
            failure: of this rank's device, which then adds nothing.

        Raises:
            HpcfedError: the failure, if the sums do not go through MPI.
        """
        if self.is_large:
            return self._reduce_large(totals, read)
        if self._is_shared:
            return self._reduce_shared(totals, read)
        if 0 < self._piece_bytes < self._num_words * self._host.element_size():
            return self._reduce_in_pieces(totals, read, failure is not None)
        if failure is not None:
            return self._reduce_without_device(totals, failure)
        return self._reduce_whole(totals, read)

    def _reduce_whole(self, totals: Totals, read: Read) -> dict[str, Tensor]:
        """Sum all of it by one Allreduce."""
        summed, started = self._room(totals), time.perf_counter()
        for total in totals.values():
            total.settle()
        packed = time.perf_counter()
        size, vectors = self._host.numel(), self._num_words
        if self._sum_on_device is not None:
            whole = self._device_memory[:size]
            whole[vectors:].copy_(self._host[vectors:], non_blocking=True)
            if self._device.type != "cpu":
                accelerator(self._device).synchronize(self._device)  # MPI knows nothing of torch's stream
            self._sum_on_device(whole)
            arrived = slice(vectors if self._stays else 0, None)
            self._host[arrived].copy_(whole[arrived])
        elif not self._moves:
            self._world.sum_in_place(self.tail)
        else:
            if self._host.data_ptr() != self._device_memory.data_ptr():
                self._host[:vectors].copy_(self._device_memory[:vectors])
            self._world.sum_in_place(self._host.numpy())
            if self._stays:
                self._device_memory[:vectors].copy_(self._host[:vectors], non_blocking=True)
        reduced = time.perf_counter()
        parts = self.parts if self._stays else _split(self._host, self._shapes)
        for words, (name, out) in zip(parts, summed.items(), strict=True):
            read(name, words, out)
        self._count(started, packed, reduced)
        return summed

    def _reduce_shared(self, totals: Totals, read: Read) -> dict[str, Tensor]:
        """Sum a slice of each vector, for all ranks to copy, and the slots."""
        summed, started = self._room(totals), time.perf_counter()
        for total in totals.values():
            total.settle()
        packed = time.perf_counter()
        self._world.barrier()
        everywhere = [_split(memory, self._shapes) for memory in self._shared]  # by rank and vector
        for number, (name, out) in enumerate(summed.items()):
            first, last = self._slice(len(out), self._world.rank)
            for start in range(first, last, SHARED_BLOCK):
                block = slice(start, min(start + SHARED_BLOCK, last))
                words = self._sum_block([parts[number][:, block] for parts in everywhere])
                read(name, words, out[block])
                if words.dtype == torch.int64:
                    np.copyto(_as_floats(words[0]).numpy(), out[block].numpy())
        self._world.barrier()
        reduced = time.perf_counter()
        for number, out in enumerate(summed.values()):
            for rank, parts in enumerate(everywhere):
                first, last = self._slice(len(out), rank)
                if rank != self._world.rank:
                    np.copyto(out[first:last].numpy(), _as_floats(parts[number][0, first:last]).numpy())
        self._count(started, packed, reduced)
        self._world.sum_in_place(self.tail)  # which ends when all ranks have copied all they need
        return summed

    def _slice(self, entries: int, rank: int) -> tuple[int, int]:
        """Return the first entry that a rank sums, and the one after its last."""
        return rank * entries // self._world.size, (rank + 1) * entries // self._world.size

    def _sum_block(self, blocks: Sequence[Tensor]) -> Tensor:
        """Sum the ranks' words, (words, n) each, into this rank's, and return them."""
        own = blocks[self._world.rank]
        for word, out in enumerate(own):
            total, scratch = blocks[0][word].numpy(), None
            for other in blocks[1:-1]:
                total = scratch = np.add(total, other[word].numpy(), out=scratch)
            np.add(total, blocks[-1][word].numpy(), out=out.numpy())
        return own

    def _reduce_without_device(self, totals: Totals, failure: HpcfedError) -> dict[str, Tensor]:
        """Add nothing to the other ranks' sums, so that they end with this rank's failure; return no sums.

        Raises:
            HpcfedError: the failure, if the sums do not go through MPI.
        """
        if self._sum_on_device not in (None, self._world.sum_in_place):
            raise failure
        self._host[: self._num_words].zero_()
        self._world.sum_in_place(self._host.numpy())
        return self._room(totals, HOST)

    def _reduce_large(self, totals: Totals, read: Read) -> dict[str, Tensor]:
        """Sum the vectors and the slots in pieces.

        One after another of a vector's words is given up, the first for the result, so that a round needs no more
        memory than its sums.
        """
        summed = dict[str, Tensor]()
        for name in tuple(totals):
            total, words = totals.pop(name), self.parts.pop(0)
            mine = words[0].dtype == torch.int64
            summed[name] = words[0].view(torch.float64) if mine else torch.empty(len(words[0]), dtype=torch.float64)
            piece = LARGE_PIECE_BYTES // words[0].element_size()
            for first in range(0, len(words[0]), piece):
                last = min(first + piece, len(words[0]))
                started = time.perf_counter()
                total.settle(first, last)
                packed = time.perf_counter()
                for word in words:
                    self._world.sum_in_place(word[first:last].numpy())
                reduced = time.perf_counter()
                read(name, [word[first:last] for word in words], summed[name][first:last])
                self._count(started, packed, reduced)
        self._world.sum_in_place(self.tail)
        return summed

    def _reduce_in_pieces(self, totals: Totals, read: Read, failed: bool) -> dict[str, Tensor]:
        """Sum the vectors in pieces, while those that follow are copied, and the slots."""
        summed = self._room(totals, HOST if failed else self._home)
        size = self._piece_bytes // self._host.element_size()
        pieces = [
            (number, name, first, min(first + size, entries))
            for number, (name, (_, entries)) in enumerate(zip(totals, self._shapes, strict=True))
            for first in range(0, entries, size)
        ]
        host = _split(self._host, self._shapes)
        arrivals = [  # all copies are begun before the first is waited for
            self._arrival(totals[name], host[number], self.parts[number], first, last, failed)
            for number, name, first, last in pieces
        ]
        for (number, name, first, last), arrive in zip(pieces, arrivals, strict=True):
            started = time.perf_counter()
            arrive()
            packed = time.perf_counter()
            for row in host[number]:
                self._world.sum_in_place(row[first:last].numpy())
            reduced = time.perf_counter()
            if self._stays and not failed:
                for own, row in zip(self.parts[number], host[number], strict=True):
                    own[first:last].copy_(row[first:last], non_blocking=True)
            else:
                read(name, host[number][:, first:last], summed[name][first:last])
            self._count(started, packed, reduced)
        self._world.sum_in_place(self.tail)
        if self._stays and not failed:
            for words, (name, out) in zip(self.parts, summed.items(), strict=True):
                read(name, words, out)
        return summed

    def _arrival(
        self, total: Total, host: Tensor, part: Words, first: int, last: int, failed: bool
    ) -> Callable[[], None]:
        """Start copying the entries ``first:last`` of a vector to the host; return a function that waits for them."""
        if failed:
            host[:, first:last].zero_()
            return lambda: None
        if self._device.type == "cpu":
            return partial(total.settle, first, last)
        total.settle(first, last)
        for row, own in zip(host, part, strict=True):
            row[first:last].copy_(own[first:last], non_blocking=True)
        return accelerator(self._device).mark(self._device)

    def _room(self, totals: Totals, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return memory for the results, float64; by default where they are wanted."""
        names, device = zip(totals, self._shapes, strict=True), device or self._home
        return {name: torch.empty(entries, dtype=torch.float64, device=device) for name, (_, entries) in names}

    def _count(self, started: float, packed: float, reduced: float) -> None:
        """Add up seconds by what they were spent on, from the times at which each began."""
        times = started, packed, reduced, time.perf_counter()
        for name, begun, ended in zip(("pack", "allreduce", "unpack"), times, times[1:], strict=False):
            self.seconds[name] += ended - begun


def _as_floats(words: Tensor) -> Tensor:
    """View of the sum's memory as its result: float32 sums as they are, integers as float64."""
    return words.view(torch.float64) if words.dtype == torch.int64 else words


def _split(memory: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the memory of each vector's sum, (words, entries), one after another from the buffer's beginning."""
    parts, first = [], 0
    for words, entries in shapes:
        parts.append(memory[first : first + words * entries].view(words, entries))
        first += words * entries
    return parts


def _at_least(memory: Tensor, words: int, device: torch.device, *, on_host: bool = False) -> Tensor:
    """Return `memory` if it has `words` words, else new memory on `device`, or page-locked on the host for it."""
    if memory.numel() >= words:
        return memory
    if device.type == "cpu":
        room = np.empty(words, memory.numpy().dtype)  # numpy asks for huge pages: fewer for MPI to map
        return torch.from_numpy(room)
    if on_host:
        return accelerator(device).page_locked(words, memory.dtype)
    return torch.empty(words, dtype=memory.dtype, device=device)


def _mapped(words: int, dtype: torch.dtype) -> Tensor:
    """Return memory on the host that goes back to the system as soon as it is not used: malloc would keep it."""
    room = mmap.mmap(-1, words * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on Linux
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(room, torch.empty(0, dtype=dtype).numpy().dtype))
