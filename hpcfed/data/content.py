"""Content hash of a federation's data, by which a resumed run recognises them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import h5py
import numpy as np

from hpcfed.data.storage import member

HASHED = ("train/x", "train/y", "train/offsets", "test/x", "test/y", "test/offsets")
ATTRIBUTES = ("task", "num_classes", "normalization")
KIND = "sha256:"
"""Prefix of the hashes computed here; a file of another program may name others."""
BLOCK_BYTES = 16 << 20


def content_hash(file: h5py.File, show: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Return ``sha256:…`` over all that training sees: x, y and offsets, the task, the classes, the normalization.

    Names and provenance are excluded, so the same data described in other words keep their hash.
    `show` takes the number of bytes hashed so far, and that of all.
    """
    digest = hashlib.sha256()
    for name in ATTRIBUTES:
        digest.update(f"{name} {file.attrs.get(name)}\n".encode())
    datasets = {name: dataset for name in HASHED if (dataset := member(file, name)) is not None}
    done, total = 0, sum(dataset.nbytes for dataset in datasets.values())
    for name, dataset in datasets.items():
        digest.update(f"{name} {dataset.dtype.str} {dataset.shape}\n".encode())
        rows = rows_per_block(dataset.shape[1:], dataset.dtype)
        for start in range(0, len(dataset), rows):
            block = np.ascontiguousarray(dataset[start : start + rows])
            digest.update(block.data)
            show(done := done + block.nbytes, total)
    return f"{KIND}{digest.hexdigest()}"


def rows_per_block(row_shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return how many rows of this shape and type are read or copied at once: about 16 MiB, at least one row."""
    return max(1, BLOCK_BYTES // max(1, dtype.itemsize * math.prod(row_shape)))
