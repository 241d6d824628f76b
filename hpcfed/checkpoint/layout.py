"""The layout of a checkpoint on disk.

    checkpoints/round-00000050.server        safetensors: w, previous w, mean delta, server and shared state, touched
    checkpoints/round-00000050.clients       one record per client that has a state, each on a 4 KiB boundary
    checkpoints/round-00000050.json          the manifest, renamed into place last: without it there is no checkpoint

Records are in the order of client numbers: every rank computes their offsets and writes its own without communication,
and any number of ranks can read them back. A record: magic, client, round, hash of the payload, its size in bytes (five
words of 8 bytes), then the payload: the state's tensors in the order of their names.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError, shown
from hpcfed.io.text import parse_json, read_text
from hpcfed.types import State

VERSION = 2
MAGIC = b"hpcfed-c"
HEADER = struct.Struct("<8sqqQq")
PAGE = 4096
"""Records of two ranks never share a page: some file systems cache by page."""
SUFFIXES = ("server", "clients", "json")
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Error numbers of a path that does not exist or is no file."""


class Damaged(HpcfedError):
    """A checkpoint's files do not match its manifest; the checkpoint before may be whole."""


def unreadable(path: Path, error: OSError) -> HpcfedError:
    """Return the error for a file of a checkpoint that cannot be read: `Damaged` if it does not exist.

    Else `EnvironmentFailure`: a disk or a permission is at fault, the checkpoint may be whole, and an older one must
    not take its place.
    """
    reason = error.strerror or str(error)
    if error.errno in ABSENT:
        return Damaged(f"{path.name} cannot be read: {reason}")
    remedy = "give back the permission, or mend the disk; the same command then goes on from there"
    return EnvironmentFailure("the checkpoint cannot be read", where=str(path), got=reason, remedy=remedy)


class _Section(BaseModel):
    model_config = ConfigDict(strict=True)


class MagnitudesState(_Section):
    """State of `hpcfed.reduce.units.Magnitudes`: exponents of two, and a count."""

    spans: dict[str, Annotated[list[Annotated[float, Field(ge=-1100, le=1100)]], Field(min_length=2, max_length=2)]]
    repeats: int


class StoppingState(_Section):
    """State of `hpcfed.stopping.Stopping`."""

    rule: dict[str, Any]
    reached: int
    best: float | None
    since_best: int
    reason: str | None


class Progress(_Section):
    """The round loop's state besides tensors."""

    totals: dict[str, int]
    stopping: StoppingState
    magnitudes: MagnitudesState


class ManifestContent(_Section):
    """What a manifest of this version holds besides its checksum."""

    round: Annotated[int, Field(ge=1)]
    recipe: str
    server_hash: str
    num_clients: int
    progress: Progress
    version: int


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint, ``.json``.

    Attributes:
        round: last round it contains.
        recipe: digest of all that decides the run's result.
        server_hash: of the ``.server`` file.
        num_clients: records in ``.clients``.
        progress: the round loop's state besides tensors, as plain JSON.
        version: of the layout.
        sha256: of the ``.server`` file too, against intent; None where an earlier version wrote it.
    """

    round: int
    recipe: str
    server_hash: str
    num_clients: int
    progress: Mapping[str, Any]
    version: int = VERSION
    sha256: str | None = None

    def to_json(self) -> str:
        """Return the manifest as JSON text, with its checksum."""
        content = asdict(self)
        return json.dumps({**content, "checksum": _digest(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            Damaged: it is missing, malformed, or does not match its checksum.
            EnvironmentFailure: it exists but cannot be read.
            InputError: another version of hpcfed wrote it.
        """
        try:
            content = parse_json(read_text(path))
            checksum = content.pop("checksum")
        except OSError as error:
            raise unreadable(path, error) from None
        except (ValueError, AttributeError, KeyError, TypeError):
            raise Damaged(f"{path.name} is no manifest") from None
        if checksum != _digest(content):
            raise Damaged(f"{path.name} does not match its checksum")
        if content.get("version") != VERSION:
            raise InputError(
                "a checkpoint of another version of hpcfed",
                where=str(path),
                expected=f"layout {VERSION}",
                got=shown(content.get("version")),
                remedy="go on with that version, or choose another output",
            )
        try:
            ManifestContent.model_validate(content)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise Damaged(f"{path.name} has the checksum of a manifest, but not its content: {shown(where)}") from None
        if path.stem != stem(content["round"]):
            raise Damaged(f"{path.name} is of another round")
        return cls(**content)


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def stem(round: int) -> str:
    """Return the common name of a checkpoint's files."""
    return f"round-{round:08}"


class RecordLayout:
    """The layout of ``.clients``: each record's offset, and the encoding of a state.

    Args:
        example: a client state of the run's method; all have the same names, shapes and types.
    """

    def __init__(self, example: State):
        self._names = sorted(example)
        self._shapes = {name: tuple(example[name].shape) for name in self._names}
        self._dtypes = {name: example[name].dtype for name in self._names}
        self._payload = sum(example[name].nbytes for name in self._names)

    @property
    def record_bytes(self) -> int:
        """Bytes from one record to the next."""
        return -(-(HEADER.size + self._payload) // PAGE) * PAGE

    def write(self, file: int, place: int, client: int, round: int, state: State) -> None:
        """Write a client's record; `place` is its index among the clients that have one."""
        payload = [_bytes_of(state[name]) for name in self._names]
        digest = xxhash.xxh3_64()
        for part in payload:
            digest.update(part)
        header = HEADER.pack(MAGIC, client, round, digest.intdigest(), self._payload)
        offset = place * self.record_bytes
        _write_all(file, header, offset)
        offset += len(header)
        for part in payload:
            _write_all(file, part, offset)
            offset += part.nbytes

    def read(self, file: int, place: int, client: int, round: int) -> dict[str, Tensor]:
        """Read a client's state back, on the host.

        Raises:
            Damaged: another record lies there, or its hash differs.
            OSError: as the system reports it.
        """
        data = os.pread(file, HEADER.size + self._payload, place * self.record_bytes)
        if len(data) < HEADER.size + self._payload:
            raise Damaged(f"{stem(round)}.clients ends before the record of client {client}")
        magic, found, of_round, digest, size = HEADER.unpack_from(data)
        if (magic, found, of_round, size) != (MAGIC, client, round, self._payload):
            raise Damaged(f"{stem(round)}.clients has another record in the place of client {client}'s")
        if xxhash.xxh3_64_intdigest(data[HEADER.size :]) != digest:
            raise Damaged(f"{stem(round)}.clients: the record of client {client} does not match its checksum")
        return self._tensors(data[HEADER.size :])

    def _tensors(self, payload: bytes) -> dict[str, Tensor]:
        state, start = {}, 0
        for name in self._names:
            dtype, shape = self._dtypes[name], self._shapes[name]
            end = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            state[name] = torch.frombuffer(bytearray(payload[start:end]), dtype=dtype).view(shape)
            start = end
        return state


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is on the host."""
    return tensor.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8).data


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
