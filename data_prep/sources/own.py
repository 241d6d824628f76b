"""Your own files, a client each, or one table of all clients.

    FOLDER/CLIENT.npz                           arrays x and y
    FOLDER/CLIENT.x.npy  FOLDER/CLIENT.y.npy    the same in two files
    FOLDER/CLIENT.csv    FOLDER/CLIENT.parquet  a header, a column a feature, and the target's
    FOLDER/CLIENT/CLASS/*.png                   images
    TABLE.csv            TABLE.parquet          all clients, with a column that names the client

In a folder, ``test.npz`` (``test.csv``, …) is a common test set, and a folder ``test`` holds each client's own test set
in a file (or folder) of the client's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.own import gather
from data_prep.sources import own_arrays, own_images, own_tables
from hpcfed.errors import InputError

TEST = "test"
ENDINGS = (".npz", ".x.npy", *own_tables.TABLES)


def load(
    raw: Path, *, task: str = "classification", target: str | None = None, client_column: str | None = None
) -> Dataset:
    """Return the clients under `raw`, a folder or a table, in the order of their names.

    Args:
        raw: see this module's page.
        task: ``classification``, ``regression`` or ``next-token``.
        target: column of y in tables; several for a regression, with commas between; default: ``y``, or else the last.
        client_column: column that names the client, in one table of all clients.

    Raises:
        InputError: nothing of this kind is there, or a file is damaged or does not fit the others.
    """
    raw = Path(raw)
    if raw.is_file():
        return _table(raw, task, target, client_column)
    if not raw.is_dir():
        raise InputError("no such file or folder", where=str(raw), remedy="name your data by --raw")
    if client_column is not None:
        raise InputError("--client-column has no effect with a folder", where=str(raw), remedy="leave it out")
    clients, common, own = _listed(raw)
    ending = _one_ending(raw, [*clients.values(), *common, *own.values()])
    if target is not None and ending not in own_tables.TABLES:
        raise InputError("--target has no effect with files that are no tables", where=str(raw), remedy="leave it out")
    read, classes, files = _reader(ending, [*clients.values(), *common, *own.values()], task, target)
    test: Any = read(common[0]) if common else None
    if own:
        test = {name: read(path) for name, path in own.items()}
    dataset = gather(
        raw.resolve().name,
        ((name, read(path)) for name, path in clients.items()),
        test=test,
        task=task,
        num_classes=None if classes is None else len(classes),
        source=_source(files, raw, classes),
    )
    return dataset


def _listed(raw: Path) -> tuple[dict[str, Path], list[Path], dict[str, Path]]:
    """Return client → file, the common test set's file if there is one, and client → file of its own test set."""
    clients = _named(raw)
    test = clients.pop(TEST, None)
    if test is None:
        return clients, [], {}
    own = _named(test) if test.is_dir() else {}
    if own.keys() & clients.keys() or (own and not own_images.class_folders(test)):
        return clients, [], own
    return clients, [test], {}


def _named(folder: Path) -> dict[str, Path]:
    """Return name → file, or folder of images, in the order of names."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        ending = next((end for end in ENDINGS if path.name.endswith(end)), None)
        if path.name.startswith(".") or (ending is None and not path.is_dir()):
            continue
        name = path.name.removesuffix(ending) if ending else path.name
        if name in found:
            raise InputError(f"two files of client {name!r}", where=str(folder), remedy="keep one")
        found[name] = path
    return found


def _one_ending(raw: Path, paths: list[Path]) -> str:
    endings = {next((end for end in ENDINGS if path.name.endswith(end)), "") for path in paths}
    if len(endings) == 1:
        return endings.pop()
    if endings:
        got = ", ".join(sorted(ending or "folders" for ending in endings))
        raise InputError("files of several kinds", where=str(raw), got=got, remedy="keep one kind")
    expected = "CLIENT.npz, CLIENT.x.npy and CLIENT.y.npy, CLIENT.csv, CLIENT.parquet, or CLIENT/CLASS/*.png"
    raise InputError("no client's file is here", where=str(raw), expected=expected)


def _reader(
    ending: str, paths: list[Path], task: str, target: str | None
) -> tuple[Callable[[Path], Any], list[str] | None, list[Path]]:
    """Return what reads a client's samples, the classes' names if they have any, and all files."""
    if ending == ".npz":
        return own_arrays.read_npz, None, paths
    if ending == ".x.npy":
        pairs = {path: path.with_name(path.name.removesuffix(ending) + ".y.npy") for path in paths}
        return (lambda path: own_arrays.read_npy_pair(path, pairs[path])), None, [*pairs, *pairs.values()]
    if ending in own_tables.TABLES:
        columns = own_tables.columns_of(paths, target, None)
        classes = own_tables.class_names(paths, columns) if task == "classification" else None
        return (lambda path: _rows(path, columns, classes)), classes, paths
    names = sorted({name for path in paths for name in own_images.class_folders(path)})
    files = sorted(file for path in paths for file in path.rglob("*") if file.suffix.lower() in own_images.IMAGES)
    return (lambda path: own_images.samples(path, names)), names, files


def _rows(path: Path, columns: own_tables.Columns, classes: list[str] | None) -> Iterator[tuple[Any, Any]]:
    for block in own_tables.blocks(path):
        x, y = own_tables.samples(path, block, columns, classes)
        yield from zip(x, y, strict=True)


def _table(path: Path, task: str, target: str | None, client_column: str | None) -> Dataset:
    if path.suffix not in own_tables.TABLES:
        raise InputError("no table", where=str(path), expected=" or ".join(own_tables.TABLES), got=path.suffix)
    if client_column is None:
        raise InputError("one table of all clients", where=str(path), remedy="name its client by --client-column")
    columns = own_tables.columns_of([path], target, client_column)
    classes = own_tables.class_names([path], columns) if task == "classification" else None

    def pieces() -> Iterator[tuple[str, Any]]:
        for block in own_tables.blocks(path):
            x, y = own_tables.samples(path, block, columns, classes)
            names = block[client_column].astype(str)
            for name in np.unique(names):
                yield str(name), (x[names == name], y[names == name])

    count = None if classes is None else len(classes)
    source = _source([path], path.parent, classes)
    return gather(path.stem, pieces(), in_pieces=True, task=task, num_classes=count, source=source)


def _source(files: list[Path], root: Path, classes: list[str] | None) -> dict[str, Any]:
    """Return provenance: one digest over all files, and what the labels stand for."""
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as opened:
            digest.update(f"{file.relative_to(root)}\n".encode())
            while piece := opened.read(1 << 20):
                digest.update(piece)
    source: dict[str, Any] = {"files": [{"name": f"{len(files)} own files", "sha256": digest.hexdigest()}]}
    return source if classes is None else {**source, "classes": classes}
