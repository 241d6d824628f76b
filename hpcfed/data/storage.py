"""Access to the rows of a federation file, mapped or read, with detection of files that fail during a run.

    mmap      the file is mapped once: rows are views of the page cache, which all ranks of a host share; small requests
              are read instead, since the first touch of a page maps its whole neighbourhood
    memory    rows are read into the rank's own memory

Both use the descriptor that HDF5 opened, so a file is opened once. The file's size is checked before mapped rows are
touched: reading a mapping beyond the end of a file that another program shortened would kill the process.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from contextlib import suppress

import h5py
import numpy as np

from hpcfed.errors import EnvironmentFailure

ACCESS = ("mmap", "memory")
LARGEST_NUMBER = 8
NEIGHBOURHOOD = 1 << 16
"""Bytes that Linux maps around a page at its first touch."""
MOST_HOPS = 16
"""Soft links on the way to one dataset; more are treated as a cycle."""
_AGAIN = "the file must stay as it is while runs use it; copy or prepare it again"


def open_hdf5(path: str | os.PathLike[str]) -> h5py.File:
    """Open a file to read it, without locks: they often fail on parallel file systems, and reading needs none.

    The driver is the one whose descriptor `Storage` reads, whatever ``HDF5_DRIVER`` says.

    Raises:
        OSError, ValueError: as h5py reports it.
    """
    return h5py.File(path, "r", driver="sec2", locking=False)


class Storage:
    """The bytes of one open HDF5 file."""

    def __init__(self, file: h5py.File, path: str | os.PathLike[str], access: str):
        self.path = os.fspath(path)
        self._raw = os.fdopen(os.dup(file.id.get_vfd_handle()), "rb", buffering=0)
        self.size = os.fstat(self._raw.fileno()).st_size
        self._mapping = mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ) if access == "mmap" else None

    @property
    def is_mapped(self) -> bool:
        """Whether rows may be views of a mapping."""
        return self._mapping is not None

    def array(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array of native numbers at byte `start`: a read-only view if mapped, else a copy.

        Raises:
            EnvironmentFailure: the file was shortened, or the disk failed.
        """
        count = math.prod(shape)
        stop = start + count * dtype.itemsize
        if self._mapping is None or stop - start < NEIGHBOURHOOD:
            target = np.empty(shape, dtype)
            self.fill(start, target.reshape(-1).view(np.uint8).data)
            return target
        size = os.fstat(self._raw.fileno()).st_size
        if size < stop:
            raise self._shorter(stop, size)
        return np.frombuffer(self._mapping, dtype, count, start).reshape(shape)

    def bytes(self, start: int, stop: int) -> bytes:
        """Return the bytes ``start:stop`` of the file.

        Raises:
            EnvironmentFailure: as `array`.
        """
        target = bytearray(stop - start)
        self.fill(start, memoryview(target))
        return bytes(target)

    def fill(self, start: int, target: memoryview) -> None:
        """Fill `target`, a view of bytes, with the file's bytes from `start`.

        Raises:
            EnvironmentFailure: as `array`.
        """
        while True:
            try:
                read = os.preadv(self._raw.fileno(), [target], start)
            except OSError as error:
                what = f"can't be read ({error.strerror})"
                raise EnvironmentFailure(what, where=self.path, remedy="check the disk or file system") from error
            if read == len(target):
                return
            if read == 0:
                raise self._shorter(start + len(target), start)
            start, target = start + read, target[read:]

    def expect(self, start: int, stop: int) -> None:
        """Start reading the bytes ``start:stop`` from disk in the background, on systems with ``posix_fadvise``.

        Raises:
            OSError: the file system does not support it.
        """
        if hasattr(os, "posix_fadvise") and start < stop:  # fadvise reads length 0 as "to end of file"
            os.posix_fadvise(self._raw.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the descriptor; arrays returned before stay valid."""
        self._raw.close()

    def _shorter(self, expected: int, got: int) -> EnvironmentFailure:
        expected_bytes, got_bytes = f"at least {expected:,} bytes", f"{got:,}"
        return EnvironmentFailure(
            "the data file became shorter", where=self.path, expected=expected_bytes, got=got_bytes, remedy=_AGAIN
        )


class StoredRows:
    """The rows of one dataset: read by `Storage` if contiguous and of native type, else (chunked, foreign) by h5py.

    Attributes:
        shape: (n, ...).
        dtype: of the returned arrays, in native byte order.
    """

    def __init__(self, dataset: h5py.Dataset, storage: Storage):
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype = dataset.dtype.newbyteorder("=")
        self._dataset = dataset
        self._storage = storage
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        # HDF5 converts several types to one numpy type; only the equal one has the same bits.
        is_native = dataset.id.get_type().equal(h5py.h5t.py_create(self.dtype))
        self._start = dataset.id.get_offset() if is_native else None
        if self._start is not None and self._start % self.dtype.itemsize:
            self._start = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return adjacent rows (stop - start, ...), read-only if mapped.

        Raises:
            EnvironmentFailure: the file was shortened, is damaged further in, or the disk failed.
        """
        start, stop, _ = rows.indices(len(self))
        shape = (max(stop - start, 0), *self.shape[1:])
        if self._start is None:
            try:
                return np.asarray(self._dataset[start:stop], dtype=self.dtype)
            except (OSError, RuntimeError) as error:  # h5py reports a failed read as either
                where = f"{self._storage.path}: {self._dataset.name}"
                raise EnvironmentFailure("can't be read", where=where, got=str(error), remedy=_AGAIN) from error
        return self._storage.array(self._start + start * self._row_bytes, shape, self.dtype)

    def joined(self, parts: np.ndarray, *, touched: bool = False) -> np.ndarray:
        """Return copies of the rows ``start:stop`` of each part, concatenated, (rows, ...).

        Args:
            parts: start and stop of each, (parts, 2) int64.
            touched: whether all rows were read before; gathering from a mapping is then faster than reading.

        Raises:
            EnvironmentFailure: as `__getitem__`.
        """
        parts = _merged(parts)
        if self._start is None:
            return np.concatenate([self[start:stop] for start, stop in parts.tolist()])
        starts, counts = parts[:, 0], parts[:, 1] - parts[:, 0]
        if touched and self._storage.is_mapped:
            return self[:][np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)]
        rows = np.empty((counts.sum(), *self.shape[1:]), self.dtype)
        target, done = rows.reshape(-1).view(np.uint8).data, 0
        places, sizes = self._start + starts * self._row_bytes, counts * self._row_bytes
        for place, size in zip(places.tolist(), sizes.tolist(), strict=True):
            self._storage.fill(place, target[done : done + size])
            done += size
        return rows

    def expect(self, parts: np.ndarray) -> None:
        """Start reading such parts from disk in the background; no-op for a dataset that h5py must unpack."""
        if self._start is None:
            return
        with suppress(OSError):
            for start, stop in (self._start + parts * self._row_bytes).tolist():
                self._storage.expect(start, stop)


def _merged(parts: np.ndarray) -> np.ndarray:
    """Return the parts (parts, 2), neighbours that follow one another in the file as one."""
    if not len(parts):
        return parts
    begins = np.flatnonzero(np.append(True, parts[1:, 0] != parts[:-1, 1]))
    return np.column_stack((parts[begins, 0], parts[np.append(begins[1:], len(parts)) - 1, 1]))


def is_numbers(dtype: np.dtype) -> bool:
    """Tell whether a dataset's type is one that numpy and torch both compute with."""
    return dtype.kind in "iuf" and dtype.itemsize <= LARGEST_NUMBER


class Elsewhere(ValueError):
    """A link that leads out of its file, or storage outside of it; the message says where to."""


def member(file: h5py.File, name: str) -> h5py.Dataset | h5py.Group | None:
    """Return the object of a name, None if absent, without opening or searching for another file.

    The only lookup by name: offsets are read in this file, and an untrusted file must not name others to read.

    Raises:
        Elsewhere: a link leads out of the file, or the dataset's values are stored outside of it.
    """
    place, steps, hops = file["/"], deque(name.split("/")), 0
    while steps:
        step = steps.popleft().encode("utf-8", "surrogateescape")
        if step in (b"", b"."):
            continue
        if not isinstance(place, h5py.Group) or not place.id.links.exists(step):
            return None
        kind = place.id.links.get_info(step).type
        if kind == h5py.h5l.TYPE_HARD:
            place = place[step]
            continue
        hops += 1
        if kind != h5py.h5l.TYPE_SOFT or hops > MOST_HOPS:
            raise Elsewhere("is a link to another file" if hops <= MOST_HOPS else "is a circle of links")
        target = place.id.links.get_val(step).decode("utf-8", "surrogateescape")
        place = file["/"] if target.startswith("/") else place
        steps.extendleft(reversed(target.split("/")))
    if isinstance(place, h5py.Dataset) and _lies_elsewhere(place):
        raise Elsewhere("lies in another file")
    return place


def _lies_elsewhere(dataset: h5py.Dataset) -> bool:
    """Tell whether a dataset's values are stored in other files.

    No error's frames may hold a virtual dataset's property list: HDF5 crashes where one is left at its end.
    """
    properties = dataset.id.get_create_plist()
    return bool(properties.get_external_count()) or properties.get_layout() == h5py.h5d.VIRTUAL


def flaw(dataset: h5py.Dataset, file_size: int) -> str | None:
    """Return why a file of `file_size` bytes cannot hold what a dataset's header claims, or None if it can.

    Nothing of the claimed size is read or allocated, so a damaged header cannot exhaust memory.
    """
    claimed = math.prod(dataset.shape) * dataset.dtype.itemsize
    if dataset.id.get_create_plist().get_layout() == h5py.h5d.CHUNKED:
        held = dataset.id.get_num_chunks() * math.prod(dataset.chunks) * dataset.dtype.itemsize
        return "is not written to its end" if held < claimed else None
    start = dataset.id.get_offset()
    if start is not None and start + claimed > file_size:
        return "ends beyond the file: truncated"
    return "is not written to its end" if dataset.id.get_storage_size() < claimed else None
