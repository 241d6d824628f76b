"""The layout of a checkpoint on disk.

    checkpoints/round-00000050.server        safetensors: w, server and shared state, touched, averaged buffers
    checkpoints/round-00000050.clients       one record per client that has a state
    checkpoints/round-00000050.json          the manifest, renamed into place last: without it there is no checkpoint

The ranks' records lie one after another, a section a rank, each on a 4 KiB boundary, and within a section in the order
of client numbers; ``touched`` has the clients in that order, and the manifest how many each section has. So every rank
computes the offsets and writes its own without communication, and any number of ranks can read them back. A record:
magic, client, round, hash of the payload, its size in bytes (five words of 8 bytes), then the payload: the state's
tensors in the order of their names. Records of more than 4 KiB begin on such a boundary, smaller ones on 8 bytes.

The states of a private run are encrypted with a key of its secret seed, and its ``touched`` are all clients:

    hash of the payload:  t = SHAKE-256(key, client, round, payload), 64 bits
    payload:              payload ⊕ SHAKE-256(key, client, round, t)

In layout 2 all clients are one section, and every record begins on a boundary of 4 KiB.
"""

from __future__ import annotations

import errno
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError, shown
from hpcfed.io.text import parse_json, read_text
from hpcfed.parts import Parts
from hpcfed.types import State
from hpcfed.version import ARITHMETIC

VERSION = 3
MAGIC = b"hpcfed-c"
HEADER = struct.Struct("<8sqqQq")
ADDRESS = struct.Struct("<3Q")
PAGE, WORD = 4096, 8
"""Records of two ranks never share a page: some file systems cache by page."""
SUFFIXES = ("server", "clients", "json")
NO_FILE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Error numbers of a path that does not exist or is no file."""


class Damaged(HpcfedError):
    """A checkpoint's files do not match its manifest; the checkpoint before may be whole."""


def unreadable(path: Path, error: OSError) -> HpcfedError:
    """Return the error for a file of a checkpoint that cannot be read: `Damaged` if it does not exist.

    Else `EnvironmentFailure`: a disk or a permission is at fault, the checkpoint may be whole, and an older one must
    not take its place.
    """
    reason = error.strerror or str(error)
    if error.errno in NO_FILE_ERRORS:
        return Damaged(f"{path.name} cannot be read: {reason}")
    remedy = "give back the permission, or mend the disk; the same command then goes on from there"
    return EnvironmentFailure("the checkpoint cannot be read", where=str(path), got=reason, remedy=remedy)


class _ManifestSection(BaseModel):
    model_config = ConfigDict(strict=True)


class MagnitudesState(_ManifestSection):
    """State of `hpcfed.reduce.units.Magnitudes`: exponents of two, and a count."""

    spans: dict[str, Annotated[list[Annotated[float, Field(ge=-1100, le=1100)]], Field(min_length=2, max_length=2)]]
    repeats: int


class MarkState(_ManifestSection):
    """State of `hpcfed.run_folder.stopping.BestScore`, and the metric that it is of, as in a recipe."""

    of: Any
    best: float | None
    since_best: int


class EarlierMeasures(_ManifestSection):
    """Keys of ``evaluate`` as they were until a round, where a run went on with others."""

    until: int
    measured: dict[str, str]


class StoppingState(_ManifestSection):
    """State of `hpcfed.run_folder.stopping.Stopping`."""

    rule: dict[str, Any]
    reached: int
    best: float | None
    since_best: int
    reason: str | None
    follows: str | None = None
    marks: dict[str, MarkState] = Field(default_factory=dict)
    evaluated: int = 0
    measured: dict[str, str] = Field(default_factory=dict)
    measured_before: list[EarlierMeasures] = Field(default_factory=list)


class Progress(_ManifestSection):
    """The round loop's state besides tensors."""

    totals: dict[str, int]
    stopping: StoppingState
    magnitudes: MagnitudesState


class Manifest(_ManifestSection):
    """The manifest of a checkpoint, ``.json``.

    Attributes:
        round: the round after which the checkpoint was taken.
        recipe: digest of the recipe's keys that decide the run's result.
        server_hash: hash of the ``.server`` file.
        num_clients: number of records in ``.clients``.
        progress: the round loop's state, except for tensors.
        version: version of the layout.
        sha256: SHA-256 of the ``.server`` file, against deliberate changes; None if an earlier version wrote it.
        sections: number of records in each section of ``.clients``.
        arithmetic: version of the arithmetic that computed the rounds (`hpcfed.version.ARITHMETIC`).
    """

    round: Annotated[int, Field(ge=1)]
    recipe: str
    server_hash: str
    num_clients: int
    progress: Progress
    version: int = VERSION
    sha256: str | None = None
    sections: list[Annotated[int, Field(ge=0)]]
    arithmetic: int = Field(default_factory=lambda: ARITHMETIC)

    def to_json(self) -> str:
        """Return the manifest as JSON text, with its checksum."""
        content = self.model_dump()
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
        refuse_other_arithmetic(content, path)
        try:
            manifest = cls.model_validate(content)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise Damaged(f"{path.name} has the checksum of a manifest, but not its content: {shown(where)}") from None
        if path.stem != stem(manifest.round):
            raise Damaged(f"{path.name} is of another round")
        if sum(manifest.sections) != manifest.num_clients:
            raise Damaged(f"{path.name} does not say where its clients' records are")
        return manifest


def refuse_other_arithmetic(facts: Mapping[str, Any], where: Path) -> None:
    """Refuse to go on with, or compute again, rounds whose bits were made in another way than this version's.

    Args:
        facts: a manifest, or ``environment.json``, with their ``arithmetic``; without it, it is 1.
        where: the file or folder.

    Raises:
        InputError: they were.
    """
    found = facts.get("arithmetic", 1)
    if found != ARITHMETIC:
        raise InputError(
            "rounds computed by another arithmetic",
            where=str(where),
            expected=f"arithmetic {ARITHMETIC}, this version's",
            got=f"{shown(found)}, whose last bits differ (docs/bits.md)",
            remedy="use the version of hpcfed that computed them (environment.json), or train again with --fresh",
        )


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def stem(round: int) -> str:
    """Return the common name of a checkpoint's files."""
    return f"round-{round:08}"


class RecordLayout:
    """The layout of ``.clients``: each record's offset, and the encoding of a state.

    Args:
        example: a client state of the run's method; all have the same names, shapes and types.
        key: with which payloads are encrypted; None where they are not.
    """

    def __init__(self, example: State, key: bytes | None = None):
        self._key = key
        self._names = sorted(example)
        self._shapes = {name: tuple(example[name].shape) for name in self._names}
        self._dtypes = {name: example[name].dtype for name in self._names}
        self._payload = sum(example[name].nbytes for name in self._names)

    def record_bytes(self) -> int:
        """Return the bytes from one record to the next of a section."""
        size = HEADER.size + self._payload
        return _whole(size, PAGE if size > PAGE else WORD)

    def bytes_of(self, sections: Sequence[int]) -> int:
        """Return the number of bytes of all records, from the number of records in each section."""
        return sum(_whole(count * self.record_bytes(), PAGE) for count in sections)

    def offsets(self, sections: Sequence[int]) -> np.ndarray:
        """Return each record's offset in bytes, (n,) int64, from the number of records in each section."""
        counts, size = np.array(sections, np.int64), self.record_bytes()
        lengths = -(-counts * size // PAGE) * PAGE
        firsts, begins = np.cumsum(counts) - counts, np.cumsum(lengths) - lengths
        return np.arange(counts.sum()) * size + np.repeat(begins - firsts * size, counts)

    def write(self, file: BinaryIO, client: int, round: int, state: State) -> None:
        """Write a client's record at the file's current position."""
        payload: list[memoryview | bytes] = [_bytes_of(state[name]) for name in self._names]
        digest = self._digest(payload, client, round)
        if self._key is not None:
            payload = [self._masked(b"".join(payload), client, round, digest)]
        file.write(HEADER.pack(MAGIC, client, round, digest, self._payload))
        for part in payload:
            file.write(part)
        file.write(bytes(self.record_bytes() - HEADER.size - self._payload))

    def read(self, file: BinaryIO, client: int, round: int) -> bytes:
        """Read the payload of a client's record at the file's current position.

        Raises:
            Damaged: another record lies there, or its hash differs.
            OSError: as the system reports it.
        """
        header, data = file.read(HEADER.size), file.read(self._payload)
        if len(header) + len(data) < HEADER.size + self._payload:
            raise Damaged(f"{stem(round)}.clients ends before the record of client {client}")
        magic, found, of_round, digest, size = HEADER.unpack(header)
        if (magic, found, of_round, size) != (MAGIC, client, round, self._payload):
            raise Damaged(f"{stem(round)}.clients has another record in the place of client {client}'s")
        if self._key is not None:
            data = self._masked(data, client, round, digest)
        if self._digest([data], client, round) != digest:
            raise Damaged(f"{stem(round)}.clients: the record of client {client} does not match its checksum")
        return data

    def _digest(self, payload: Sequence[memoryview | bytes], client: int, round: int) -> int:
        """Return the hash of a payload, 64 bits."""
        if self._key is None:
            digest = xxhash.xxh3_64()
            for part in payload:
                digest.update(part)
            return digest.intdigest()
        keyed = hashlib.shake_256(self._key + ADDRESS.pack(client, round, 0))
        for part in payload:
            keyed.update(part)
        return int.from_bytes(keyed.digest(8), "little")

    def _masked(self, payload: bytes, client: int, round: int, digest: int) -> bytes:
        """Encrypt a payload, or decrypt an encrypted one."""
        assert self._key is not None
        mask = hashlib.shake_256(self._key + ADDRESS.pack(client, round, 1) + digest.to_bytes(8, "little"))
        found = np.frombuffer(payload, np.uint8) ^ np.frombuffer(mask.digest(len(payload)), np.uint8)
        return found.tobytes()

    def state_of(self, payload: bytes) -> dict[str, Tensor]:
        """Return the client state, on the host, that a payload encodes."""
        state, start = {}, 0
        for name in self._names:
            dtype, shape = self._dtypes[name], self._shapes[name]
            end = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            data = bytearray(payload[start:end])
            state[name] = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
            start = end
        return state


def layout_of_states(parts: Parts, w: Tensor) -> RecordLayout:
    """Return the record layout of the client states of a run; `w`, (d,), may be any model of the run."""
    privacy = parts.chain.privacy
    return RecordLayout(parts.method.local.begin(w), None if privacy is None else privacy.key)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is on the host."""
    return tensor.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8).data


def _whole(size: int, unit: int) -> int:
    """Return a size in bytes, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
