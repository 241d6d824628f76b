"""Federations from the user's Python data: clients as arrays, torch datasets or generators.

Samples go through a temporary file, so neither the number of clients nor their size has to fit into memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.as_arrays import is_dataset
from data_prep.coverage import untrained
from data_prep.dataset import Dataset
from data_prep.finish import finish
from data_prep.frames import holds_frames, of_frames
from data_prep.groups import described, names_of, numbered
from data_prep.samples import LARGEST_BYTE, Samples
from data_prep.split import split
from data_prep.spool import spooled
from data_prep.tables import labels
from data_prep.tables.missing import DROP, REFUSE, check_way
from data_prep.tables.standardize import NONE
from data_prep.write import write
from hpcfed.data.federation import OF_NUMBERS, TASKS, Standardization
from hpcfed.errors import InputError, nearest

Clients = Mapping[str, Any] | Iterable[tuple[str, Any]]
CHANNELS = (1, 3, 4)
Kept = list[tuple[str, np.ndarray]]
"""Clients, or "" for a common test set, and which of their samples are kept, (n,) bool."""


def write_federation(
    path: str | Path,
    clients: Clients,
    *,
    test: Any = None,
    task: str = "classification",
    num_classes: int | None = None,
    vocabulary: Any = None,
    normalization: tuple[Sequence[float], Sequence[float]] | None = None,
    name: str = "",
    source: Mapping[str, Any] | None = None,
    missing: str = REFUSE,
    standardize: str = NONE,
    groups: Mapping[str, Any] | None = None,
    test_groups: Any = None,
    client: str | None = None,
    target: str | Sequence[str] | None = None,
    overwrite: bool = False,
    by_content: bool = False,
) -> str:
    """Write a federation file from samples you hold, and return its content hash. Call it in one process only.

    The samples of a client are a pair of arrays ``(x, y)``, x (n, ...) and y (n,) or (n, ...), numpy's or torch's; or
    a torch ``Dataset`` (anything with a length and an index); or a generator of single samples ``(x, y)``. uint8 stays
    uint8 (images: (C, H, W)); a run scales it to [0, 1]. Other integers become float32, tokens aside; floating point
    stays single or double, and is double where any client's is, as are targets that are whole numbers of 32 or 64
    bits. In masked arrays of floating point x is NaN where it is masked. Data frames' columns are found by name, and
    are the features. SciPy's sparse x is made dense. A torch ``DataLoader`` stands for its dataset.

    Data frames, Hugging Face's ``Dataset`` and other tables with ``to_pandas`` are clients by themselves: one table
    with the columns `client` and `target`, ``df.groupby("hospital")``, or a mapping of clients' names to tables. Words
    and categoricals become one-hot columns, ``ward=icu``, by the levels of all clients.

    Args:
        path: the file to write, whole or not at all.
        clients: the clients in their order: pairs (name, samples), or a mapping; or a list of datasets, which are then
            called 0, 1, ….
        test: samples of a common test set; or a mapping from clients' names to samples, each client's own test set.
        task: ``classification`` (a label each, a word or a whole number), ``multi-label`` (y (n, K) of 0 and 1),
            ``regression`` (targets of any shape), ``survival`` (y (n, 2): 1 for an event or 0 for censored, and its
            time) or ``next-token`` (y: the token that follows, one a sample).
        num_classes: K, of labels 0 … K-1; default: each different label is a class, in the order of their values, and
            classes other than 0 … K-1 have names. Or the number of tokens; default: the largest one plus one.
        vocabulary: the tokens' meaning, JSON-serializable.
        normalization: means and standard deviations by which runs normalize x, one of each or one per channel.
        name: of the federation; default: the file's.
        source: provenance, JSON-serializable.
        missing: treatment of NaN: ``refuse``; ``drop`` the sample; or replace it, in x (n, p), by the ``mean`` or
            ``median`` of the training samples.
        standardize: ``client`` or ``pooled``: x scaled to mean 0 and deviation 1 along axis 1, over the training
            samples of each client or of all (see `data_prep.tables.standardize`); ``none``.
        groups: the group of each sample, such as its patient, by clients' names: texts or whole numbers, (n,). Studies
            and test sets that are held out later split none.
        test_groups: the same of `test`, (n,), or a mapping where that is one; needed with `groups`.
        client: the column of one data frame that names the client.
        target: the column of y in data frames, or several.
        overwrite: replace an existing file.
        by_content: put the first 12 digits of the content hash into the file's name, ``own-3f09a2c41b77.h5``; an equal
            file that is there is left as it is.

    Raises:
        InputError: samples of different shapes or kinds, numbers that are not finite, labels out of range, names twice.
        EnvironmentFailure: the disk is full or failed; nothing is left behind.
    """
    if holds_frames(clients):
        clients, test, said = of_frames(clients, test, client, target)
        source = {**said, **(source or {})}
    elif client is not None or target is not None:
        what = "client and target name columns of data frames"
        raise InputError(
            what, expected="a data frame, a groupby or a mapping of data frames", got=type(clients).__name__
        )
    dataset = gather(
        name or Path(path).stem,
        clients,
        test=test,
        task=task,
        num_classes=num_classes,
        vocabulary=vocabulary,
        normalization=None
        if normalization is None
        else Standardization(*(tuple(map(float, v)) for v in normalization)),
        source=dict(source or {}),
        missing=missing,
        groups=groups,
        test_groups=test_groups,
    )
    if hint := channels_last(dataset.x.shape):
        warnings.warn(hint, stacklevel=2)
    done = split(dataset, None, None, 0, {})
    for line in untrained(dataset, done):
        warnings.warn(line, stacklevel=2)
    return write(path, finish(dataset, done, standardize), **vars(done), overwrite=overwrite, by_content=by_content)


def gather(
    name: str,
    clients: Clients,
    *,
    test: Any = None,
    task: str = "classification",
    num_classes: int | None = None,
    vocabulary: Any = None,
    normalization: Standardization | None = None,
    source: dict[str, Any] | None = None,
    in_pieces: bool = False,
    missing: str = REFUSE,
    remarks: tuple[str, ...] = (),
    groups: Mapping[str, Any] | None = None,
    test_groups: Any = None,
    positive: str | None = None,
) -> Dataset:
    """Return the data set of all clients' samples, mapped from a temporary file; arguments as `write_federation`.

    With `in_pieces` a client's name may be repeated, each time with more of its samples. `positive` is the label of
    class 1 of two, where classes are the different labels; default: the last in their order.

    Raises:
        InputError: as `write_federation`.
    """
    check_task(task)
    check_way(missing)
    if task == "next-token" and num_classes is None and isinstance(vocabulary, list | str):
        num_classes = len(vocabulary)
    absent = missing if missing in (REFUSE, DROP) else "keep"
    samples = Samples(task, num_classes, missing=absent)
    names, owner, kept = _each(clients, samples, {}, in_pieces)
    x, y = samples.finish()
    if not len(x):
        raise InputError(f"{name}: no client has a sample", remedy="give at least one")
    tests = Samples(task, num_classes, like=samples, missing=absent)
    tested = _tested(test, tests, names)
    x, y = _as_wide(x, tested.x), _as_wide(y, tested.y)
    if (whole := samples.rounded if tests.rounded is None else tests.rounded) is not None:
        remarks = (*remarks, f"x: whole numbers are rounded to float32, {whole} to {int(np.float32(whole))}")
    _check_shapes(name, task, missing, x, y)
    test_y = tested.y
    if samples.labels is not None:
        classes = samples.labels.classes(positive)
        class_of = samples.labels.class_of(classes)
        y, test_y = class_of[y], None if test_y is None else class_of[test_y]
        num_classes = classes.count
        remarks = (*remarks, labels.described("y", classes), *classes.remarks)
        if classes.names is not None:
            source = {**(source or {}), "classes": classes.names}
    elif task not in OF_NUMBERS:
        largest = max(samples.largest, tests.largest)
        num_classes = y.shape[1] if task == "multi-label" else num_classes or largest + 1
        y, test_y = _narrow(y, largest), None if test_y is None else _narrow(test_y, largest)
    group = test_group = None
    if groups is not None:
        group, test_group, lines = _grouped(groups, test_groups, kept, owner, tested)
        remarks = (*remarks, *lines)
    return Dataset(
        name=name,
        task=task,
        x=x,
        y=y,
        num_classes=None if task in OF_NUMBERS else num_classes,
        test_x=tested.x,
        test_y=test_y,
        normalization=normalization,
        source=source or {},
        owner=owner,
        test_owner=tested.owner,
        clients=names,
        vocabulary=vocabulary,
        features=_features(samples, x.shape),
        emptied=_emptied(names, owner, samples),
        remarks=remarks,
        fill=missing if absent == "keep" and x.dtype.kind == "f" else "",
        group=group,
        test_group=None if tested.x is None else test_group,
    )


def check_task(task: str) -> None:
    """Refuse an unknown task.

    Raises:
        InputError: naming the nearest.
    """
    if task not in TASKS:
        raise InputError(f"task {task!r}", remedy=nearest(task, TASKS))


@dataclass(frozen=True)
class _Tested:
    """Test samples x and y, None without any; the owner of each, None for a common set; and which were kept."""

    x: np.ndarray | None = None
    y: np.ndarray | None = None
    owner: np.ndarray | None = None
    kept: Kept = field(default_factory=list)
    is_common: bool = False


def _tested(test: Any, tests: Samples, names: list[str]) -> _Tested:
    """Add the samples of a common test set, or of the clients' own ones, and return them."""
    if test is None:
        return _Tested()
    if isinstance(test, Mapping) and test.keys() != {"x", "y"}:
        _, owner, kept = _each(test, tests, {name: k for k, name in enumerate(names)}, False)
        return _Tested(*tests.finish(), owner, kept)
    kept = [("", tests.add("the test set", test))]
    x, y = tests.finish()
    return _Tested(x, y, None, kept, True) if len(x) else _Tested(kept=kept, is_common=True)


def _check_shapes(name: str, task: str, missing: str, x: np.ndarray, y: np.ndarray) -> None:
    """Refuse x other than (n, p) where its gaps are filled by column, and multi-label y other than (n, K).

    Raises:
        InputError: naming the shape.
    """
    if missing not in (REFUSE, DROP) and x.ndim != 2:
        got = f"shape {x.shape[1:]} each"
        raise InputError(f"--missing {missing}", expected="x (n, p)", got=got, remedy="use drop")
    if task == "multi-label" and y.ndim != 2:
        raise InputError(f"{name}: y", expected="zeros and ones, a column a label", got=f"shape {y.shape[1:]} each")


def _grouped(
    groups: Mapping[str, Any], test_groups: Any, kept: Kept, owner: np.ndarray, tested: _Tested
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the groups of the training and of the test samples, by number, (n,) each, and remarks on them."""
    of_tests = {"": test_groups} if tested.is_common and test_groups is not None else test_groups or {}
    names, test_names = names_of(kept, groups), names_of(tested.kept, of_tests)
    group, test_group = numbered(names, test_names)
    return group, test_group, [*described(owner, group, test_group, {*names, *test_names})]


def _features(samples: Samples, shape: tuple[int, ...]) -> list[str] | None:
    """Return the names of x's columns, if data frames have them as texts."""
    names = samples.columns.get("x", [])
    is_named = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return names if is_named and shape[1:] == (len(names),) else None


def _as_wide(array: np.ndarray, test: np.ndarray | None) -> np.ndarray:
    """Return training samples as float64 if those of the test set are; these follow the others by themselves."""
    return array if test is None or np.can_cast(test.dtype, array.dtype) else spooled(array, test.dtype.type).finish()


def _emptied(names: list[str], owner: np.ndarray, samples: Samples) -> dict[str, bool]:
    """Return the clients that lost all their samples to missing values → whether one of these has a label."""
    sizes = np.bincount(owner, minlength=len(names))
    places = {one: f"client {one!r}" for one, size in zip(names, sizes.tolist(), strict=True) if not size}
    return {one: place in samples.labelled for one, place in places.items() if samples.dropped[place]}


def _each(
    clients: Clients, samples: Samples, known: dict[str, int], in_pieces: bool
) -> tuple[list[str], np.ndarray, Kept]:
    """Add all clients' samples; return the clients' names, the owner of each sample, (n,) int64, and what is kept."""
    numbers = dict(known)
    owners, sizes = [], []
    kept: Kept = []
    for name, content in _pairs(clients):
        name = str(name)
        if known and name not in known:
            raise InputError(f"a test set of client {name!r}", remedy=nearest(name, known))
        if not known and not in_pieces and name in numbers:
            raise InputError(f"client {name!r} is there twice", remedy="give each client one name")
        owners.append(numbers.setdefault(name, len(numbers)))
        kept.append((name, samples.add(f"client {name!r}", content)))
        sizes.append(int(kept[-1][1].sum()))
    return list(numbers), np.repeat(np.array(owners, np.int64), np.array(sizes, np.int64)), kept


def _pairs(clients: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the clients' names and samples.

    Raises:
        InputError: they are something else, such as samples without names.
    """
    if isinstance(clients, Mapping):
        yield from clients.items()
        return
    if isinstance(clients, tuple | list) and clients and all(map(is_dataset, clients)):
        yield from ((str(number), content) for number, content in enumerate(clients))
        return
    for pair in clients if isinstance(clients, Iterable) else [clients]:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or _holds_samples(pair[0]):
            got = type(pair).__name__ + (f" of {len(pair)}" if isinstance(pair, tuple | list) else "")
            remedy = "name each client's samples: {'north': samples, …}"
            raise InputError("clients", expected="pairs (name, samples), or a mapping", got=got, remedy=remedy)
        yield pair[0], pair[1]


def _holds_samples(name: Any) -> bool:
    is_array = hasattr(name, "__array__") and not isinstance(name, np.generic)
    return is_array or isinstance(name, Mapping | list | tuple)


def _narrow(labels: np.ndarray, largest: int) -> np.ndarray:
    return labels.astype(np.uint8) if largest <= LARGEST_BYTE else labels


def channels_last(shape: tuple[int, ...]) -> str:
    """Return a line on x (N, H, W, C) that looks like images with the channels last; "" otherwise."""
    if len(shape) != 4 or shape[3] not in CHANNELS or shape[1] in CHANNELS:
        return ""
    return f"channels last? hpcfed expects (N, C, H, W), and x is {shape}; transpose it by x.transpose(0, 3, 1, 2)"
