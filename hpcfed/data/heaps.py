"""Soundness check of HDF5's global heaps, which hold variable-length strings without checksums.

It runs before any string is read: the library trusts the sizes in a heap, and free space of size 0 makes it loop for
ever (HDF5 2.0 and before). Texts of fixed length would need no heap, but federations of other writers, those of earlier
versions and TFF's files have texts of variable length.

Reference: HDF5 file format specification, version 3.0, section III.E, "Disk Format: Level 1E - Global Heap".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import h5py

from hpcfed.data.storage import Storage, member

SIGNATURE = b"GCOL\x01"
HEADER, OBJECT = struct.Struct("<8xQ"), struct.Struct("<H6xQ")
ALIGNMENT = 8
SMALLEST = 4096
"""Bytes of a heap; the library refuses smaller ones."""
WINDOW = 16 << 20
"""Bytes read at once. A file with more outside of its arrays has other data there, with the signature by chance: what
follows it is no heap then, unless its size fits.
"""


def heaps_are_sound(file: h5py.File, storage: Storage) -> bool:
    """Tell whether the heaps of an open file can be walked to their ends, and do not lie in one another.

    The library's do not; the heaps of a file that has each of them within the one before would be walked for hours.
    """
    gaps = list(_between_arrays(file, storage.size))
    total = sum(stop - start for start, stop in gaps)
    by_chance, left = total > WINDOW, 2 * total
    for start, stop in gaps:
        for begin in range(start, stop, WINDOW):
            data = storage.bytes(begin, min(begin + WINDOW + HEADER.size, stop))
            place = data.find(SIGNATURE)
            while 0 <= place < WINDOW:
                size = HEADER.unpack_from(data, place)[0] if place + HEADER.size <= len(data) else 0
                if SMALLEST <= size <= stop - begin - place:
                    left -= size
                    if left < 0 or not _is_sound(storage, begin + place, begin + place + size):
                        return False
                elif size and not by_chance:
                    return False
                place = data.find(SIGNATURE, place + 1)
    return True


def _between_arrays(file: h5py.File, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each byte range outside of the arrays and their chunks."""
    taken = list[tuple[int, int]]()
    for part in ("train", "test"):
        for name in ("x", "y", "offsets", "client", "row", "filled", "group", "mean", "std"):
            dataset = member(file, f"{part}/{name}")
            start = dataset.id.get_offset() if isinstance(dataset, h5py.Dataset) else None
            if dataset is not None and start is not None:
                taken.append((start, start + dataset.id.get_storage_size()))
            elif isinstance(dataset, h5py.Dataset) and dataset.chunks is not None:
                taken += [(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in _chunks(dataset)]
    place = 0
    for start, stop in sorted(taken):
        if start > place:
            yield place, min(start, size)
        place = max(place, stop)
    if place < size:
        yield place, size


def _chunks(dataset: h5py.Dataset) -> list[Any]:
    """Return HDF5's facts on the chunks of a dataset."""
    if not hasattr(dataset.id, "chunk_iter"):  # HDF5 before 1.12.3
        return [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]
    found: list[Any] = []
    dataset.id.chunk_iter(found.append)
    return found


def _is_sound(storage: Storage, start: int, stop: int) -> bool:
    """Walk a heap as the library does: an object's size excludes its header, free space's includes it."""
    place, begin, data = start + HEADER.size, start, b""
    while place + OBJECT.size <= stop:
        if place + OBJECT.size > begin + len(data):
            begin, data = place, storage.bytes(place, min(place + SMALLEST, stop))
        number, size = OBJECT.unpack_from(data, place - begin)
        step = OBJECT.size + -(-size // ALIGNMENT) * ALIGNMENT if number else size
        if step < ALIGNMENT or place + step > stop:
            return False
        place += step
    return True
