"""Sites by name: sizes and label shares of a federation of few clients, absent classes, and shifts of features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.data.federation import OF_NUMBERS, Federation
from hpcfed.errors import first_of

MOST_SITES, MOST_LABELS, MOST_TARGETS = 30, 10, 4
"""Most clients, labels and numbers of a target that are listed one by one."""
LARGE = 0.8
"""A standardised mean difference from which a shift is large: Cohen, "Statistical power analysis", 1988."""
NAMED = 6


@dataclass(frozen=True)
class Labels:
    """Samples by label: `counts` (N, K) of training samples, by client and name."""

    names: list[str]
    counts: np.ndarray


def labels_of(federation: Federation) -> Labels | None:
    """Return the labels of targets with one label a sample, events and censored times included; None for others."""
    column = {"classification": None, "multi-label": 0, "survival": 0}
    if federation.task not in column or (federation.task == "multi-label" and federation.num_classes != 1):
        return None
    classes = 2 if federation.task != "classification" else federation.num_classes or 0
    place = column[federation.task]
    targets = (federation.client(k)[1] for k in range(federation.num_clients))
    each = (y if place is None else y[:, place].astype(np.int64) for y in targets)
    return Labels(class_names(federation), np.stack([np.bincount(y, minlength=classes) for y in each]))


def target_statistics(federation: Federation) -> dict[str, list[str]]:
    """Return statistic → its value over all training samples, then over each client's, as text.

    Of regressions mean and standard deviation of each target, of survival the median time, censored ones included; {}
    for other tasks, and for targets of many numbers. Values by client are left out where clients are many.
    """
    shape = federation.target_shape
    if federation.task not in OF_NUMBERS or len(shape) > 1 or not 0 < math.prod(shape) <= MOST_TARGETS:
        return {}
    listed = range(federation.num_clients if federation.num_clients <= MOST_SITES else 0)
    parts = [federation.train()[1], *(federation.client(k)[1] for k in listed)]
    columns = [part.astype(np.float64).reshape(len(part), -1) for part in parts]
    if federation.task == "survival":
        return {"median observed time": [f"{np.median(y[:, 1]):.4g}" if len(y) else "–" for y in columns]}
    said, width = str(federation.source.get("target", "")), columns[0].shape[1]
    names = [said or "y"] if width == 1 else said.split(", ")
    names = names if len(names) == width else [f"y[{k}]" for k in range(width)]
    return {
        f"{name}, mean ± std": [f"{y[:, k].mean():.4g} ± {y[:, k].std():.3g}" if len(y) else "–" for y in columns]
        for k, name in enumerate(names)
    }


def class_names(federation: Federation) -> list[str]:
    """Return the names of the labels, their numbers where the file has none."""
    if federation.task == "survival":
        return ["censored", "event"]
    count = 2 if federation.task == "multi-label" and federation.num_classes == 1 else federation.num_classes or 0
    names = federation.source.get("classes")
    if isinstance(names, list) and len(names) == count and all(isinstance(name, str) for name in names):
        return [" ".join(name.split()) for name in names]
    return [str(k) for k in range(count)]


def site_names(federation: Federation) -> list[str]:
    """Return the clients' names, (N,), in one line each; their numbers where a file has none of its own."""
    names = [" ".join(name.split()) for name in federation.client_names()]
    digits = len(str(federation.num_clients - 1))
    given = [f"client-{k:0{digits}}" for k in range(federation.num_clients)]
    return [str(k) for k in range(federation.num_clients)] if names == given else names


def first_named(federation: Federation, which: np.ndarray, most: int) -> str:
    """Return the first few names of the clients in the mask `which`, (N,) bool; "" for none."""
    found = np.flatnonzero(which)
    return first_of([federation.client_name(k) for k in found[:most].tolist()], most, len(found))


def absences(federation: Federation, labels: Labels) -> Iterator[str]:
    """Yield a line for each label that clients with samples lack."""
    names, filled = site_names(federation), np.flatnonzero(labels.counts.sum(axis=1))
    if federation.num_clients > MOST_SITES or len(labels.names) > MOST_LABELS:
        lacking = int((labels.counts[filled] == 0).any(axis=1).sum())
        if lacking:
            yield f"{lacking:,} of {len(filled):,} clients lack training samples of some label"
        return
    for label, name in enumerate(labels.names):
        without = [names[k] for k in filled if not labels.counts[k, label]]
        if len(without) == len(filled):
            yield f"no client has a training sample of {name}"
        elif without:
            yield f"no training sample of {name}: {first_of(without, NAMED)}"


def mean_differences(federation: Federation) -> np.ndarray | None:
    """Return each client's standardised mean difference of each feature from all others, (N, p); nan without samples.

    (mean of the client − mean of the others) / √((variance + variance of the others) / 2), over training samples, in
    the units before the file scaled each client by itself; 0 where both are constant and equal, inf where they differ.
    Cells that were missing and have been filled are left out; nan where the client, or all others, have no other cell.
    Reference: Austin, "Balance diagnostics for comparing the distribution of baseline covariates", 2009, section 3.

    None for samples that are no vectors of numbers.
    """
    if len(federation.feature_shape) != 1 or federation.task == "next-token":
        return None
    statistics, filled = federation.statistics, federation.filled("train")
    sums = np.zeros((3, federation.num_clients, federation.feature_shape[0]))
    for k in range(federation.num_clients):
        x = federation.client(k)[0].astype(np.float64)
        if statistics is not None:
            x = x * statistics[1][k] + statistics[0][k]
        there = (
            np.ones(x.shape, bool) if filled is None else filled[federation.offsets[k] : federation.offsets[k + 1]] == 0
        )
        number = there.sum(axis=0)
        mean = x.sum(axis=0, where=there) / np.maximum(number, 1)
        sums[:, k] = number, mean, ((x - mean) ** 2).sum(axis=0, where=there)
    count, mean, square = sums
    with np.errstate(all="ignore"):
        others = np.array([_merged(*np.delete(sums, k, axis=1)) for k in range(federation.num_clients)])
        spread = np.sqrt((square / count + others[:, 1]) / 2)
        gap = mean - others[:, 0]
        found = np.where(np.abs(gap) <= 1e-6 * np.abs(mean), 0.0, gap / spread)
    return np.where(count > 0, found, np.nan)


def missing_shares(federation: Federation) -> dict[str, np.ndarray]:
    """Return column → share of each client's training samples in which it was missing and has been filled, (N,).

    Columns without a missing cell are left out.
    """
    filled = federation.filled("train")
    if filled is None or len(federation.feature_shape) != 1:
        return {}
    parts = np.split(filled, federation.offsets[1:-1])
    shares = np.array([part.sum(axis=0) / max(len(part), 1) for part in parts])
    categories = federation.source.get("categories")
    one_hot = categories.items() if isinstance(categories, dict) else ()
    column_of = {f"{c}={level}": c for c, levels in one_hot if isinstance(levels, list) for level in levels}
    columns = [column_of.get(name, name) for name in feature_names(federation)]
    return {column: shares[:, k] for k, column in enumerate(columns) if shares[:, k].any()}


def _merged(count: np.ndarray, mean: np.ndarray, square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of several groups together, (p,) each, from their counts, means and squares (G, p)."""
    total = count.sum(axis=0)
    joint = (count * mean).sum(axis=0) / total
    return joint, (square + count * (mean - joint) ** 2).sum(axis=0) / total


def feature_names(federation: Federation) -> Sequence[str]:
    """Return the names of the features, (p,); their numbers where the file has none."""
    return federation.features or [str(k) for k in range(federation.feature_shape[0])]
