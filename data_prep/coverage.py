"""What a split may do to scores: classes and levels without training samples, or of one client alone; equal samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from data_prep.dataset import Dataset
from data_prep.split import NATURAL, NOBODY, Split
from data_prep.tables.standardize import moments
from hpcfed.data.content import rows_per_block
from hpcfed.errors import counted, first_of

MAX_LISTED = 6
MOST_CELLS = 1 << 24
"""Clients times classes, up to which it is compared which clients have which classes."""
FEWEST_ROWS, SPREADS, FACTOR, ALIKE = 5, 2.0, 2.0, 3.0
"""Clients of so many rows whose means are apart by more than so many deviations of both, and by such a factor, as their
deviations are within another one, may have a feature in another unit.
"""
LOOKED_AT = 512
"""Samples, and columns of them, by whose values it is estimated how often samples are equal by chance."""
CHANCE, OFTEN = 0.01, 2.0
"""Equal samples say nothing where chance alone gives a sample more than so many others like it, or where they are at
most so many times as frequent as within a client.
"""


def coverage(dataset: Dataset, done: Split) -> Iterator[str]:
    """Yield remarks on a split: what only test samples have, equal samples, and natural clients with classes, words or
    units that no other client shares.
    """
    yield from untrained(dataset, done)
    yield from _equal(dataset, done)
    is_natural = done.partition["scheme"] == NATURAL and done.num_clients > 1
    if is_natural and dataset.features is not None and done.clients is not None:
        yield from _levels_apart(dataset, done)
        yield from _units_apart(dataset, done)
    if dataset.task == "classification" and dataset.num_classes is not None and is_natural:
        yield from _alone(dataset, done)


def _levels_apart(dataset: Dataset, done: Split) -> Iterator[str]:
    """Yield a line on each column of words of which a client has several that no other has, and none of theirs."""
    assert dataset.features is not None
    assert done.clients is not None
    columns = [k for start, stop in dataset.categories for k in range(start, stop)]
    if not columns or len(done.clients) * len(columns) > MOST_CELLS:
        return
    owner, place = done.owner, {column: k for k, column in enumerate(columns)}
    there = np.zeros((len(done.clients), len(columns)), bool)
    for client in range(len(done.clients)):
        there[client] = _any(dataset.x, done.training & (owner == client), columns)
    for start, stop in dataset.categories:
        column = dataset.features[start].partition("=")[0]
        words = [dataset.features[k].removeprefix(f"{column}=") for k in range(start, stop)]
        if some := _lonely(there[:, [place[k] for k in range(start, stop)]], words, done.clients):
            yield f"{column!r}: no word in common with any other client: {some}; do they mean the same?"


def _units_apart(dataset: Dataset, done: Split) -> Iterator[str]:
    """Yield a line on each feature whose values at a client are those of others times a factor, in mean and scatter."""
    assert dataset.features is not None
    assert done.clients is not None
    if dataset.x.ndim != 2 or dataset.x.dtype.kind != "f" or len(done.clients) * dataset.x.shape[1] > MOST_CELLS:
        return
    found = moments(dataset, done, by_client=True)
    several = np.flatnonzero(found.rows >= FEWEST_ROWS)
    if len(several) < 2:
        return
    mean, std = found.mean[several], found.std[several]
    usual = np.argsort(mean, axis=0, kind="stable")[(len(mean) - 1) // 2]
    own_mean, own_std = (np.take_along_axis(one, usual[None], axis=0) for one in (mean, std))
    with np.errstate(divide="ignore", invalid="ignore"):  # of indicators and constants, which are none
        factor, scatter = mean / own_mean, std / own_std
        is_far = np.abs(mean - own_mean) > SPREADS * (std + own_std)
        odd = is_far & (np.maximum(factor, 1 / factor) >= FACTOR) & (np.abs(np.log(scatter / factor)) < np.log(ALIKE))
    for column in np.flatnonzero(odd.any(axis=0)).tolist():
        of_each = [usual[column], *np.flatnonzero(odd[:, column])]
        some = [f"{done.clients[several[k]]} ({mean[k, column]:.3g} on average)" for k in of_each]
        yield f"{dataset.features[column]!r}: another unit? {first_of(some, MAX_LISTED)}"


def untrained(dataset: Dataset, done: Split) -> Iterator[str]:
    """Yield lines on classes and levels that only test samples have."""
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
    names = _names(dataset)
    count, labels = len(names), np.asarray(dataset.y)[done.training]
    trained = np.bincount(labels, minlength=count)
    tests = np.empty(0, np.int64)
    if done.held is not None:
        tests = np.asarray(dataset.y)[done.held]
    elif dataset.test_y is not None:
        tests = np.asarray(dataset.test_y)[_tested(done, len(dataset.test_y))]
    unseen = np.flatnonzero((np.bincount(tests, minlength=count) > 0) & (trained == 0))
    if len(unseen):
        yield f"only test samples have classes: {first_of([names[k] for k in unseen.tolist()], MAX_LISTED)}"


def _names(dataset: Dataset) -> list[str]:
    assert dataset.num_classes is not None
    names = dataset.source.get("classes")
    if isinstance(names, list) and len(names) == dataset.num_classes:
        return names
    return [str(k) for k in range(dataset.num_classes)]


def _alone(dataset: Dataset, done: Split) -> Iterator[str]:
    names = _names(dataset)
    count, labels, owner = len(names), np.asarray(dataset.y)[done.training], done.owner[done.training]
    if done.clients is None:
        return
    first, last = np.full(count, done.num_clients), np.full(count, -1)
    np.minimum.at(first, labels, owner)
    np.maximum.at(last, labels, owner)
    alone = [f"{names[k]} ({done.clients[first[k]]})" for k in np.flatnonzero(first == last).tolist()]
    if alone:
        yield f"classes of one client alone: {first_of(alone, MAX_LISTED)}"
    yield from _apart(labels, owner, names, done.clients)


def _apart(labels: np.ndarray, owner: np.ndarray, names: list[str], clients: Sequence[str]) -> Iterator[str]:
    """Yield a line on clients that share no class with the others, though they have several, and may mean the same.

    A class that begins with another's name, as ``m`` and ``male``, counts as its twin where no client has both.
    """
    if len(clients) * len(names) > MOST_CELLS:
        return
    there = np.zeros((len(clients), len(names)), bool)
    there[owner, labels] = True
    if some := _lonely(there, names, clients):
        yield f"no class in common with any other client: {some}; do they mean the same classes?"
        return
    folded = sorted((name.casefold(), k) for k, name in enumerate(names) if any(map(str.isalpha, name)))
    twins = [
        f"{names[one]!r} and {names[other]!r}"
        for (text, one), (longer, other) in pairwise(folded)
        if longer.startswith(text) and not (there[:, one] & there[:, other]).any()
    ]
    if twins:
        yield f"classes of different clients that may be one: {first_of(twins, MAX_LISTED)}"


def _lonely(there: np.ndarray, names: Sequence[str], clients: Sequence[str]) -> str:
    """Return the clients with several of `names`, none of which another client has; "" for none.

    Args:
        there: (clients, names) bool.
    """
    shared = there.sum(axis=0) > 1
    lonely = np.flatnonzero((there.sum(axis=1) > 1) & ~(there & shared).any(axis=1)).tolist()
    if not lonely or there.any(axis=1).sum() < 2:
        return ""
    of_each = {clients[k]: first_of([names[c] for c in np.flatnonzero(there[k]).tolist()], 4) for k in lonely}
    return first_of([f"{client} ({each})" for client, each in of_each.items()], MAX_LISTED)


def _equal(dataset: Dataset, done: Split) -> Iterator[str]:
    """Yield a line on test samples that equal a training sample, and one on training samples of several clients."""
    x, y, training = dataset.x, dataset.y, done.training
    if dataset.task == "next-token" or not training.any() or _chance(x) * len(x) > CHANCE:
        return
    digests = _digests(x, y)
    if done.held is not None:
        tested = digests[done.held]
    elif dataset.test_x is not None and dataset.test_y is not None:
        tested = _digests(dataset.test_x, dataset.test_y)[_tested(done, len(dataset.test_x))]
    else:
        tested = digests[:0]
    trained, owner = digests[training], done.owner[training]
    order = np.lexsort((owner, trained))
    trained, owner = trained[order], owner[order]
    equal, apart = trained[1:] == trained[:-1], owner[1:] != owner[:-1]
    usual = OFTEN * np.count_nonzero(equal & ~apart) / len(trained)
    known, several = (int(each.sum()) for each in (np.isin(tested, trained), equal & apart))
    if known > usual * len(tested):
        yield f"{known:,} of {counted(len(tested), 'test sample')} are training samples, too, with the same x and y"
    if several > usual * len(trained):
        clients = np.unique([owner[:-1][equal & apart], owner[1:][equal & apart]]).tolist()
        names = first_of([f"client {k}" if done.clients is None else done.clients[k] for k in clients], MAX_LISTED)
        yield f"{counted(several, 'training sample')} again at another client, with the same x and y: {names}"


def _chance(x: np.ndarray) -> float:
    """Return the probability that two samples are equal, if their columns were independent, by the samples' values."""
    some = np.asarray(x[:: max(1, len(x) // LOOKED_AT)]).reshape(-1, x[:1].size)
    some = np.unique(some[:, :: max(1, some.shape[1] // LOOKED_AT)], axis=0)
    pairs = max(1, len(some) * (len(some) - 1))
    counts = [np.unique(column, return_counts=True)[1] for column in some.T]
    return float(np.exp(sum(np.log(min(1, (1 + (each * (each - 1)).sum()) / pairs)) for each in counts)))


def _digests(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a number for each sample, (n,) int64: the same for the same bytes of x and y, within one process."""
    found = np.empty(len(x), np.int64)
    block = rows_per_block(x.shape[1:], x.dtype)
    for start in range(0, len(x), block):
        rows, labels = (np.ascontiguousarray(each[start : start + block]) for each in (x, y))
        found[start : start + block] = [
            hash((row.tobytes(), label.tobytes())) for row, label in zip(rows, labels, strict=True)
        ]
    return found


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
