"""Samples from arrays, torch datasets or generators, checked on arrival and kept in a temporary file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from data_prep.array_labels import ArrayLabels
from data_prep.as_arrays import as_array, column_names, in_order
from data_prep.progress import step
from data_prep.spool import Spool, spooled
from hpcfed.data.federation import EVENTS, OF_NUMBERS, flaw_of_events
from hpcfed.errors import InputError

BLOCK_SAMPLES, BLOCK_BYTES = 512, 16 << 20
LARGEST_EXACT = 1 << 24
"""Float32 has all whole numbers up to this one."""
LARGEST_BYTE = np.iinfo(np.uint8).max
OF_EVENTS = "1 for an event or 0 for a censored time"
"""Contents of the first column of survival targets."""


@dataclass(frozen=True)
class Blocks:
    """Samples in blocks: pairs x (m, ...) and y (m,) or (m, ...)."""

    pairs: Iterable[tuple[np.ndarray, np.ndarray]]


class Samples:
    """Samples of one shape and type, checked on arrival.

    Args:
        task, num_classes: as `data_prep.own.gather`.
        like: other samples, whose shape and type these must have.
        missing: treatment of NaN in x: ``refuse``; ``drop`` the sample; ``keep``.

    Attributes:
        labels: the different labels, where these are the classes: y (n,) has their numbers; None with `num_classes`.
        rounded: a whole number of x that float32 rounded; None if there is none.
        columns: ``x`` or ``y`` → names of its columns in their order, if data frames have them.
    """

    def __init__(self, task: str, num_classes: int | None, like: Samples | None = None, missing: str = "refuse"):
        self._task, self._num_classes, self._missing = task, num_classes, missing
        self._x: Spool | None = None
        self._y: Spool | None = None
        self.count, self.largest = 0, -1
        self.dropped: Counter[str] = Counter()
        self.labelled: set[str] = set()
        self.rounded: int | None = None
        self.labels = ArrayLabels() if task == "classification" and num_classes is None else None
        self.columns: dict[str, list[Any]] = {}
        if like is not None:
            self.labels, self.columns = like.labels, like.columns
        if like is not None and like._x is not None and like._y is not None:
            self._x, self._y = (Spool(spool.row_shape, spool.dtype) for spool in (like._x, like._y))

    def add(self, name: str, content: Any) -> np.ndarray:
        """Add the samples of one client, or of the test set, in any form that `write_federation` takes.

        Returns:
            Which of them are kept, (n,) bool.
        """
        start, kept = 0, [np.zeros(0, bool)]
        for x, y in self._blocks(name, content):
            if len(x) != len(y):
                raise InputError(f"{name}: x and y differ in length", got=f"{len(x)} and {len(y)}")
            first, start = start, start + len(x)
            y = self._of_one_class(f"{name}: y", y)
            kept.append(_without_nan(x) & _without_nan(y) if self._missing == "drop" else np.ones(len(x), bool))
            if not kept[-1].all():
                self.labelled.update((name,) if _without_nan(y).any() else ())
                self.dropped[name] += int((~kept[-1]).sum())
                x, y = x[kept[-1]], y[kept[-1]]
            if not len(x):
                continue
            x, y = self._features(name, x, first), self._targets(name, y, first)
            if self._x is None or self._y is None:
                self._x, self._y = Spool(x.shape[1:], x.dtype), Spool(y.shape[1:], y.dtype)
            for what, array, spool in (("x", x, self._x), ("y", y, self._y)):
                if not array[0].size:
                    raise InputError(f"{name}: {what}", expected="numbers of each sample", got=f"shape {array.shape}")
                _check_like(f"{name}: {what}", array, spool)
            self._x, self._y = _as_wide(self._x, x), _as_wide(self._y, y)
            self._x.append(x)
            self._y.append(y)
            self.count += len(x)
            step("reading samples", self.count)
        return np.concatenate(kept)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return x (n, ...) and y (n, ...), mapped."""
        if self._x is None or self._y is None:
            return np.empty((0,)), np.empty((0,), np.int64)
        return self._x.finish(), self._y.finish()

    def _features(self, name: str, x: np.ndarray, first: int) -> np.ndarray:
        if x.dtype.kind not in "biuf":
            raise InputError(f"{name}: x", expected="numbers", got=str(x.dtype))
        if self._task == "next-token":
            self._check_labels(f"{name}: x", x)
            small = self._num_classes is not None and self._num_classes <= LARGEST_BYTE + 1
            return x.astype(np.uint8 if small else np.int32)
        if x.dtype == np.uint8:
            return x
        wide = x.astype(np.float64 if is_double(x.dtype) else np.float32)
        if x.dtype.kind in "iu" and self.rounded is None and np.abs(wide).max(initial=0) >= LARGEST_EXACT:
            with np.errstate(invalid="ignore"):  # one that is rounded beyond its type
                other = x[wide.astype(x.dtype) != x]
            self.rounded = int(other.flat[0]) if other.size else None
        return _finite(f"{name}: x", wide, first, nan=self._missing == "keep")

    def _of_one_class(self, what: str, y: np.ndarray) -> np.ndarray:
        """Return the labels of a classification as (m,), numbered by `labels` if there is one; y of other tasks."""
        if self._task != "classification":
            return y
        if y.shape[1:] == (1,):
            y = y[:, 0]
        if y.ndim != 1:
            remedy = "for several labels a sample, use task='regression' and a loss of your own"
            if y.ndim == 2 and np.isin(y, (0, 1)).all():
                remedy = "for one-hot rows pass y.argmax(1), for several labels a sample use task='multi-label'"
            raise InputError(what, expected="one label a sample", got=f"shape {y.shape[1:]}", remedy=remedy)
        return y if self.labels is None else self.labels.add(what, y)

    def _targets(self, name: str, y: np.ndarray, first: int) -> np.ndarray:
        if y.dtype.kind in "US":
            remedy = "leave num_classes out, or number the classes" if self._task == "classification" else ""
            raise InputError(f"{name}: y", expected="numbers", got="words", remedy=remedy)
        if y.dtype.kind not in "biuf":
            raise InputError(f"{name}: y", expected="numbers", got=str(y.dtype))
        if self._task in OF_NUMBERS:
            is_single = np.result_type(y.dtype, np.float32) == np.float32
            numbers = _finite(f"{name}: y", y.astype(np.float32 if is_single else np.float64), first)
            if self._task == "survival":
                _check_events(f"{name}: y", numbers)
            return numbers
        if self._task == "next-token" and y.shape[1:] == (1,):
            y = y[:, 0]
        if self._task == "next-token" and y.ndim != 1:
            remedy = "make each position a sample, the tokens before it as x"
            raise InputError(f"{name}: y", expected="one target per sample", got=f"shape {y.shape[1:]}", remedy=remedy)
        self._check_labels(f"{name}: y", y)
        self.largest = max(self.largest, int(y.max()))
        return y.astype(np.int64)

    def _check_labels(self, what: str, labels: np.ndarray) -> None:
        top = np.iinfo(np.int32).max if self._num_classes is None else self._num_classes - 1
        if self._task == "multi-label":
            top = 1
        if labels.dtype.kind == "f" and (absent := int(np.isnan(labels).sum())):
            remedy = "leave such samples out"
            raise InputError(what, expected="a label for each sample", got=f"{absent:,} of NaN", remedy=remedy)
        if labels.dtype.kind == "f" and (not np.isfinite(labels).all() or (labels != np.rint(labels)).any()):
            raise InputError(what, expected="whole numbers", got="others", remedy="or use task='regression'")
        if labels.min() < 0 or labels.max() > top:
            raise InputError(what, expected=f"labels 0 … {top}", got=f"{labels.min()} … {labels.max()}")

    def _blocks(self, name: str, content: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield x and y of one client's samples in pieces."""
        if isinstance(content, Mapping) and content.keys() >= {"x", "y"}:
            content = content["x"], content["y"]
        if isinstance(content, Mapping):
            keys, remedy = (
                ", ".join(map(str, [*content][:4])),
                "several clients are data={'clients': {…}}, or {…} itself",
            )
            raise InputError(f"{name}: a mapping", expected="x and y", got=f"{keys or 'nothing'}", remedy=remedy)
        if isinstance(content, Blocks):
            yield from content.pairs
            return
        if hasattr(content, "batch_sampler") and hasattr(content, "dataset"):
            content = _dataset_of(name, content)
        if not (isinstance(content, tuple) and len(content) == 2):
            yield from _of_singles(name, content)
            return
        if hasattr(content[0], "tocsr"):
            yield from self._sparse(name, *content)
            return
        x, y = (self._array(name, which, part) for which, part in zip("xy", content, strict=True))
        if not (x.ndim and y.ndim):
            raise InputError(f"{name}: x and y", expected="arrays with a row per sample", got="single numbers")
        for start in range(0, max(len(x), len(y)), BLOCK_SAMPLES):
            yield x[start : start + BLOCK_SAMPLES], y[start : start + BLOCK_SAMPLES]

    def _sparse(self, name: str, x: Any, y: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of a sparse matrix of SciPy's, dense, and their y."""
        rows, labels = x.tocsr(), self._array(name, "y", y)
        if rows.shape[0] != len(labels):
            raise InputError(f"{name}: x and y differ in length", got=f"{rows.shape[0]} and {len(labels)}")
        for start in range(0, len(labels), BLOCK_SAMPLES):
            block = slice(start, start + BLOCK_SAMPLES)
            yield np.asarray(rows[block].toarray()), labels[block]

    def _array(self, name: str, which: str, part: Any) -> np.ndarray:
        """Return x or y as an array, its columns in the order of the first data frame's."""
        array, names = as_array(f"{name}: {which}", part, can_lack=which == "x"), column_names(part)
        if names is None or (which == "y" and len(names) == 1):
            return array
        return in_order(f"{name}: {which}", array, names, self.columns.setdefault(which, names))


def _dataset_of(name: str, loader: Any) -> Any:
    """Return a DataLoader's dataset, whose samples it has all, each once, as they are.

    Raises:
        InputError: a sampler or ``collate_fn`` makes others of them, or it has no dataset that can be indexed.
    """
    dataset, sampler = loader.dataset, loader.sampler
    kind = type(sampler).__name__
    is_shuffled = kind == "RandomSampler" and not sampler.replacement and sampler.num_samples == len(dataset)
    whole = kind == "SequentialSampler" or is_shuffled
    batches = type(loader.batch_sampler).__name__
    collates = getattr(loader.collate_fn, "__name__", "") if batches == "BatchSampler" else "default_collate"
    got = f"one with a {kind}" if not whole else f"one with a {batches}"
    if not whole or batches not in ("BatchSampler", "NoneType") or collates != "default_collate":
        got = got if not whole or collates == "default_collate" else "one with a collate_fn"
        remedy = "give its dataset, loader.dataset, or torch.utils.data.Subset(dataset, indices)"
        raise InputError(
            f"{name}: a DataLoader", expected="all samples of its dataset, each once", got=got, remedy=remedy
        )
    return dataset


def _check_repeats(name: str, content: Any) -> None:
    """Refuse a dataset whose first sample is another one each time that it is read."""
    if not len(content):
        return
    first, again = content[0], content[0]
    if not (isinstance(first, tuple | list) and len(first) == len(again) == 2):
        return
    for which, one, other in zip("xy", first, again, strict=True):
        arrays = [np.asarray(as_array(f"{name}: {which}", part, can_lack=True)) for part in (one, other)]
        if arrays[0].shape != arrays[1].shape or arrays[0].tobytes() != arrays[1].tobytes():
            what, remedy = f"{name}: sample 0 differs each time that it is read", "leave the transform out, or use"
            raise InputError(what, got="a random transform", remedy=f"{remedy} local.augment of the recipe")


def _of_singles(name: str, content: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and y in pieces, of a sequence or another iterable of single samples."""
    if hasattr(content, "__len__") and hasattr(content, "__getitem__"):
        if not isinstance(content, list | tuple):
            _check_repeats(name, content)
        single: Iterator[Any] = (content[i] for i in range(len(content)))
    elif isinstance(content, Iterable):
        single = iter(content)
    else:
        expected = "arrays (x, y), a torch Dataset or a generator of samples (x, y)"
        raise InputError(name, expected=expected, got=type(content).__name__)
    for first in single:
        if isinstance(first, Mapping):
            keys = ", ".join(map(repr, first))[:80]
            remedy = "give ((row['image'], row['label']) for row in data), by its keys"
            raise InputError(f"{name}: samples", expected="pairs (x, y)", got=f"mappings of {keys}", remedy=remedy)
        x, y = _stacked(name, [first])
        together = max(1, min(BLOCK_SAMPLES, BLOCK_BYTES // max(1, x.nbytes + y.nbytes)))
        yield _stacked(name, [first, *islice(single, together - 1)])


def _stacked(name: str, block: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = zip(*block, strict=True)
        return (
            np.stack([as_array(f"{name}: x", one, can_lack=True) for one in x]),
            np.stack([as_array(f"{name}: y", one, can_lack=False) for one in y]),
        )
    except (TypeError, ValueError) as error:
        got, remedy = str(error), ""
        if "same shape" in got:
            got, remedy = "several shapes", "pad sequences to one length, and bring images to one size"
        what, expected = f"{name}: samples", "pairs (x, y) of one shape"
        raise InputError(what, expected=expected, got=got, remedy=remedy) from error


def _without_nan(part: np.ndarray) -> np.ndarray:
    """Return which rows of x or y have no NaN, (n,) bool."""
    if part.dtype.kind != "f" or not len(part):
        return np.ones(len(part), bool)
    return ~np.isnan(part.reshape(len(part), -1)).any(axis=1)


def _check_events(what: str, y: np.ndarray) -> None:
    """Refuse targets that are not (event, time)."""
    got = flaw_of_events(y) if y.shape[1:] == (2,) else f"shape {y.shape[1:]} each"
    if got.startswith("time"):
        raise InputError(what, expected=EVENTS, got=got, remedy="leave such a sample out, or mend its time")
    if got:
        swapped = y.shape[1:] != (2,) or np.isin(y[:, 1], (0, 1)).all()
        remedy = "name the columns event,time in this order" if swapped else f"write {OF_EVENTS}"
        raise InputError(what, expected=EVENTS, got=got, remedy=remedy)


def _check_like(what: str, array: np.ndarray, spool: Spool) -> None:
    """Refuse samples that do not fit the shape and type of the first ones."""
    if array.shape[1:] != spool.row_shape:
        expected = f"shape {spool.row_shape} a sample, as before"
        raise InputError(what, expected=expected, got=str(array.shape[1:]))
    if array.dtype.kind != spool.dtype.kind:
        expected, remedy = f"{spool.dtype}, as before", "give all in one type: runs divide uint8 by 255, and no other"
        raise InputError(what, expected=expected, got=str(array.dtype), remedy=remedy)


def is_double(dtype: np.dtype) -> bool:
    """Whether it is floating point of 64 bits or more, in any byte order."""
    return dtype.kind == "f" and dtype.itemsize >= np.dtype(np.float64).itemsize


def _as_wide(spool: Spool, array: np.ndarray) -> Spool:
    """Return the spool in the type of an array that is wider: samples are float64 where any is."""
    return spool if np.can_cast(array.dtype, spool.dtype) else spooled(spool.finish(), array.dtype.type)


def _finite(what: str, array: np.ndarray, first: int, nan: bool = False) -> np.ndarray:
    """Refuse numbers that are not finite, in samples numbered from `first`; `nan` allows NaN."""
    wrong = np.isinf(array) if nan else ~np.isfinite(array)
    if wrong.any():
        sample, *place = (int(k) for k in np.argwhere(wrong)[0])
        where = f"{what}: sample {first + sample}" + (f", entry {', '.join(map(str, place))}" if place else "")
        got = "infinity" if np.isinf(array[(sample, *place)]) else "NaN"
        raise InputError(where, expected="finite numbers", got=got)
    return array
