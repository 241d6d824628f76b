"""The only writer of federation files: streaming, atomic, and byte-identical for identical input."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import shutil
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from rich.filesize import decimal

from data_prep.dataset import Dataset
from data_prep.progress import step
from data_prep.temporary import remove_stale, temporary_of
from hpcfed.data.content import KIND, content_hash, rows_per_block
from hpcfed.data.federation import FORMAT, LONGEST_NAME, VERSION
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.atomic import to_disk
from hpcfed.io.node import working_folder
from hpcfed.io.text import UNPRINTABLE

# Every array starts on a cache line, so that any library can use its memory map directly.
ALIGNMENT_BYTES = 64
# Unicode's categories of control characters, halves of characters, and separators of lines and paragraphs: records have
# a line a client, in UTF-8.
BREAKS = ("Cc", "Cs", "Zl", "Zp")
# Room for the index, the names and HDF5's own structures, beside x, y and row.
SPARE_BYTES = 1 << 20
DIGITS = 12
"""Of the content hash, in the name of a file."""


def write(
    path: str | Path,
    dataset: Dataset,
    owner: np.ndarray,
    num_clients: int,
    *,
    partition: Mapping[str, Any],
    clients: Sequence[str] | None = None,
    held: np.ndarray | None = None,
    test_owner: np.ndarray | None = None,
    name: str = "",
    overwrite: bool = False,
    by_content: bool = False,
) -> str:
    """Write a federation file and return its content hash.

    Rows of a client become adjacent and keep the order they have in the source. Samples are copied in blocks, so that
    memory does not grow with a source that is memory-mapped.

    Args:
        path: the file; missing folders are created.
        dataset: the samples.
        owner: (n,) int64, the client of each sample, 0 … num_clients - 1; negative for a sample that is left out.
        num_clients: N.
        partition: provenance of `owner`, stored as JSON: scheme, parameters, seed.
        clients: the N names; None for ``client-0`` and so on.
        held: (n,) bool, samples of per-client test sets, which replace the dataset's test set.
        test_owner: (num_test,) int64, the client of each of the dataset's test samples, negative for one that is left
            out; None for a common test set.
        name: name of the federation; default: the dataset's.
        overwrite: replace an existing file.
        by_content: write `of_content` of the path instead; an equal file that is there stays as it is.

    Raises:
        InputError: the file exists, or its folder can't be written; or a name has a NUL or half a character.
        EnvironmentFailure: the disk is full or failed; nothing is left behind.
    """
    path = Path(path)
    attributes = _attributes(dataset, name or dataset.name, partition)
    in_train = owner if held is None else np.where(held, -1, owner)
    rows, offsets = _by_client(in_train, num_clients, dataset.rows)
    target = _Target(path, temporary_of(path))
    with (
        _whole_or_not_at_all(target, overwrite or by_content, _size(dataset)),
        _create(target.temporary) as file,
    ):
        train = _group(file, "train")
        _copy(train, "x", dataset.x, rows)
        _copy(train, "y", dataset.y, rows)
        train["offsets"] = offsets
        train["client"] = _names(num_clients, clients)
        if dataset.statistics is not None:
            train["mean"], train["std"] = dataset.statistics
        _copy_beside(train, dataset.filled, dataset.group, rows)
        _copy(train, "row", np.arange(len(dataset.x)) if dataset.rows is None else dataset.rows, rows)
        if held is not None:
            own = np.where(held, owner, -1)
            tested, ends = _by_client(own, num_clients, dataset.rows)
            _copy_beside(_write_test(file, dataset.x, dataset.y, tested, ends), dataset.filled, dataset.group, tested)
        elif dataset.test_x is not None and dataset.test_y is not None:
            everything = np.arange(len(dataset.test_x)), None
            order = everything if test_owner is None else _by_client(test_owner, num_clients)
            test = _write_test(file, dataset.test_x, dataset.test_y, *order)
            _copy_beside(test, dataset.test_filled, dataset.test_group, order[0])
        file.attrs.update(attributes)
        content = file.attrs["content"] = content_hash(file, partial(step, "hashing, in bytes"))
        if by_content:
            target.path = of_content(path, content)
    return content


def of_content(path: Path, content: str) -> Path:
    """Return a path with the first digits of a content hash in its name: ``own-3f09a2c41b77.h5``."""
    return path.with_stem(f"{path.stem}-{content.removeprefix(KIND)[:DIGITS]}")


def _create(path: Path) -> h5py.File:
    """Create a file whose structures have checksums (readable from HDF5 1.10 on) and no timestamps."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_sec2()  # whatever ``HDF5_DRIVER`` says
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_file_locking(False, True)
    access.set_alignment(1, ALIGNMENT_BYTES)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V110)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, creation, access))


def _group(file: h5py.File, name: str) -> h5py.Group:
    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    return h5py.Group(h5py.h5g.create(file.id, name.encode(), gcpl=creation))


def _by_client(
    owner: np.ndarray, num_clients: int, source_rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of all clients, concatenated, each client's in the source's order, and the offsets (N+1,)."""
    keys = [] if source_rows is None else list(source_rows.reshape(len(owner), -1).T[::-1])
    order = np.lexsort((*keys, owner))
    rows = order[np.count_nonzero(owner < 0) :]
    sizes = np.bincount(owner[rows], minlength=num_clients)
    return rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _write_test(
    file: h5py.File, x: np.ndarray, y: np.ndarray, rows: np.ndarray, offsets: np.ndarray | None
) -> h5py.Group:
    test = _group(file, "test")
    _copy(test, "x", x, rows)
    _copy(test, "y", y, rows)
    if offsets is not None:
        test["offsets"] = offsets
    return test


def _copy_beside(part: h5py.Group, filled: np.ndarray | None, group: np.ndarray | None, rows: np.ndarray) -> None:
    """Write which cells of x were filled, and the samples' groups, where there are any."""
    if filled is not None:
        _copy(part, "filled", filled, rows)
    if group is not None:
        _copy(part, "group", group, rows)


def _attributes(dataset: Dataset, name: str, partition: Mapping[str, Any]) -> dict[str, Any]:
    for text in _texts([name, dataset.source, list(dataset.features or ()), dataset.vocabulary]):
        if UNPRINTABLE.search(text):  # of a damaged table: no reader would take the file
            got, remedy = ascii(text)[:80], "mend it where the data come from"
            raise InputError("a name with a character that no text has", got=got, remedy=remedy)
    attributes: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": str(name), "task": str(dataset.task)}
    if dataset.num_classes is not None:
        attributes["num_classes"] = dataset.num_classes
    attributes["partition"] = json.dumps(dict(partition))
    attributes["source"] = json.dumps(dataset.source)
    if dataset.normalization is not None:
        attributes["normalization"] = json.dumps(asdict(dataset.normalization))
    elif dataset.statistics is not None:  # x has been scaled already
        attributes["normalization"] = json.dumps({"mean": [0.0], "std": [1.0], "by": "client: /train/mean, /train/std"})
    if dataset.features is not None:
        attributes["features"] = json.dumps(list(dataset.features))
    if dataset.vocabulary is not None:
        attributes["vocabulary"] = json.dumps(dataset.vocabulary)
    return attributes


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _copy(group: h5py.Group, name: str, source: np.ndarray, rows: np.ndarray) -> None:
    """Copy rows of `source` into a contiguous dataset, a block at a time."""
    target = group.create_dataset(name, (len(rows), *source.shape[1:]), source.dtype.newbyteorder("="))
    block = rows_per_block(source.shape[1:], source.dtype)
    for start in range(0, len(rows), block):
        step(f"writing {group.name[1:]}/{name}, in rows", start, len(rows))
        target[start : start + block] = source[rows[start : start + block]]


def _names(num_clients: int, clients: Sequence[str] | None) -> np.ndarray:
    if clients is None:
        digits = len(str(num_clients - 1))
        clients = [f"client-{k:0{digits}}" for k in range(num_clients)]
    for name in clients:
        if any(unicodedata.category(letter) in BREAKS for letter in name):
            raise InputError(f"client {name!r}", expected="a name in one line, in UTF-8", remedy="rename the client")
    names = [name.encode() for name in clients]
    if (longest := max(map(len, names), default=0)) > LONGEST_NAME:
        what, expected = "a client's name", f"at most {LONGEST_NAME:,} bytes"
        raise InputError(what, expected=expected, got=f"{longest:,}", remedy="rename the client")
    return np.array(names, dtype=h5py.string_dtype("utf-8", max(1, *map(len, names))))


def _size(dataset: Dataset) -> int:
    arrays = (dataset.x, dataset.y, dataset.test_x, dataset.test_y)
    return sum(array.nbytes for array in arrays if array is not None) + 8 * len(dataset.x) + SPARE_BYTES


def check_output(path: Path, overwrite: bool) -> None:
    """Check that a federation may be written to `path`, before samples are read for it, which may take an hour.

    Raises:
        InputError: it is a folder, or exists and is not to be overwritten, or its folder can't be written.
    """
    if path.is_dir():
        raise InputError("is a folder", where=str(path), remedy="name a file")
    if path.exists() and not overwrite:
        raise InputError(
            "exists already", where=str(path), remedy="pass --overwrite (overwrite=True), or choose another name"
        )
    folder = next(one for one in (working_folder() / path).parents if one.exists())  # the first that need not be made
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        got = f"{folder}, which " + ("may not be written" if folder.is_dir() else "is no folder")
        raise InputError("can't write here", where=str(path), got=got, remedy="choose another folder")


@dataclass
class _Target:
    """The file to write, and the temporary one beside it."""

    path: Path
    temporary: Path


@contextmanager
def _whole_or_not_at_all(target: _Target, overwrite: bool, size: int) -> Iterator[None]:
    """Rename the temporary file that the block writes to the target's path then; remove it on error."""
    path, temporary = target.path, target.temporary
    check_output(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path)
        temporary.touch()
    except OSError as error:
        what = f"can't write here ({error.strerror})"
        raise InputError(what, where=str(path), remedy="choose another folder") from error
    try:
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, f"not enough space: {decimal(size)} needed, {decimal(free)} free")
        yield
        named_by_content = target.path != path
        if not (named_by_content and target.path.is_file() and filecmp.cmp(temporary, target.path, shallow=False)):
            to_disk(temporary)
            temporary.replace(target.path)
            to_disk(path.parent)
    except (OSError, RuntimeError) as error:  # h5py reports a failing disk as either
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EnvironmentFailure(f"writing failed: {why}", where=str(path), remedy="nothing was written") from error
    finally:
        temporary.unlink(missing_ok=True)
