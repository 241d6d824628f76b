"""Reader of EMNIST's MATLAB files (.mat, level 5): one variable, a struct of structs of matrices of numbers.

    file     128 bytes of header, then elements
    element  type (4 bytes), size (4 bytes), data, padded to 8 bytes; or, when small, type and size in 2 bytes each and
             4 bytes of data. Type 15 is a zlib stream of an element, type 14 a matrix: elements for its class, its
             dimensions, its name, and then, by class, numbers column by column, or names of fields and a matrix each

The file is read in one pass and images are spooled to disk, so neither a large file nor a false size in it exhausts
memory. Not by scipy.io.loadmat: it holds all images in memory (640 MB of ByClass), and a damaged number type in a file
ends the process with a segmentation fault (scipy 1.17).

Reference: The MathWorks, "MAT-File Format", chapter 1.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import numpy as np

from data_prep.sources.files import CHUNK, damaged, reading
from data_prep.spool import Spool

HEADER_BYTES = 128
INT8, INT32, UINT32, MATRIX, COMPRESSED = 1, 5, 6, 14, 15
STRUCT = 2
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)
MOST_SMALL = 1 << 16
"""Most bytes of a descriptive element: a name, dimensions, the names of fields."""
FIELDS = {"images": "u1", "labels": "f8"}

Read = Callable[[int], bytes]


def read_emnist(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return ``train`` and ``test`` of the variable ``dataset``: images (n, 784) uint8, mapped, and labels (n,).

    Raises:
        InputError: it is not such a file, or damaged.
    """
    with reading(path), path.open("rb") as file:
        try:
            found = _read(file)
        except (_Wrong, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise damaged(path, "not EMNIST's MATLAB file of level 5, or damaged", error) from error
    missing = [f"dataset.{part}.{name}" for part in ("train", "test") for name in FIELDS if (part, name) not in found]
    if missing:
        raise damaged(path, f"lacks {', '.join(missing)}")
    parts = {}
    for part in ("train", "test"):
        images, labels = found[part, "images"], found[part, "labels"]
        parts[part] = (images.astype(np.uint8, copy=False), labels.reshape(-1).astype(np.float64))
    return parts


class _Wrong(Exception):
    """The file has another structure, or is damaged."""


def _read(file: BufferedReader) -> dict[tuple[str, str], np.ndarray]:
    header = file.read(HEADER_BYTES)
    orders = {b"IM": "<", b"MI": ">"}
    if len(header) < HEADER_BYTES or header[126:] not in orders:
        raise _Wrong("its header is another's")
    order = orders[header[126:]]
    kind, size = struct.unpack(f"{order}2I", _exactly(file.read, 8))
    if kind == COMPRESSED:
        stream = _Inflated(file, size)
        matrix = _Elements(stream.read, order)
        if matrix.tag()[0] != MATRIX:
            raise _Wrong("its first element is not a matrix")
    elif kind == MATRIX:
        stream, matrix = None, _Elements(file.read, order)
    else:
        raise _Wrong(f"its first element is of type {kind}")
    found = _dataset(matrix)
    if stream is not None:
        while stream.read(CHUNK):  # its checksum comes last
            pass
    return found


def _dataset(elements: _Elements) -> dict[tuple[str, str], np.ndarray]:
    found: dict[tuple[str, str], np.ndarray] = {}
    for part in elements.struct("dataset"):
        if part not in ("train", "test"):
            elements.skip_matrix()
            continue
        for name in elements.struct_field():
            if name in FIELDS:
                found[part, name] = elements.numbers(FIELDS[name])
            else:
                elements.skip_matrix()
    return found


class _Elements:
    """The elements of a stream, one after the other."""

    def __init__(self, read: Read, order: str):
        self._read, self._order = read, order

    def tag(self) -> tuple[int, int, bytes | None]:
        """Return type and size of the next element, and its data if stored in the tag (small element)."""
        (kind, size) = struct.unpack(f"{self._order}2I", _exactly(self._read, 8))
        if not kind >> 16:
            return kind, size, None
        data = struct.pack(f"{self._order}I", size)
        if kind >> 16 > len(data):
            raise _Wrong("a small element is too large")
        return kind & 0xFFFF, kind >> 16, data[: kind >> 16]

    def small(self, *kinds: int) -> bytes:
        """Return the data of the next element, a descriptive one of one of the types `kinds`."""
        kind, size, data = self.tag()
        if kind not in kinds or size > MOST_SMALL:
            raise _Wrong(f"an element of type {kind} and {size} bytes where one of type {kinds[0]} should be")
        if data is None:
            data = _exactly(self._read, size)
            _exactly(self._read, -size % 8)
        return data

    def struct(self, name: str | None = None) -> list[str]:
        """Read the head of a struct of one element, called `name` unless None, and return the names of its fields."""
        kind, shape, found = self._head()
        if kind != STRUCT or math.prod(shape) != 1 or name not in (None, found):
            raise _Wrong(f"no struct {name or ''}, but {found!r} of class {kind} and shape {shape}")
        (length,) = self._integers(self.small(INT32), 1)
        names = self.small(INT8)
        if length < 1 or len(names) % length:
            raise _Wrong("names of fields")
        return [names[i : i + length].split(b"\0")[0].decode("ascii") for i in range(0, len(names), length)]

    def struct_field(self) -> list[str]:
        """Read the tag and the head of a struct that is a field."""
        self._matrix()
        return self.struct()

    def numbers(self, dtype: str) -> np.ndarray:
        """Return a field's matrix of numbers (n, m), mapped from a temporary file."""
        self._matrix()
        kind, shape, _ = self._head()
        number, size, data = self.tag()
        stored = np.dtype(NUMBERS.get(number, "V1")).newbyteorder(self._order)  # type: ignore[arg-type]
        if kind not in NUMERIC_CLASSES or stored.kind == "V" or len(shape) != 2:
            raise _Wrong(f"a field of class {kind}, shape {shape} and numbers of type {number}")
        if math.prod(shape) * stored.itemsize != size:
            raise _Wrong(f"{size} bytes for a matrix {shape} of {stored}")
        spool = Spool((), dtype)
        left = size
        while left:
            piece = data if data is not None else _exactly(self._read, min(left, CHUNK))
            values = np.frombuffer(piece, stored)
            if dtype == "u1" and stored != np.uint8 and not np.isin(values, np.arange(256)).all():
                raise _Wrong("pixels beyond 0 … 255")
            spool.append(values)
            left -= len(piece)
        if data is None:
            _exactly(self._read, -size % 8)
        return spool.finish().reshape(shape[::-1]).T

    def skip_matrix(self) -> None:
        """Skip a field."""
        left = self._matrix()
        left += -left % 8
        while left:
            left -= len(_exactly(self._read, min(left, CHUNK)))

    def _matrix(self) -> int:
        kind, size, _ = self.tag()
        if kind != MATRIX:
            raise _Wrong(f"a field of type {kind}")
        return size

    def _head(self) -> tuple[int, tuple[int, ...], str]:
        flags, _ = self._integers(self.small(UINT32), 2)
        dimensions = self.small(INT32)
        shape = self._integers(dimensions, len(dimensions) // 4)
        if min(shape, default=-1) < 0:
            raise _Wrong(f"a shape of {shape}")
        return flags & 0xFF, shape, self.small(INT8).decode("ascii")

    def _integers(self, data: bytes, count: int) -> tuple[int, ...]:
        if len(data) != 4 * count:
            raise _Wrong(f"{len(data)} bytes for {count} integers")
        return struct.unpack(f"{self._order}{count}i", data)


class _Inflated:
    """Reader of the unpacked bytes of a zlib stream of `size` packed bytes."""

    def __init__(self, file: BufferedReader, size: int):
        self._file, self._left = file, size
        self._inflate = zlib.decompressobj()

    def read(self, count: int) -> bytes:
        """Return up to `count` bytes; b"" only at the end.

        Raises:
            EOFError: the stream ends before its checksum.
        """
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail
            if not packed:
                packed = self._file.read(min(CHUNK, self._left))
                self._left -= len(packed)
            piece = self._inflate.decompress(packed, count)
            if piece:
                return piece
            if not packed:
                raise EOFError("truncated zlib stream")
        return b""


def _exactly(read: Read, count: int) -> bytes:
    """Return `count` bytes, collected piece by piece."""
    pieces, left = [], count
    while left:
        piece = read(min(left, CHUNK))
        if not piece:
            raise EOFError("truncated")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
