"""Your own federation: clients as arrays, torch datasets or generators, written by the writer of all others.

Samples go through a temporary file, so that neither the number of clients nor their size has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.split import split
from data_prep.spool import Spool
from data_prep.write import write
from hpcfed.data.format import TASKS, Normalization
from hpcfed.errors import InputError, nearest

BLOCK_SAMPLES, BLOCK_BYTES = 512, 16 << 20
SMALL = np.iinfo(np.uint8).max
Clients = Mapping[str, Any] | Iterable[tuple[str, Any]]


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
    overwrite: bool = False,
) -> str:
    """Write a federation file from samples you hold, and return its content hash. Call it in one process only.

    The samples of a client are a pair of arrays ``(x, y)``, x (n, ...) and y (n,) or (n, ...), numpy's or torch's; or
    a torch ``Dataset`` (anything with a length and an index); or a generator of single samples ``(x, y)``. uint8 stays
    uint8 (images: (C, H, W)); a run scales it to [0, 1]. Other integers become float32, tokens aside; floating point
    stays single or double.

    Args:
        path: the file to write, whole or not at all.
        clients: the clients in their order: pairs (name, samples), or a mapping.
        test: samples of a common test set; or a mapping from clients' names to samples, each client's own test set.
        task: ``classification`` (labels 0 … K-1), ``regression`` (targets of any shape; multi-label targets of 0 and 1
            as well, with a loss of your own) or ``next-token`` (y: the token that follows, one a sample).
        num_classes: K, or the number of tokens; default: the largest label there is, plus one.
        vocabulary: what tokens stand for, as JSON can hold it.
        normalization: means and standard deviations, one or a channel each, that runs normalize x by.
        name: of the federation; default: the file's.
        source: where the data come from, as JSON can hold it.
        overwrite: replace a file that is there.

    Raises:
        InputError: samples of different shapes or kinds, numbers that are not finite, labels out of range, names twice.
        EnvironmentFailure: the disk is full or failed; nothing is left behind.
    """
    dataset = gather(
        name or Path(path).stem,
        clients,
        test=test,
        task=task,
        num_classes=num_classes,
        vocabulary=vocabulary,
        normalization=None if normalization is None else Normalization(*(tuple(map(float, v)) for v in normalization)),
        source=dict(source or {}),
    )
    return write(path, dataset, **vars(split(dataset, None, None, 0, {})), overwrite=overwrite)


def gather(
    name: str,
    clients: Clients,
    *,
    test: Any = None,
    task: str = "classification",
    num_classes: int | None = None,
    vocabulary: Any = None,
    normalization: Normalization | None = None,
    source: dict[str, Any] | None = None,
    in_pieces: bool = False,
) -> Dataset:
    """Return the data set of all clients' samples, mapped from a temporary file; arguments as `write_federation`.

    With `in_pieces` a client's name may come several times, each time with more of its samples.

    Raises:
        InputError: as `write_federation`.
    """
    if task not in TASKS:
        raise InputError(f"task {task!r}", remedy=nearest(task, TASKS))
    if task == "next-token" and num_classes is None and isinstance(vocabulary, list | str):
        num_classes = len(vocabulary)
    samples = _Samples(task, num_classes)
    names, owner = _each(clients, samples, {}, in_pieces)
    x, y = samples.finish()
    if not len(x):
        raise InputError(f"{name}: no client has a sample", remedy="give at least one")
    test_x = test_y = test_owner = None
    largest = samples.largest
    if test is not None:
        tests = _Samples(task, num_classes, like=samples)
        if isinstance(test, Mapping) and test.keys() != {"x", "y"}:
            _, test_owner = _each(test, tests, {name: k for k, name in enumerate(names)}, False)
        else:
            tests.add("the test set", test)
        test_x, test_y = tests.finish()
        if test_owner is None and not len(test_x):
            test_x = test_y = None
        largest = max(largest, tests.largest)
    if task != "regression":
        num_classes = num_classes or largest + 1
        y = _narrow(y, largest)
        test_y = None if test_y is None else _narrow(test_y, largest)
    return Dataset(
        name=name,
        task=task,
        x=x,
        y=y,
        num_classes=None if task == "regression" else num_classes,
        test_x=test_x,
        test_y=test_y,
        normalization=normalization,
        source=source or {},
        owner=owner,
        test_owner=test_owner,
        clients=names,
        vocabulary=vocabulary,
    )


def _each(clients: Clients, samples: _Samples, known: dict[str, int], in_pieces: bool) -> tuple[list[str], np.ndarray]:
    """Add all clients' samples; return the clients' names and the owner of each sample, (n,) int64."""
    numbers = dict(known)
    whose, sizes = [], []
    for name, given in clients.items() if isinstance(clients, Mapping) else clients:
        name = str(name)
        if known and name not in known:
            raise InputError(f"a test set of client {name!r}", remedy=nearest(name, known))
        if not known and not in_pieces and name in numbers:
            raise InputError(f"client {name!r} is there twice", remedy="give each client one name")
        whose.append(numbers.setdefault(name, len(numbers)))
        before = samples.count
        samples.add(f"client {name!r}", given)
        sizes.append(samples.count - before)
    return list(numbers), np.repeat(np.array(whose, np.int64), np.array(sizes, np.int64))


def _narrow(labels: np.ndarray, largest: int) -> np.ndarray:
    return labels.astype(np.uint8) if largest <= SMALL else labels


class _Samples:
    """Samples of one shape and kind, checked as they come."""

    def __init__(self, task: str, num_classes: int | None, like: _Samples | None = None):
        self._task, self._num_classes = task, num_classes
        self._x: Spool | None = None
        self._y: Spool | None = None
        self.count, self.largest = 0, -1
        if like is not None and like._x is not None and like._y is not None:
            self._x, self._y = (Spool(spool.row_shape, spool.dtype) for spool in (like._x, like._y))

    def add(self, who: str, given: Any) -> None:
        """Add what `write_federation` takes for the samples of one client, or of the test set."""
        for x, y in _blocks(who, given):
            if len(x) != len(y):
                raise InputError(f"{who}: x and y differ in length", got=f"{len(x)} and {len(y)}")
            if not len(x):
                continue
            x, y = self._features(who, x), self._targets(who, y)
            if self._x is None or self._y is None:
                self._x, self._y = Spool(x.shape[1:], x.dtype), Spool(y.shape[1:], y.dtype)
            for what, array, spool in (("x", x, self._x), ("y", y, self._y)):
                _check_like(f"{who}: {what}", array, spool)
                spool.append(array)
            self.count += len(x)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return x (n, ...) and y (n, ...), mapped."""
        if self._x is None or self._y is None:
            return np.empty((0,)), np.empty((0,), np.int64)
        return self._x.finish(), self._y.finish()

    def _features(self, who: str, x: np.ndarray) -> np.ndarray:
        if x.dtype.kind not in "biuf":
            raise InputError(f"{who}: x", expected="numbers", got=str(x.dtype))
        if self._task == "next-token":
            self._check_labels(f"{who}: x", x)
            small = self._num_classes is not None and self._num_classes <= SMALL + 1
            return x.astype(np.uint8 if small else np.int32)
        if x.dtype == np.uint8:
            return x
        return _finite(f"{who}: x", x.astype(np.float64 if x.dtype == np.float64 else np.float32))

    def _targets(self, who: str, y: np.ndarray) -> np.ndarray:
        if y.dtype.kind not in "biuf":
            raise InputError(f"{who}: y", expected="numbers", got=str(y.dtype))
        if self._task == "regression":
            return _finite(f"{who}: y", y.astype(np.float64 if y.dtype == np.float64 else np.float32))
        self._check_labels(f"{who}: y", y)
        if self._task == "classification" and y.ndim != 1:
            remedy = "for several labels a sample, use task='regression' and a loss of your own"
            raise InputError(f"{who}: y", expected="one label a sample", got=f"shape {y.shape[1:]}", remedy=remedy)
        self.largest = max(self.largest, int(y.max()))
        return y.astype(np.int64)

    def _check_labels(self, what: str, labels: np.ndarray) -> None:
        top = np.iinfo(np.int32).max if self._num_classes is None else self._num_classes - 1
        if labels.dtype.kind == "f" and (not np.isfinite(labels).all() or (labels != np.rint(labels)).any()):
            raise InputError(what, expected="whole numbers", got="others", remedy="or use task='regression'")
        if labels.min() < 0 or labels.max() > top:
            raise InputError(what, expected=f"labels 0 … {top}", got=f"{labels.min()} … {labels.max()}")


def _blocks(who: str, given: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and y of one client's samples in pieces."""
    if isinstance(given, Mapping) and given.keys() >= {"x", "y"}:
        given = given["x"], given["y"]
    if isinstance(given, tuple) and len(given) == 2:
        x, y = (np.asarray(part) for part in given)
        if not (x.ndim and y.ndim):
            raise InputError(f"{who}: x and y", expected="arrays with a row per sample", got="single numbers")
        for start in range(0, max(len(x), len(y)), BLOCK_SAMPLES):
            yield x[start : start + BLOCK_SAMPLES], y[start : start + BLOCK_SAMPLES]
        return
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        single: Iterator[Any] = (given[i] for i in range(len(given)))
    elif isinstance(given, Iterable):
        single = iter(given)
    else:
        expected = "arrays (x, y), a torch Dataset or a generator of samples (x, y)"
        raise InputError(who, expected=expected, got=type(given).__name__)
    for first in single:
        x, y = _stacked(who, [first])
        together = max(1, min(BLOCK_SAMPLES, BLOCK_BYTES // max(1, x.nbytes + y.nbytes)))
        yield _stacked(who, [first, *islice(single, together - 1)])


def _stacked(who: str, block: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = zip(*block, strict=True)
        return np.stack([np.asarray(part) for part in x]), np.stack([np.asarray(part) for part in y])
    except (TypeError, ValueError) as error:
        raise InputError(f"{who}: samples", expected="pairs (x, y) of one shape", got=str(error)) from error


def _check_like(what: str, array: np.ndarray, spool: Spool) -> None:
    """Refuse samples that the first ones' shape and type cannot hold."""
    if array.shape[1:] != spool.row_shape:
        expected = f"shape {spool.row_shape} a sample, as before"
        raise InputError(what, expected=expected, got=str(array.shape[1:]))
    if not np.can_cast(array.dtype, spool.dtype, "same_kind"):
        raise InputError(what, expected=f"{spool.dtype}, as before", got=str(array.dtype))


def _finite(what: str, array: np.ndarray) -> np.ndarray:
    if not np.isfinite(array).all():
        raise InputError(what, expected="finite numbers", got="NaN or infinity")
    return array
