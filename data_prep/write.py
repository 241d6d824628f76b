"""The only writer of federation files: streaming, whole or not at all, the same bytes from the same input."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.dataset import Dataset
from hpcfed.data.content import content_hash, rows_per_block
from hpcfed.data.format import FORMAT, VERSION
from hpcfed.errors import EnvironmentFailure, InputError

# Every array starts on a cache line, so that its memory map can go to any library as it is.
ALIGNMENT_BYTES = 64
# Room for the index, the names and HDF5's own structures, beside x, y and row.
SPARE_BYTES = 1 << 20


def write(
    path: str | Path,
    dataset: Dataset,
    owner: np.ndarray,
    num_clients: int,
    *,
    partition: Mapping[str, Any],
    name: str = "",
    overwrite: bool = False,
) -> str:
    """Write a federation file and return its content hash.

    Rows of a client become adjacent and keep the order they have in the source. Samples are copied in blocks, so that
    memory does not grow with a source that is memory-mapped.

    Args:
        path: the file; folders on the way are made.
        dataset: the samples.
        owner: (n,) int64, the client of each sample, 0 … num_clients - 1.
        num_clients: N.
        partition: how `owner` came about, stored as JSON: scheme, parameters, seed.
        name: name of the federation; that of the dataset where empty.
        overwrite: replace a file that is there.

    Raises:
        InputError: the file exists, or its folder can't be written.
        EnvironmentFailure: the disk is full or failed; nothing is left behind.
    """
    path = Path(path)
    rows = np.argsort(owner, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_clients))]).astype(np.int64)
    with _whole_or_not_at_all(path, overwrite, _size(dataset)) as temporary:
        options = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT_BYTES}
        with h5py.File(temporary, "w", locking=False, **options) as file:
            train = file.create_group("train")
            _copy(train, "x", dataset.x, rows)
            _copy(train, "y", dataset.y, rows)
            train["offsets"] = offsets
            train["client"] = _names(num_clients)
            _copy(train, "row", np.arange(len(rows)) if dataset.rows is None else dataset.rows, rows)
            if dataset.test_x is not None and dataset.test_y is not None:
                everything = np.arange(len(dataset.test_x))
                _copy(file.create_group("test"), "x", dataset.test_x, everything)
                _copy(file["test"], "y", dataset.test_y, everything)
            file.attrs.update(_attributes(dataset, name or dataset.name, partition))
            content = file.attrs["content"] = content_hash(file)
    return content


def _attributes(dataset: Dataset, name: str, partition: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": name, "task": dataset.task}
    if dataset.num_classes is not None:
        attributes["num_classes"] = dataset.num_classes
    attributes["partition"] = json.dumps(dict(partition))
    attributes["source"] = json.dumps(dataset.source)
    if dataset.normalization is not None:
        attributes["normalization"] = json.dumps(asdict(dataset.normalization))
    return attributes


def _copy(group: h5py.Group, name: str, source: np.ndarray, rows: np.ndarray) -> None:
    """Copy the given rows of `source` into a contiguous dataset, a block at a time."""
    target = group.create_dataset(name, (len(rows), *source.shape[1:]), source.dtype.newbyteorder("="))
    block = rows_per_block(source.shape[1:], source.dtype)
    for start in range(0, len(rows), block):
        target[start : start + block] = source[rows[start : start + block]]


def _names(num_clients: int) -> np.ndarray:
    digits = len(str(num_clients - 1))
    width = len("client-") + digits
    names = [f"client-{k:0{digits}}".encode() for k in range(num_clients)]
    return np.array(names, dtype=h5py.string_dtype("utf-8", width))


def _size(dataset: Dataset) -> int:
    arrays = (dataset.x, dataset.y, dataset.test_x, dataset.test_y)
    return sum(array.nbytes for array in arrays if array is not None) + 8 * len(dataset.x) + SPARE_BYTES


@contextmanager
def _whole_or_not_at_all(path: Path, overwrite: bool, size: int) -> Iterator[Path]:
    """Yield a temporary name beside `path`; afterwards it is `path`, or, after an error, gone."""
    if path.is_dir():
        raise InputError("is a folder", where=str(path), remedy="name a file")
    if path.exists() and not overwrite:
        raise InputError("exists already", where=str(path), remedy="pass --overwrite, or choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    except OSError as error:
        what = f"can't write here ({error.strerror})"
        raise InputError(what, where=str(path), remedy="choose another folder") from error
    try:
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, f"not enough space: {size / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    except (OSError, RuntimeError) as error:  # h5py reports a failing disk as either
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EnvironmentFailure(f"writing failed: {why}", where=str(path), remedy="nothing was written") from error
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until the disk has what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
