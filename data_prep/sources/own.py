"""The user's own files: one per client, one table of all clients, or one pool of samples.

    FOLDER/CLIENT.npz                           arrays x and y
    FOLDER/CLIENT.x.npy  FOLDER/CLIENT.y.npy    the same in two files
    FOLDER/CLIENT.csv    FOLDER/CLIENT.parquet  a header, one column per feature, and the target's; text also packed,
                                                CLIENT.csv.gz, .bz2 or .xz
    FOLDER/CLIENT/CLASS/*.png                   images
    TABLE.csv            TABLE.parquet          all clients, with a column that names the client; or one pool of samples
    FOLDER/CLASS/*.png                          one pool of images

In a folder, ``test.npz`` (``test.csv``, …; ``Test.csv`` is refused) is a common test set, and a folder ``test`` holds
each client's own test set in a file (or folder) of the client's name. Parquet may come in pieces,
``CLIENT-00000-of-00002.parquet`` and so on. A pool is dealt to clients by a partition. A line names the files that are
left out, but for what systems leave among the user's own (`files.is_clutter`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.dataset import Dataset
from data_prep.own import channels_last, check_task, gather
from data_prep.sources import own_arrays, own_images
from data_prep.sources.files import DataSource, Origin, is_clutter, reading, refuse_special
from data_prep.tables import cells, labels
from data_prep.tables import load as own_tables
from data_prep.tables.columns import ColumnOptions
from data_prep.tables.missing import check_way
from data_prep.tables.read import OF_TEXT, PACKED, TABLES
from hpcfed.data.federation import FORMAT
from hpcfed.errors import InputError, counted, first_of

TEST = "test"
ENDINGS = (".npz", ".x.npy", *TABLES)
PIECE = re.compile(r"-(\d{5})-of-(\d{5})$")
MAX_LISTED = 8
READ_FROM = f"sites are read from .npz, .npy, .parquet, and {' and '.join(OF_TEXT)} (also {', '.join(PACKED)})"
Files = dict[str, list[Path]]


def load(
    raw: Path,
    *,
    task: str = "classification",
    target: str | None = None,
    client_column: str | None = None,
    group: str | None = None,
    categorical: str | None = None,
    exclude: str | None = None,
    missing: str = "refuse",
    missing_codes: str | None = None,
    positive: str | None = None,
    partition: str | None = None,
) -> Dataset:
    """Return the clients under `raw`, a folder or a table, in the order of their names.

    Args:
        raw: see this module's page.
        task: one of `hpcfed.data.federation.TASKS`.
        target: columns of y in tables, comma-separated; default: the one with an obvious name.
        client_column: column that names the client, in one table of all clients.
        group: column, or array, that names the group of a sample, such as its patient; of images a regular expression,
            whose first group, or match, in a file's name is it. Test sets split no group.
        categorical: columns of tables that become one-hot although they hold numbers, comma-separated.
        exclude: columns of tables that are left out, comma-separated.
        missing: treatment of missing values: ``refuse``, ``drop``, ``mean`` or ``median``.
        missing_codes: texts and numbers of missing cells in tables beside the usual ones, comma-separated.
        positive: label of the positive one of two classes, class 1; default: the last in the order of names.
        partition: the scheme by which samples are dealt to clients, if any; without one, clients must have names.

    Raises:
        InputError: there are no such files, or one is damaged or does not fit the others.
        EnvironmentFailure: the machine fails to read one.
    """
    raw = Path(raw)
    check_task(task)
    check_way(missing)
    labels.check_positive(positive, task)
    target, client_column, group, positive = (
        None if name is None else cells.composed(name) for name in (target, client_column, group, positive)
    )
    options = ColumnOptions(
        task,
        target,
        client_column,
        group,
        _listed(categorical),
        _listed(exclude),
        missing,
        positive,
        _listed(missing_codes),
    )
    dataset = _load(raw, options, partition)
    if flaw := _constant(dataset):
        raise InputError(flaw, where=str(raw), remedy="name another --target")
    return dataset


def _constant(dataset: Dataset) -> str:
    """Return what leaves nothing to learn in the training targets, "" for nothing."""
    if dataset.task == "classification" and dataset.num_classes == 1:
        return "all samples are of one class"
    if dataset.task == "multi-label" and dataset.y.shape[1:] == (1,) and dataset.y.min() == dataset.y.max():
        return "all samples are of one class"
    if dataset.task == "survival" and not dataset.y[:, 0].any():
        return "no sample has an event"
    return ""


def _load(raw: Path, options: ColumnOptions, partition: str | None) -> Dataset:
    with reading(raw):
        if raw.is_file():
            return _table(raw, options, partition)
        if not raw.is_dir():
            raise InputError("no such file or folder", where=str(raw), remedy="name your data by --raw")
        if options.client is not None:
            raise InputError("--client has no effect with a folder", where=str(raw), remedy="leave it out")
        clients, common, own = _found(raw, partition)
        pool = list(clients.values()) == [[raw]]
        everything = [path for files in (*clients.values(), common, *own.values()) for path in files]
        ending = _one_ending(raw, everything)
        name = raw.resolve().name
        others = _others(raw, everything)
        if ending in TABLES:
            dataset = own_tables.load(name, clients, common, own, options, _source(everything, raw))
            return replace(dataset, remarks=(*dataset.remarks, *_left_out(raw, others)))
        of_tables = {
            "--target": options.target,
            "--categorical": options.categorical,
            "--exclude": options.excluded,
            "--missing-codes": options.missing_codes,
        }
        useless = [option for option, value in of_tables.items() if value]
        if useless:
            what = f"{', '.join(useless)} has no effect with files that are no tables"
            raise InputError(what, where=str(raw), remedy="leave it out")
        read, classes, source, remarks = _reader(ending, everything, raw, options, others)
        test: Any = read(common[0]) if common else None
        if own:
            test = {client: read(files[0]) for client, files in own.items()}
        groups, test_groups = _groups(ending, options.group, clients, common, own)
        if options.group is not None:
            source = {**source, "group" if ending else "group_pattern": options.group}
        dataset = gather(
            name,
            ((client, read(files[0])) for client, files in clients.items()),
            test=test,
            task=options.task,
            num_classes=None if classes is None else classes.count,
            source=source,
            missing=options.missing,
            remarks=remarks,
            groups=groups,
            test_groups=test_groups,
            positive=options.positive,
        )
        if hint := channels_last(dataset.x.shape):
            dataset = replace(dataset, remarks=(*dataset.remarks, hint))
        return _pooled(dataset) if pool else dataset


def _groups(
    ending: str, group: str | None, clients: Files, common: Sequence[Path], own: Files
) -> tuple[dict[str, Any] | None, Any]:
    """Return client → the groups of its samples, and those of the test set, in the form of `gather`; None without."""
    if group is None:
        return None, None
    of_arrays = own_arrays.groups if ending else own_images.groups
    tests = {client: of_arrays(files[0], group) for client, files in own.items()}
    return (
        {client: of_arrays(files[0], group) for client, files in clients.items()},
        tests if own else of_arrays(common[0], group) if common else None,
    )


def _pooled(dataset: Dataset) -> Dataset:
    """Return a pool: the data set without its only client, a placeholder."""
    return replace(dataset, owner=None, clients=None)


def _listed(names: str | None) -> tuple[str, ...]:
    return () if names is None else tuple(cells.composed(name.strip()) for name in names.split(",") if name.strip())


def _found(raw: Path, partition: str | None) -> tuple[Files, list[Path], Files]:
    """Return client → files, the files of a common test set, and client → files of its own test set."""
    clients = _named(raw)
    if clients and all(path.is_dir() for files in clients.values() for path in files) and _is_pool(clients):
        if partition is None:
            got = next(str(path.relative_to(raw)) for path in own_images.files(raw))
            remedy = "put each client's classes into a folder of its own, or deal the images to clients by --partition"
            raise InputError("images by class, but no clients", where=str(raw), expected="CLIENT/CLASS/*.png", got=got,
                             remedy=remedy)  # fmt: skip
        return {raw.resolve().name: [raw]}, [], {}
    for name in clients:
        if name != TEST and name.strip().lower() == TEST:
            remedy = f"name the test set {TEST!r}, or the client otherwise"
            raise InputError(f"{name!r}: a client, or the test set?", where=str(raw), remedy=remedy)
    test = clients.pop(TEST, [])
    if len(test) != 1 or not test[0].is_dir():
        return clients, test, {}
    own = _named(test[0])
    if own.keys() & clients.keys() or (own and not own_images.class_folders(test[0])):
        return clients, [], own
    return clients, test, {}


def _is_pool(folders: Mapping[str, list[Path]]) -> bool:
    """Tell whether folders are classes of images rather than clients: they hold images, and no folders."""
    inside = [entry for files in folders.values() for entry in files[0].iterdir() if not is_clutter(entry.name)]
    return any(entry.suffix.lower() in own_images.IMAGES for entry in inside) and not any(e.is_dir() for e in inside)


def _named(folder: Path) -> Files:
    """Return name → files, or folder of images, in the order of names."""
    found: Files = {}
    with reading(folder):
        entries = sorted(folder.iterdir(), key=lambda path: cells.composed(path.name))
    for path in entries:
        ending = _ending(path)
        if is_clutter(path.name) or (not ending and not path.is_dir()):
            continue
        stem = cells.composed(path.name[: len(path.name) - len(ending)] if ending else path.name)
        name = PIECE.sub("", stem)
        if name in found and name == stem:
            raise InputError(f"two files of client {name!r}", where=str(folder), remedy="keep one")
        found.setdefault(name, []).append(path)
    for name, paths in found.items():
        refuse_special(paths)
        _refuse_missing_piece(folder, name, paths)
    return found


def _refuse_missing_piece(folder: Path, name: str, paths: list[Path]) -> None:
    """Refuse a table in pieces of which some are not there.

    Raises:
        InputError: naming the first.
    """
    pieces = [match for path in paths if (match := PIECE.search(path.name[: len(path.name) - len(_ending(path))]))]
    if not pieces:
        return
    there, count = {int(match[1]) for match in pieces}, int(pieces[0][2])
    if absent := sorted({*range(count)} - there):
        what = f"{name}: {counted(len(absent), 'piece')} of {count} not there"
        first = f"{name}-{absent[0]:05}-of-{count:05}"
        raise InputError(what, where=str(folder), expected=first, remedy="copy it, too, or rename the others")


def _others(raw: Path, used: Sequence[Path]) -> list[Path]:
    """Return the files beside those that are read, and beside tests of clients, that are not, clutter aside."""
    folders = [raw, *{path.parent for path in used if path.parent != raw and raw in path.parents}]
    pairs = {path.name.removesuffix(".x.npy") for path in used if path.name.endswith(".x.npy")}
    found = []
    for folder in folders:
        with reading(folder):
            entries = sorted(folder.iterdir())
        for path in entries:
            of_pair = path.suffix == ".npy" and path.name.split(".")[0] in {name.split(".")[0] for name in pairs}
            is_known = path in used or path in folders or of_pair or is_clutter(path.name)
            if not (is_known or path.is_dir() or _is_federation(path)):
                found.append(path)
    return found


def _is_federation(path: Path) -> bool:
    """Whether a file is one that an earlier `prepare` has written."""
    if path.suffix != ".h5" or not path.is_file():
        return False
    with suppress(OSError, RuntimeError), h5py.File(path, "r") as file:
        return str(file.attrs.get("format", "")) == FORMAT
    return False


def _left_out(raw: Path, others: Sequence[Path]) -> Iterator[str]:
    """Yield a line on files that are not read, if there are any."""
    if others:
        names = first_of([str(path.relative_to(raw)) for path in others], MAX_LISTED)
        yield f"left out: {counted(len(others), 'file')}: {names}; {READ_FROM}"


def _ending(path: Path) -> str:
    return next((end for end in ENDINGS if path.name.lower().endswith(end)), "")


def _one_ending(raw: Path, paths: list[Path]) -> str:
    """Return the ending of all files, the first of `TABLES` for tables of several formats."""
    endings = {_ending(path) for path in paths}
    if len(endings) == 1:
        return endings.pop()
    if endings and endings <= set(TABLES):
        return TABLES[0]
    if endings:
        got = ", ".join(sorted(ending or "folders" for ending in endings))
        remedy = f"keep one kind; tables ({', '.join(TABLES)}) may be mixed"
        raise InputError("files of several kinds", where=str(raw), got=got, remedy=remedy)
    expected = "CLIENT.npz, CLIENT.x.npy and CLIENT.y.npy, CLIENT.csv, CLIENT.parquet, or CLIENT/CLASS/*.png"
    others = _others(raw, [])
    got = first_of([path.name for path in others], MAX_LISTED) or "none"
    raise InputError("no client's file is here", where=str(raw), expected=expected, got=got)


def _reader(
    ending: str, paths: list[Path], raw: Path, options: ColumnOptions, others: Sequence[Path]
) -> tuple[Callable[[Path], Any], labels.Classes | None, dict[str, Any], tuple[str, ...]]:
    """Return the reader of a client's samples, the classes if any, provenance, and remarks."""
    if ending in (".npz", ".x.npy"):
        return _array_reader(ending, paths, raw, tuple(_left_out(raw, others)))
    if options.task != "classification":
        what, remedy = f"--task {options.task} has no effect with folders of images by class", "give arrays x and y"
        raise InputError(what, where=str(raw), remedy=remedy)
    names = sorted({cells.composed(name) for path in paths for name in own_images.class_folders(path)})
    files = [file for path in paths for file in own_images.files(path)]
    if not files:
        expected = f"CLIENT/CLASS/name with {', '.join(own_images.IMAGES)}"
        got = own_images.left_out(paths).partition(": ")[2] or "empty folders"
        raise InputError("no image", where=str(raw), expected=expected, got=got, remedy="give other data as CLIENT.npz")
    headers = own_images.check_alike(files)
    doubts = labels.doubts("class", names, numeric=False)
    classes = labels.with_positive(labels.Classes(names, {}, len(names)), options.positive)
    names = classes.names or []
    remarks = (labels.listed(classes), *doubts, own_images.left_out(paths, others), *headers.remarks())
    source = {**_source(files, raw), "classes": names}
    return (lambda path: own_images.samples(path, names, headers.deep)), classes, source, tuple(filter(None, remarks))


def _array_reader(
    ending: str, paths: list[Path], raw: Path, remarks: tuple[str, ...]
) -> tuple[Callable[[Path], Any], labels.Classes | None, dict[str, Any], tuple[str, ...]]:
    """Return the same for arrays."""
    pairs = {path: path.with_name(path.name.removesuffix(ending) + ".y.npy") for path in paths}
    packed = ending == ".npz"
    source = _source(paths if packed else [*pairs, *pairs.values()], raw)  # first: it reports failures of the machine

    def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
        return own_arrays.read_npz(path) if packed else (own_arrays.read_npy(path), own_arrays.read_npy(pairs[path]))

    return read, None, source, remarks


def _table(path: Path, options: ColumnOptions, partition: str | None) -> Dataset:
    if _ending(path) not in TABLES:
        remedy = "save a workbook as CSV UTF-8; of arrays and images name the folder"
        raise InputError("no table", where=str(path), expected=" or ".join(TABLES), got=path.suffix, remedy=remedy)
    if options.client is None and partition is None:
        remedy = "name the column of its clients by --client, or deal its rows to clients by --partition"
        raise InputError("one table of all clients", where=str(path), remedy=remedy)
    name = path.name[: -len(_ending(path))]
    dataset = own_tables.load(name, {name: [path]}, [], {}, options, _source([path], path.parent))
    return dataset if options.client is not None else _pooled(dataset)


def _source(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Return provenance: one digest over all files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        with reading(file), file.open("rb") as opened:
            digest.update(f"{file.relative_to(root)}\n".encode(errors="surrogateescape"))
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return {"files": [{"name": counted(len(files), "own file"), "sha256": digest.hexdigest()}]}


SOURCES = {
    "own": DataSource(
        load,
        Origin(
            "Your own data: npz, npy, CSV or Parquet, a file per client; a table of all; folders of images",
            layout="a file or a folder per client; or one table, with --client COLUMN or --partition; files test.*",
        ),
    )
}
