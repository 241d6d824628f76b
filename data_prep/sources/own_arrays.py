"""Arrays x and y of one client: an .npz, or a pair of .npy files; no pickle is ever read.

A header's claim is compared with the bytes present before anything is allocated.
"""

from __future__ import annotations

import lzma
import math
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from data_prep.sources.files import unreadable
from data_prep.tables.cells import composed
from hpcfed.errors import InputError

MOST_PACKED = 1100
"""Deflate packs at most 1032 to 1."""
OBJECTS = "Object arrays cannot be loaded"
"""numpy's words, of a file that could run code."""
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays ``x`` and ``y`` of an .npz.

    Raises:
        InputError: one is missing, holds objects, or the file is damaged.
    """
    with _damage_in(path), zipfile.ZipFile(path) as archive:
        members = _members(archive)
        missing = {"x", "y"} - members.keys()
        if missing:
            got = ", ".join(members) or "none"
            raise InputError("arrays are missing", where=str(path), expected="'x' and 'y'", got=got)
        return _member(archive, members["x"]), _member(archive, members["y"])


def groups(path: Path, name: str) -> np.ndarray:
    """Return the array `name` of an .npz, or of ``CLIENT.NAME.npy`` beside a ``CLIENT.x.npy``: each sample's group.

    Raises:
        InputError: it is missing, holds objects, or the file is damaged.
    """
    if path.suffix == ".npy":
        beside = path.with_name(f"{path.name.removesuffix('.x.npy')}.{name}.npy")
        if not beside.is_file():
            raise InputError(f"--group {name}", where=str(path), expected=f"{beside.name} beside it", got="none")
        return np.array(read_npy(beside))
    with _damage_in(path), zipfile.ZipFile(path) as archive:
        members = _members(archive)
        if name not in members:
            got = ", ".join(members) or "none"
            raise InputError(f"--group {name}", where=str(path), expected="an array of this name", got=got)
        return _member(archive, members[name])


def read_npy(path: Path) -> np.ndarray:
    """Return the array of an .npy file, mapped.

    Raises:
        InputError: it holds objects or is damaged.
    """
    with _damage_in(path):
        with path.open("rb") as file:
            _header(file)
        return _of_text(np.load(path, mmap_mode="r", allow_pickle=False))


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return name of an array → its entry; programs differ in which of two with one name they read."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = composed(Path(info.filename).stem)
        if name in found:
            raise ValueError(f"two arrays {name!r}")
        found[name] = info
    return found


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    if info.file_size > MOST_PACKED * max(info.compress_size, 1):
        raise ValueError(f"{info.filename} claims {info.file_size:,} bytes")
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise ValueError(OBJECTS)
        if size != info.file_size - file.tell():
            raise ValueError(f"{info.filename} is no plain array of its size")
        data = file.read(size)
    return _of_text(np.ndarray(shape, dtype, data, order="F" if fortran else "C"))


def _of_text(array: np.ndarray) -> np.ndarray:
    """Return the array; refuse texts with numbers of characters that do not exist, at which Python fails."""
    if array.dtype.kind == "U" and array.size and array.dtype.itemsize:
        points = np.ascontiguousarray(array).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if points.max() > sys.maxunicode:
            raise ValueError("texts of characters that do not exist")
    return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the npy format")
    try:
        shape, fortran, dtype = HEADERS[version](file)
    except OSError:
        raise
    except Exception as error:  # numpy reads it as Python: of damaged ones it may raise anything
        raise ValueError(f"a damaged header ({str(error) or type(error).__name__})") from error
    if not all(type(length) is int and 0 <= length < 1 << 62 for length in shape):
        raise ValueError(f"shape {shape}")
    return shape, fortran, dtype


@contextmanager
def _damage_in(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except (
        ValueError,
        OverflowError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        if "bject arrays" in str(error):
            name, remedy = "an array of Python objects", "save words by y.astype(str), numbers by y.astype(float)"
            raise InputError(name, where=str(path), expected="plain types", remedy=remedy) from error
        raise InputError("damaged, or no plain arrays", where=str(path), got=str(error)[:80]) from error
