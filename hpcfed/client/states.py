"""Where clients' states lie between rounds: on the device, in the host's memory, or in files on the node's own disk.

    client_state: device     on the device while there is room, then on the host, then on disk
    client_state: host       on the host while there is room, then on disk
    client_state: disk       on disk

The least recently used states move down first. A state takes memory from its client's first participation on, and is
the same to the last bit wherever it lay.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hpcfed.errors import EnvironmentFailure
from hpcfed.types import State

TIERS = ("device", "host", "disk")


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
        self._disk = _Files()
        self._tiers: tuple[_Memory | _Files, ...] = (*self._memories, self._disk)

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

    def get(self, client: int) -> State | None:
        """Return a client's state, vectors (d,) on the device; None before its first participation."""
        for tier in self._tiers:
            if client in tier:
                return {name: tensor.to(self._device) for name, tensor in tier[client].items()}
        return None

    def commit(self, states: Mapping[int, State]) -> None:
        """Keep the next states of the round's clients in place of the old.

        Raises:
            EnvironmentFailure: the disk refuses.
        """
        for client, state in states.items():
            for tier in self._tiers:
                tier.forget(client)
            self._put(0, client, state)

    def _put(self, level: int, client: int, state: State) -> None:
        for moved in self._tiers[level].put(client, state):
            self._put(level + 1, *moved)


class _Memory(OrderedDict[int, State]):
    """States in one memory, least recently used first; gives back those that no longer fit."""

    def __init__(self, device: torch.device, room: int):
        super().__init__()
        self._where, self._room = device, room

    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        self[client] = {name: tensor.to(self._where) for name, tensor in state.items()}
        self._room -= _nbytes(state)
        moved = []
        while self._room < 0 and self:
            oldest, old = self.popitem(last=False)
            self._room += _nbytes(old)
            moved.append((oldest, old))
        return moved

    def forget(self, client: int) -> None:
        if client in self:
            self._room += _nbytes(self.pop(client))


class _Files:
    """States in files, one a client, in a folder of this rank's own under the node's temporary folder ($TMPDIR)."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._clients: set[int] = set()

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __getitem__(self, client: int) -> State:
        return load_file(self._path(client))

    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, self._path(client))
        except (OSError, SafetensorError) as error:
            raise EnvironmentFailure(
                f"the state of client {client} cannot be written",
                where=str(self._folder or tempfile.gettempdir()),
                got=str(error),
                remedy="point TMPDIR to a larger disk of the node",
            ) from error
        self._clients.add(client)
        return []

    def forget(self, client: int) -> None:
        self._clients.discard(client)

    def clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._clients.clear()

    def _path(self, client: int) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="hpcfed-states-"))
        return self._folder / f"{client}.safetensors"


def _nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
