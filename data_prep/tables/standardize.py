"""Standardization of features by means and standard deviations of training rows alone, of all clients or of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from data_prep.dataset import Dataset
from data_prep.split import Split
from data_prep.spool import Spool, as_unit
from hpcfed.data.content import rows_per_block
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError, did_you_mean, first_of

CLIENT, POOLED, NONE = WAYS = ("client", "pooled", "none")
FEWEST = 2
"""Training rows a client needs for its own statistics; with fewer it takes those of all clients."""
FAR, WIDE, NARROW = 2.0, 5.0, 0.05
"""A feature looks unscaled where its mean is farther from 0, or its deviation wider or narrower, than these."""
MAX_LISTED = 6


@dataclass(frozen=True)
class Moments:
    """Means and standard deviations over axis 1 of x, (groups, C) float64, of `rows` (groups,) training rows each.

    A deviation is 0 if all rows have one value.
    """

    mean: np.ndarray
    std: np.ndarray
    rows: np.ndarray


def check_way(how: str) -> None:
    """Refuse an unknown way to standardize.

    Raises:
        InputError: naming the nearest.
    """
    if how not in WAYS:
        raise InputError(f"--standardize {how!r}", expected="client, pooled or none", remedy=did_you_mean(how, WAYS))


def check_standardize(dataset: Dataset, how: str) -> None:
    """Check that `standardize` can scale the data set's features.

    Raises:
        InputError: an unknown `how`, tokens, or data that already have normalization constants.
    """
    check_way(how)
    if how == NONE:
        return
    if dataset.task == "next-token":
        raise InputError("--standardize has no effect with tokens", remedy="leave it out")
    if dataset.source.get("standardized"):
        raise InputError(f"{dataset.name} is standardized already", remedy="prepare it from its raw files")
    if dataset.normalization is not None:
        what = f"{dataset.name} is normalized by constants of its own"
        raise InputError(what, remedy="leave --standardize out, or use none")


def standardize(dataset: Dataset, done: Split, how: str) -> Dataset:
    """Return the data set with features of mean 0 and deviation 1 over the training rows, of all clients or of each.

    ``pooled`` leaves x unchanged and stores the statistics, which a run applies. ``client`` scales x here: a client's
    rows, its test rows included, by its own statistics, and a common test set by those of all clients. A feature that
    is constant at a client is divided by the deviation over all clients; one-hot features are unchanged.

    Raises:
        InputError: see `check_standardize`.
    """
    check_standardize(dataset, how)
    if how == NONE:
        return dataset
    pooled = moments(dataset, done, by_client=False)
    pooled.std[pooled.std == 0] = 1.0
    if how == POOLED:
        scale = Standardization(tuple(pooled.mean[0].tolist()), tuple(pooled.std[0].tolist()))
        return replace(dataset, normalization=scale)
    own = moments(dataset, done, by_client=True)
    few = own.rows < FEWEST
    own.mean[few], own.std[few] = pooled.mean[0], pooled.std[0]
    np.copyto(own.std, pooled.std, where=own.std == 0)
    x = _scaled(dataset.x, done.owner, own)
    test_x, test_owner = dataset.test_x, done.test_owner
    if test_x is not None and done.held is None:
        test_x = _scaled(test_x, test_owner, pooled if test_owner is None else own)
    names = [str(k) for k in range(done.num_clients)] if done.clients is None else done.clients
    short = [names[k] for k in np.flatnonzero(few & (own.rows > 0)).tolist()]
    remarks = []
    if short:
        remarks.append(f"scaled as all clients are, for want of training rows: {first_of(short, MAX_LISTED)}")
    if test_x is not None and done.held is None and test_owner is None:
        remarks.append("the common test set is scaled by the statistics of all clients' training rows")
    return replace(
        dataset,
        x=x,
        test_x=test_x,
        source={**dataset.source, "standardized": "each client by its own training rows: /train/mean, /train/std"},
        statistics=(own.mean, own.std),
        remarks=(*dataset.remarks, *remarks),
    )


def unscaled(dataset: Dataset, done: Split) -> str:
    """Return a line on the features, or channels, that look unscaled, with mean and deviation; "" if none does."""
    if dataset.normalization or dataset.task == "next-token" or dataset.x.dtype.kind != "f":
        return ""
    all_rows = moments(dataset, done, by_client=False)
    mean, std = all_rows.mean[0], all_rows.std[0]
    odd = (np.abs(mean) > FAR) | (std > WIDE) | (std < NARROW)
    odd[list(dataset.indicators)] = False
    what = "feature" if dataset.x.ndim == 2 else "channel"
    names = dataset.features or [f"{what} {k}" for k in range(len(mean))]
    found = [f"{names[k]} ({mean[k]:.3g} ± {std[k]:.3g})" for k in np.flatnonzero(odd).tolist()]
    if not found:
        return ""
    return f"not scaled: {first_of(found, MAX_LISTED)}; scale by --standardize pooled or client, or say none"


def range_of(dataset: Dataset) -> str:
    """Return a line on the least and the largest number of x as it is written, and on what runs make of bytes."""
    parts = [part for part in (dataset.x, dataset.test_x) if part is not None and part.size]
    low, high = min(part.min() for part in parts), max(part.max() for part in parts)
    divided = ", which runs divide by 255" if dataset.x.dtype == np.uint8 else ""
    return f"x in the file: from {low:,.6g} to {high:,.6g}{divided}"


def moments(dataset: Dataset, done: Split, *, by_client: bool) -> Moments:
    """Return means and deviations of training rows, of each client (N, C) or of all (1, C)."""
    rows = np.flatnonzero(done.training)
    group = done.owner[rows] if by_client else np.zeros(len(rows), np.int64)
    if by_client:
        order = np.argsort(group, kind="stable")
        rows, group = rows[order], group[order]
    groups = done.num_clients if by_client else 1
    counts = np.bincount(group, minlength=groups)
    channels = dataset.x.shape[1] if dataset.x.ndim > 1 else 1
    weight = np.maximum(counts, 1)[:, None]
    mean = np.zeros((groups, channels))
    for where, x in _blocks(dataset.x, rows):
        _add(mean, group[where], x.mean(axis=2))
    mean /= weight
    square = np.zeros_like(mean)
    for where, x in _blocks(dataset.x, rows):
        _add(square, group[where], ((x - mean[group[where]][:, :, None]) ** 2).mean(axis=2))
    std = np.sqrt(square / weight)
    std[std <= 1e-7 * np.abs(mean)] = 0.0  # constant but for rounding
    mean[:, list(dataset.indicators)], std[:, list(dataset.indicators)] = 0.0, 1.0
    return Moments(mean, std, counts)


def _add(total: np.ndarray, group: np.ndarray, values: np.ndarray) -> None:
    """Add values (m, C) to the totals (groups, C) of their groups (m,), which are sorted."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    total[group[starts]] += np.add.reduceat(values, starts, axis=0)


def _blocks(x: np.ndarray, rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield `rows` of x as (m, C, rest) float64, a block at a time; uint8 is scaled to [0, 1]."""
    size = rows_per_block(x.shape[1:], np.dtype(np.float64))
    for start in range(0, len(rows), size):
        where = slice(start, start + size)
        block = x[rows[where]]
        block = as_unit(block) if block.dtype == np.uint8 else block
        yield where, block.reshape(len(block), x.shape[1] if x.ndim > 1 else 1, -1).astype(np.float64)


def _scaled(x: np.ndarray, owner: np.ndarray | None, by: Moments) -> np.ndarray:
    """Return x scaled by its owners' statistics, or without owners by the only ones; uint8 becomes float32."""
    spool = Spool(x.shape[1:], x.dtype if x.dtype.kind == "f" else np.float32)
    for where, block in _blocks(x, np.arange(len(x))):
        group = np.zeros(len(block), np.int64) if owner is None else np.maximum(owner[where], 0)
        block = (block - by.mean[group][:, :, None]) / by.std[group][:, :, None]
        spool.append(block.astype(spool.dtype))
    return spool.finish()
