"""Missing cells: counted by column, and refused, dropped with their rows, or filled after the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_prep.dataset import Dataset
from data_prep.split import Split
from data_prep.spool import Spool
from data_prep.tables.columns import ColumnOptions, ColumnRoles
from data_prep.tables.survey import Survey
from hpcfed.data.content import rows_per_block
from hpcfed.data.federation import OF_NUMBERS
from hpcfed.errors import InputError, counted, did_you_mean, first_of

REFUSE, DROP, MEAN, MEDIAN = WAYS = ("refuse", "drop", "mean", "median")
MOST_BYTES = 64 << 20
MAX_LISTED = 8


def check_way(missing: str) -> None:
    """Refuse an unknown treatment of missing values.

    Raises:
        InputError: naming the nearest.
    """
    if missing not in WAYS:
        raise InputError(
            f"--missing {missing!r}", expected="refuse, drop, mean or median", remedy=did_you_mean(missing, WAYS)
        )


def counts(found: Survey, roles: ColumnRoles, features: Sequence[str]) -> dict[str, int]:
    """Return column → number of missing cells, for the used columns that have any."""
    names = [name for name in (roles.client, roles.group) if name is not None]
    used = dict.fromkeys((*features, *roles.targets, *names))
    return {name: found.facts[name].missing for name in used if found.facts[name].missing}


def refuse(found: Survey, missing: dict[str, int], options: ColumnOptions) -> None:
    """Refuse missing cells unless the user chose to drop or fill them.

    Raises:
        InputError: naming the first missing cell, and their number in each column.
    """
    if options.missing == REFUSE and missing:
        name = next(iter(missing))
        remedy = "choose what to do by --missing drop, mean or median"
        what = f"no value in column {name!r}; {described(found, missing)}"
        raise InputError(what, where=found.facts[name].absent, remedy=remedy)


def described(found: Survey, missing: dict[str, int]) -> str:
    """Return the numbers of missing cells by column, of training rows and of test rows, as text."""
    if not found.test_rows:
        return f"missing values: {listed(missing)} in {counted(found.rows, 'row')}"
    tests = {name: found.facts[name].missing_test for name in missing}
    training = {name: count - tests[name] for name, count in missing.items()}
    rows, test_rows = counted(found.rows - found.test_rows, "training row"), counted(found.test_rows, "test row")
    return f"missing values: {_some(training)} in {rows}; {_some(tests)} in {test_rows}"


def _some(numbers: dict[str, int]) -> str:
    return listed({name: count for name, count in numbers.items() if count}) or "none"


def listed(numbers: dict[str, int]) -> str:
    """Return the first few names with their counts, as text."""
    return first_of([f"{name} {count:,}" for name, count in numbers.items()], MAX_LISTED)


def refuse_emptied(dataset: Dataset, clients: Sequence[str] | None) -> None:
    """Refuse a client whose rows were all dropped, unless it is not among the federation's `clients`.

    Raises:
        InputError: naming the client.
    """
    for name, labelled in dataset.emptied.items():
        if name in (clients or ()):
            label = "target" if dataset.task in OF_NUMBERS else "label"
            lack = "every row lacks a value" if labelled else f"no row has a {label}"
            lack += "" if labelled or dataset.group is None else " and a group"
            fill = ", or fill by --missing mean or median" if labelled and dataset.x.ndim == 2 else ""
            remedy = f"leave it out by --min-samples 1{fill}"
            raise InputError(f"client {name!r}: {lack}", got="no row to train on", remedy=remedy)


def fill(dataset: Dataset, training: np.ndarray) -> Dataset:
    """Return the data set with NaN in x (n, p) replaced by the mean or median of the feature's training rows.

    A missing cell of a one-hot column becomes the column's most frequent level in the training rows.

    Args:
        dataset: its `fill` names the statistic; returned unchanged if that is empty.
        training: (n,) bool, the rows that clients train on.

    Raises:
        InputError: a feature has no value in any training row, or a client has only missing values.
    """
    if not dataset.fill:
        return dataset
    _refuse_empty(dataset)
    rows = np.flatnonzero(training)
    values = _typical(dataset.x, rows, dataset.fill)
    for start, end in dataset.categories:
        shares = _typical(dataset.x[:, start:end], rows, MEAN)
        values[start:end] = np.where(np.isnan(shares), np.nan, np.arange(end - start) == shares.argmax())
    if np.isnan(values).any():
        k = int(np.isnan(values).argmax())
        name = str(k) if dataset.features is None else dataset.features[k]
        raise InputError(f"column {name!r} has no value in any training row", remedy="leave it out")
    used = np.zeros(len(values), bool)
    x, filled = _filled(dataset.x, values, used)
    test_x, test_filled = (None, None) if dataset.test_x is None else _filled(dataset.test_x, values, used)
    names = dataset.features or [str(k) for k in range(len(values))]
    if not used.any():
        return replace(dataset, fill="")
    levels = [names[k] for start, end in dataset.categories for k in range(start, end) if used[k] and values[k]]
    for start, end in dataset.categories:
        used[start:end] = False
    numbers = {names[k]: float(values[k]) for k in np.flatnonzero(used).tolist()}
    record = {**({dataset.fill: numbers} if numbers else {}), **({"most frequent": levels} if levels else {})}
    source = {**dataset.source, "filled": record}
    remark = f"filled by the most frequent level of the training rows: {', '.join(levels)}"
    remarks = (*dataset.remarks, remark) if levels else dataset.remarks
    return replace(
        dataset, x=x, test_x=test_x, filled=filled, test_filled=test_filled, fill="", source=source, remarks=remarks
    )


def unmeasured(dataset: Dataset, done: Split) -> str:
    """Return a line on the columns of which a client has no value to train on, but others' alone; "" for none."""
    if dataset.filled is None:
        return ""
    rows = np.flatnonzero(done.training)
    rows = rows[np.argsort(done.owner[rows], kind="stable")]
    measured = np.zeros((done.num_clients, dataset.filled.shape[1]), bool)
    block = rows_per_block(dataset.filled.shape[1:], dataset.filled.dtype)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        owner = done.owner[part]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        measured[owner[starts]] |= np.logical_or.reduceat(dataset.filled[part] == 0, starts, axis=0)
    measured[np.bincount(done.owner[rows], minlength=done.num_clients) == 0] = True
    columns = dict(enumerate(dataset.features or map(str, range(dataset.filled.shape[1]))))
    one_hot = dataset.source["categories"] if dataset.categories else ()
    for column, (start, end) in zip(one_hot, dataset.categories, strict=True):
        columns = {k: column if k == start else name for k, name in columns.items() if not start < k < end}
    names = [str(k) for k in range(done.num_clients)] if done.clients is None else done.clients
    without = {k: [names[client] for client in np.flatnonzero(~measured[:, k]).tolist()] for k in columns}
    lacking = [
        f"{columns[k]}: no value at {first_of(clients, MAX_LISTED)}" for k, clients in without.items() if clients
    ]
    more = f"; and {len(lacking) - MAX_LISTED:,} more columns" if len(lacking) > MAX_LISTED else ""
    return f"{'; '.join(lacking[:MAX_LISTED])}{more}; filled by other clients' values" if lacking else ""


def _refuse_empty(dataset: Dataset) -> None:
    """Refuse a client all of whose values are missing: what would fill them are other clients' data."""
    if dataset.owner is None:
        return
    block = rows_per_block(dataset.x.shape[1:], dataset.x.dtype)
    starts = range(0, len(dataset.x), block)
    known = np.concatenate([~np.isnan(dataset.x[start : start + block]).all(axis=1) for start in starts])
    sizes, whole = np.bincount(dataset.owner), np.bincount(dataset.owner[known], minlength=dataset.owner.max() + 1)
    empty = np.flatnonzero((sizes > 0) & (whole == 0))
    if len(empty):
        k = int(empty[0])
        name = str(k) if dataset.clients is None else dataset.clients[k]
        raise InputError(
            f"client {name!r} has only missing values", got=counted(sizes[k], "row"), remedy="leave it out"
        )


def _typical(x: np.ndarray, rows: np.ndarray, how: str) -> np.ndarray:
    """Return each feature's mean or median over `rows` without NaN, (p,) float64; NaN if no row has a value."""
    typical = np.full(x.shape[1], np.nan)
    width = max(1, MOST_BYTES // (8 * max(1, len(rows))))
    for start in range(0, x.shape[1], width):
        part = x[rows, start : start + width].astype(np.float64)
        known = ~np.isnan(part).all(axis=0)
        statistic = np.nanmean if how == MEAN else np.nanmedian
        typical[start : start + width][known] = statistic(part[:, known], axis=0)
    return typical


def _filled(x: np.ndarray, values: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x with NaN replaced by `values` (p,), and where; mark in `used` (p,) those that were needed."""
    spool, mask = Spool(x.shape[1:], x.dtype), Spool(x.shape[1:], np.uint8)
    block = rows_per_block(x.shape[1:], x.dtype)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        absent = np.isnan(part)
        used |= absent.any(axis=0)
        spool.append(np.where(absent, values, part).astype(x.dtype))
        mask.append(absent)
    return spool.finish(), mask.finish()
