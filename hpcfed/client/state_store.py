"""The store of clients' states between rounds: on the device, in the host's memory, or in files on the node's disk.

    client_state: device     on the device while there is room, then on the host, then on disk
    client_state: host       on the host while there is room, then on disk
    client_state: disk       on disk

The least recently used states move down first. A state takes memory from its client's first participation on, and is
the same to the last bit in any of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcfed.errors import EnvironmentFailure
from hpcfed.ranks.accelerators import is_full, upload
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
                return {name: self._there(tensor) for name, tensor in tier[client].items()}
        return None

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a state's vector on the device."""
        return upload(tensor, self._device) if tensor.device.type == "cpu" else tensor

    def commit(self, states: Mapping[int, State]) -> None:
        """Keep the next states of the round's clients in place of the old.

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

        Those on disk are read when they are asked for. A client's memory and file are not used again until `let_go`.
        """
        in_memory = {client: state for tier in self._memories for client, state in tier.hold().items()}
        return _Snapshot(in_memory, self._disk.hold())

    def let_go(self, client: int) -> None:
        """Say that the last snapshot's state of a client has been read; from any thread."""
        for tier in self._tiers:
            tier.let_go(client)

    def release(self) -> None:
        """Let go of all the last snapshot's memory and files."""
        for tier in self._tiers:
            tier.release()

    def _put(self, level: int, client: int, state: State) -> None:
        for moved in self._tiers[level].put(client, state):
            self._put(level + 1, *moved)


class _Memory(OrderedDict[int, State]):
    """States in one memory, least recently used first; gives back those that no longer fit.

    They are copied into memory that is used again for the next ones: taken anew every round, it would be broken up.
    That of a state which a snapshot holds comes back with `release`.
    """

    def __init__(self, device: torch.device, room: int):
        super().__init__()
        self._where, self._room = device, room
        self._spare: list[State] = []
        self._superseded: list[State] = []
        self._held: set[int] = set()

    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        """Copy a state, in place of the client's old one; return those that no longer fit, until the next call."""
        kept = self._spare.pop() if self._spare else self._taken(state)
        if kept is None:
            self.forget(client)
            return [(client, state)]
        for name, tensor in state.items():
            kept[name].copy_(tensor)
        self.forget(client)
        self[client] = kept
        self._room -= _nbytes(kept)
        moved = []
        while self._room < 0 and self:
            oldest = next(iter(self))
            moved.append((oldest, self[oldest]))
            self.forget(oldest)
        return moved

    def _taken(self, state: State) -> State | None:
        """Return new memory for a state; None if a device has less than it said, and from then on."""
        try:
            return _like(state, self._where)
        except RuntimeError as error:
            if not is_full(error):
                raise
        self._room = 0
        return None

    def forget(self, client: int) -> None:
        if client in self:
            old = self.pop(client)
            self._room += _nbytes(old)
            if client in self._held:
                self._held.discard(client)
                self._superseded.append(old)
            else:
                self._spare.append(old)

    def hold(self) -> dict[int, State]:
        """Return the states, whose memory is not used again before they are let go."""
        self._held.update(self)
        return dict(self)

    def let_go(self, client: int) -> None:
        self._held.discard(client)

    def release(self) -> None:
        self._held.clear()
        self._spare += self._superseded
        self._superseded.clear()


class _Files:
    """States in files, one a client, in a folder of this rank's own under the node's temporary folder ($TMPDIR)."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._paths: dict[int, Path] = {}
        self._written = 0
        self._superseded: list[Path] = []
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[int]:
        return iter(self._paths)

    def __contains__(self, client: object) -> bool:
        return client in self._paths

    def __getitem__(self, client: int) -> State:
        return load_file(self._paths[client])

    def put(self, client: int, state: State) -> list[tuple[int, State]]:
        """Write a state to a file that no snapshot has seen."""
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="hpcfed-states-"))
            self._written += 1
            path = self._folder / f"{client}-{self._written}.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, path)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFailure(
                f"the state of client {client} cannot be written",
                where=str(self._folder or tempfile.gettempdir()),
                got=str(error),
                remedy="point TMPDIR to a larger disk of the node",
            ) from error
        self.forget(client)
        self._paths[client] = path
        return []

    def forget(self, client: int) -> None:
        if client in self._paths:
            path = self._paths.pop(client)
            if client in self._held:
                self._held.discard(client)
                self._superseded.append(path)
            else:
                path.unlink(missing_ok=True)

    def hold(self) -> dict[int, Path]:
        """Return the files, which stay until they are let go."""
        self._held.update(self._paths)
        return dict(self._paths)

    def let_go(self, client: int) -> None:
        self._held.discard(client)

    def release(self) -> None:
        self._held.clear()
        for path in self._superseded:
            path.unlink(missing_ok=True)
        self._superseded.clear()

    def clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._paths.clear()


class _Snapshot(Mapping[int, State]):
    """States in memory, and files of those that are not."""

    def __init__(self, in_memory: Mapping[int, State], files: Mapping[int, Path]):
        self._in_memory, self._files = in_memory, files

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._files)

    def __iter__(self) -> Iterator[int]:
        yield from self._in_memory
        yield from self._files

    def __getitem__(self, client: int) -> State:
        return self._in_memory[client] if client in self._in_memory else load_file(self._files[client])


def _like(state: State, where: torch.device) -> State:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=where) for name, tensor in state.items()}


def _nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
