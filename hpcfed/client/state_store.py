"""The store of clients' states between rounds: on the device, in the host's memory, or in a file on the node's disk.

    client_state: device     on the device while there is room, then on the host, then on disk
    client_state: host       on the host while there is room, then on disk
    client_state: disk       on disk

The least recently used states move down first. A state takes memory from its client's first participation on, and is
the same to the last bit in any of them. States are packed one after another, since a million small tensors of their own
would take ten times their bytes.
"""

from __future__ import annotations

import math
import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import EnvironmentFailure
from hpcfed.io.node import temporary_folder
from hpcfed.ranks.accelerators import answer, is_full, upload
from hpcfed.types import State

TIERS = ("device", "host", "disk")
ALIGNED = 64
"""Bytes: each tensor of a state begins on a boundary of so many."""
SLAB_BYTES = 1 << 20
"""Memory is taken for as many states at once as fit into this, or for one."""


class ClientStates:
    """The states of the clients at home on this rank, as far as they have taken part.

    Args:
        top: the recipe's ``client_state``, the first of `TIERS` to use.
        device: where states are used.
        room: bytes that may be held on the device and on the host. On a CPU only the host's counts.
    """

    def __init__(self, top: str, device: torch.device, room: Mapping[str, int]):
        self._device = device
        memories = [_Memory(device, room["device"]), _Memory(torch.device("cpu"), room["host"])][TIERS.index(top) :]
        self._memories = memories[-1:] if device.type == "cpu" else memories
        self._disk = _File()
        self._tiers: tuple[_Tier, ...] = (*self._memories, self._disk)

    def __enter__(self) -> ClientStates:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._disk.clear()

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    def __iter__(self) -> Iterator[int]:
        """Yield the clients that have a state."""
        for tier in self._tiers:
            yield from tier

    def open_disk(self) -> None:
        """Create the file of states on disk now, where all of them go there: better before a round than after it.

        Raises:
            EnvironmentFailure: the temporary folder does not exist or cannot be written.
        """
        if not self._memories:
            self._disk.open()

    def get(self, client: int) -> State | None:
        """Return a client's state, vectors (d,) on the device; None before its first participation.

        It may lie in the store's own memory, which the next `commit` or `forget` uses again.
        """
        for tier in self._tiers:
            if client in tier:
                return {name: self._there(tensor) for name, tensor in tier[client].items()}
        return None

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a state's vector on the device."""
        return upload(tensor, self._device) if tensor.device.type == "cpu" else tensor

    def commit(self, states: Mapping[int, State]) -> None:
        """Keep copies of the next states of the round's clients in place of the old.

        Args:
            states: by client; none in memory that `get` has returned.

        Raises:
            EnvironmentFailure: the disk refuses.
        """
        for client, state in states.items():
            for tier in self._tiers[1:]:
                tier.forget(client)
            self._put(0, client, state)

    def forget(self, clients: Iterable[int]) -> None:
        """Forget the states of clients that have moved to another rank."""
        for client in clients:
            for tier in self._tiers:
                tier.forget(client)

    def snapshot(self) -> Mapping[int, State]:
        """Return all states by client as they are now; later commits do not change them.

        They are read when they are asked for. A client's place is not used again until `release`.
        """
        return _Snapshot([(tier, tier.hold()) for tier in self._tiers])

    def release(self, client: int) -> None:
        """Say that the last snapshot's state of a client has been read; from any thread."""
        for tier in self._tiers:
            tier.release(client)

    def end_snapshot(self) -> None:
        """Let go of all the last snapshot's places."""
        for tier in self._tiers:
            tier.end_snapshot()

    def _put(self, level: int, client: int, state: State) -> None:
        for moved in self._tiers[level].put(client, state):
            self._put(level + 1, *moved)


class _Layout:
    """The layout of a state in a row of bytes: its tensors one after another, each on a boundary of `ALIGNED` bytes.

    Attributes:
        row_bytes: length of a row.
    """

    def __init__(self, like: State):
        self.row_bytes, self._parts = 0, list[tuple[str, int, int, torch.dtype, torch.Size]]()
        for name, tensor in like.items():
            first, last = self.row_bytes, self.row_bytes + tensor.nbytes
            self._parts.append((name, first, last, tensor.dtype, tensor.shape))
            self.row_bytes = math.ceil(last / ALIGNED) * ALIGNED
        self.row_bytes = max(self.row_bytes, ALIGNED)  # also of a state without entries

    def views(self, row: Tensor) -> State:
        """Return the tensors in a row, (row_bytes,) uint8."""
        return {
            name: row[first:last].view(dtype).view(shape) if last > first else row.new_empty(shape, dtype=dtype)
            for name, first, last, dtype, shape in self._parts
        }


class _Tier(ABC):
    """States by client, least recently used first, each in a place that is used again once its client has left it.

    The place of a state that a snapshot holds comes back with `end_snapshot`.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[int, int] = OrderedDict()
        self._spare: list[int] = []
        self._superseded: list[int] = []
        self._held: set[int] = set()
        self._num_places = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def __getitem__(self, client: int) -> State:
        return self.read(self._places[client])

    @abstractmethod
    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        """Copy a state, in place of the client's old one; return those that no longer fit, until the next call."""

    @abstractmethod
    def read(self, place: int) -> State:
        """Return the state in a place."""

    def forget(self, client: int) -> None:
        """Free a client's place; one that the snapshot holds is freed by `end_snapshot`."""
        place = self._places.pop(client, None)
        if place is None:
            return
        if client in self._held:
            self._held.discard(client)
            self._superseded.append(place)
        else:
            self._spare.append(place)

    def hold(self) -> dict[int, int]:
        """Return the states' places, which are not used again before they are let go."""
        self._held.update(self._places)
        return dict(self._places)

    def release(self, client: int) -> None:
        """Stop holding a client's place: the snapshot's copy has been read."""
        self._held.discard(client)

    def end_snapshot(self) -> None:
        """End the snapshot: free the places that only it held."""
        self._held.clear()
        self._spare += self._superseded
        self._superseded.clear()

    def _free_place(self) -> int:
        if self._spare:
            return self._spare.pop()
        self._num_places += 1
        return self._num_places - 1


class _Memory(_Tier):
    """States in one memory; gives back those that no longer fit.

    They are copied into memory that is used again for the next ones: taken anew every round, it would be broken up.
    """

    def __init__(self, device: torch.device, room: int):
        super().__init__()
        self._where, self._room = device, room
        self._layout: _Layout | None = None
        self._slabs: list[Tensor] = []
        self._rows = 1

    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        if self._layout is None:
            self._layout = _Layout(state)
            self._rows = max(1, SLAB_BYTES // max(self._layout.row_bytes, 1))
        place = self._free_place()
        if place >= len(self._slabs) * self._rows and not self._grows():
            self._num_places -= 1
            self.forget(client)
            return [(client, state)]
        for name, kept in self.read(place).items():
            kept.copy_(state[name])
        self.forget(client)
        self._places[client] = place
        self._room -= self._layout.row_bytes
        moved = []
        while self._room < 0 and self._places:
            oldest = next(iter(self._places))
            moved.append((oldest, self[oldest]))
            self.forget(oldest)
        return moved

    def read(self, place: int) -> State:
        assert self._layout is not None  # of the first state
        return self._layout.views(self._slabs[place // self._rows][place % self._rows])

    def forget(self, client: int) -> None:
        if client in self._places and self._layout is not None:
            self._room += self._layout.row_bytes
        super().forget(client)

    def _grows(self) -> bool:
        """Take memory for more states; False if a device has less than it said, and from then on."""
        assert self._layout is not None
        try:
            self._slabs.append(torch.empty(self._rows, self._layout.row_bytes, dtype=torch.uint8, device=self._where))
        except RuntimeError as error:
            if not is_full(error):
                raise
            answer(error)
            self._room = 0
            return False
        return True


class _File(_Tier):
    """States in one unnamed file of the node's temporary folder ($TMPDIR), which the system removes with the process,
    however it ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout: _Layout | None = None
        self._file: IO[bytes] | None = None

    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        """Write a state to a place that no snapshot holds."""
        if self._layout is None:
            self._layout = _Layout(state)
        row, place = torch.empty(self._layout.row_bytes, dtype=torch.uint8), self._free_place()
        for name, part in self._layout.views(row).items():
            part.copy_(state[name])
        file = self.open()
        try:
            _write_at(file, row.numpy(), place * len(row))
        except OSError as error:
            raise EnvironmentFailure(
                f"the state of client {client} cannot be written",
                where=str(temporary_folder()),
                got=str(error),
                remedy="point TMPDIR to a larger disk of the node",
            ) from error
        self.forget(client)
        self._places[client] = place
        return []

    def read(self, place: int) -> State:
        assert self._layout is not None
        row = torch.empty(self._layout.row_bytes, dtype=torch.uint8)
        _read_at(self.open(), row.numpy(), place * len(row))
        return self._layout.views(row)

    def open(self) -> int:
        """Return the file's descriptor, of a new file at the first call.

        Raises:
            EnvironmentFailure: the temporary folder does not exist or cannot be written.
        """
        if self._file is None:
            folder = temporary_folder()
            try:
                self._file = tempfile.TemporaryFile(prefix="hpcfed-states-", dir=folder)  # noqa: SIM115 (until `clear`)
            except OSError as error:
                what, got = "no file for clients' states can be created", error.strerror or str(error)
                remedy = "point TMPDIR to a folder of the node's disk"
                raise EnvironmentFailure(what, where=str(folder), got=got, remedy=remedy) from error
        return self._file.fileno()

    def clear(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._places.clear()


class _Snapshot(Mapping[int, State]):
    """States of all tiers, by client, as they were when their places were held."""

    def __init__(self, parts: Sequence[tuple[_Tier, Mapping[int, int]]]):
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(places) for _, places in self._parts)

    def __iter__(self) -> Iterator[int]:
        for _, places in self._parts:
            yield from places

    def __getitem__(self, client: int) -> State:
        for tier, places in self._parts:
            if client in places:
                return tier.read(places[client])
        raise KeyError(client)


def _write_at(file: int, data: np.ndarray, offset: int) -> None:
    """Write all of the data, (n,) uint8, which the system may take in several parts."""
    while len(data):
        written = os.pwrite(file, data.data, offset)
        data, offset = data[written:], offset + written


def _read_at(file: int, data: np.ndarray, offset: int) -> None:
    """Fill the data, (n,) uint8.

    Raises:
        OSError: the file ends before.
    """
    while len(data):
        read = os.preadv(file, [data.data], offset)
        if not read:
            raise OSError("the file of clients' states ends too early")
        data, offset = data[read:], offset + read
