"""Classes and levels that a split leaves out of training, or gives to one client alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_prep.dataset import Dataset
from data_prep.split import NATURAL, NOBODY, Split
from hpcfed.data.content import rows_per_block
from hpcfed.errors import first_of

MAX_LISTED = 6


def coverage(dataset: Dataset, done: Split) -> Iterator[str]:
    """Yield lines on classes and levels that only test samples have, and on classes of one natural client alone."""
    if dataset.task == "classification" and dataset.num_classes is not None:
        yield from _classes(dataset, done)
    hot = list(dataset.indicators)
    if not hot or dataset.features is None:
        return
    trained = _any(dataset.x, done.training, hot)
    if done.held is not None:
        tested = _any(dataset.x, done.held, hot)
    elif dataset.test_x is not None:
        tested = _any(dataset.test_x, _tested(done, len(dataset.test_x)), hot)
    else:
        return
    unseen = [dataset.features[hot[k]] for k in np.flatnonzero(tested & ~trained).tolist()]
    if unseen:
        yield f"only test samples have {first_of(unseen, MAX_LISTED)}"


def _classes(dataset: Dataset, done: Split) -> Iterator[str]:
    assert dataset.num_classes is not None
    count = dataset.num_classes
    names = dataset.source.get("classes")
    if not isinstance(names, list) or len(names) != count:
        names = [str(k) for k in range(count)]
    labels, owner = np.asarray(dataset.y)[done.training], done.owner[done.training]
    trained = np.bincount(labels, minlength=count)
    tests = np.empty(0, np.int64)
    if done.held is not None:
        tests = np.asarray(dataset.y)[done.held]
    elif dataset.test_y is not None:
        tests = np.asarray(dataset.test_y)[_tested(done, len(dataset.test_y))]
    unseen = np.flatnonzero((np.bincount(tests, minlength=count) > 0) & (trained == 0))
    if len(unseen):
        yield f"only test samples have classes: {first_of([names[k] for k in unseen.tolist()], MAX_LISTED)}"
    if done.partition["scheme"] != NATURAL or done.num_clients < 2 or done.clients is None:
        return
    first, last = np.full(count, done.num_clients), np.full(count, -1)
    np.minimum.at(first, labels, owner)
    np.maximum.at(last, labels, owner)
    alone = [f"{names[k]} ({done.clients[first[k]]})" for k in np.flatnonzero(first == last).tolist()]
    if alone:
        yield f"classes of one client alone: {first_of(alone, MAX_LISTED)}"


def _tested(done: Split, count: int) -> np.ndarray:
    """Return the mask of the source's test samples that are kept, (count,) bool."""
    return np.ones(count, bool) if done.test_owner is None else done.test_owner != NOBODY


def _any(x: np.ndarray, which: np.ndarray, columns: list[int]) -> np.ndarray:
    """Return for each of the columns of 0 and 1 whether any sample of the mask `which` has a 1, (columns,) bool."""
    found = np.zeros(len(columns), bool)
    rows = np.flatnonzero(which)
    block = rows_per_block(x.shape[1:], x.dtype)
    for start in range(0, len(rows), block):
        found |= (x[rows[start : start + block]][:, columns] > 0).any(axis=0)
    return found
