"""All samples of a federation's sites, training and test samples together, before any scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.federation import categories_of
from data_prep.spool import Spool
from data_prep.tables.missing import MEAN, MEDIAN
from data_prep.tables.standardize import CLIENT, NONE, POOLED
from hpcfed.data.content import rows_per_block
from hpcfed.data.federation import Federation, Standardization
from hpcfed.data.sites import class_names
from hpcfed.errors import InputError
from hpcfed.lab.study.splits import Divisible

MOST_SITES = 50
"""Most sites of a study: each trains a model alone, and has a column in the tables."""


@dataclass(frozen=True)
class SiteSamples:
    """The samples of N sites.

    Attributes:
        dataset: all n samples: first the file's training samples, then the clients' test samples.
        content: hash of the federation file's data.
        label: (n,) int64, each sample's label (survival: 1 for an event, else 0); None if samples have no label, or
            several.
        labels: names of the labels.
        scale: how the file is standardized: ``client``, ``pooled`` or ``none``; the samples here are not.
        group: (n,) int64, the group of each sample, such as its patient; None without groups.
        grouped_by: the name of the groups' column.
        remarks: lines for the user.
    """

    dataset: Dataset
    content: str
    label: np.ndarray | None
    labels: tuple[str, ...]
    scale: str
    remarks: tuple[str, ...]
    group: np.ndarray | None = None
    grouped_by: str = "group"

    @property
    def sites(self) -> list[str]:
        """The names of the sites, (N,)."""
        return list(self.dataset.clients or ())

    @property
    def owner(self) -> np.ndarray:
        """(n,) int64, the site of each sample."""
        assert self.dataset.owner is not None
        return self.dataset.owner

    @property
    def divisible(self) -> Divisible:
        """The sites, labels and groups of the samples, by which they are split."""
        return Divisible(self.owner, self.label, self.sites, self.labels, self.group)


def read_samples(path: Path) -> SiteSamples:
    """Read a federation file's samples into temporary files.

    Cells that were missing are NaN again; each split fills them anew. A common test set is left out, and so are clients
    without samples. Standardization by each site's training samples is undone; so is that of x (n, p) by one constant
    per feature, which is taken to be by all sites' training samples. Other constants, such as those published for
    images, are kept.

    Raises:
        InputError: the file is not a federation, its task is ``next-token``, or too few or too many clients have
            samples.
    """
    with Federation.open(path) as federation:
        if federation.task == "next-token":
            raise InputError("a study", where=str(path), expected="samples of their own", got="a task of next tokens")
        owner, offsets = _owners(federation), federation.test_offsets
        is_site = np.bincount(owner, minlength=federation.num_clients) > 0
        if not 2 <= (count := int(is_site.sum())) <= MOST_SITES:
            expected = f"2 to {MOST_SITES} sites with samples"
            raise InputError("a study", where=str(path), expected=expected, got=f"{count:,}")
        names = federation.client_names()
        remarks = [f"{names[k]}: no samples, left out" for k in np.flatnonzero(~is_site).tolist()]
        if offsets is None and federation.num_test:
            remarks.append(f"the common test set ({federation.num_test:,} samples) is no site's, and left out")
        filled, group = (_of_all(read, offsets is not None) for read in (federation.filled, federation.groups))
        if filled is None and federation.source.get("filled"):
            remarks.append(
                "filled cells are those of the file, from all its training rows: prepare it again to mark them"
            )
        scale, normalization = _scale(federation)
        x, y = _copied(federation, owner, filled, scale)
        anew = {"standardized"} if filled is None else {"standardized", "filled"}
        source = {key: value for key, value in federation.source.items() if key not in anew}
        categories = _categories(federation)
        dataset = Dataset(
            name=federation.name,
            task=federation.task,
            x=x,
            y=y,
            num_classes=federation.num_classes,
            normalization=normalization,
            source=source,
            owner=(np.cumsum(is_site) - 1)[owner],
            clients=[name for name, kept in zip(names, is_site, strict=True) if kept],
            features=federation.features,
            indicators=tuple(k for start, stop in categories for k in range(start, stop)),
            categories=categories,
            fill="" if filled is None else _way(federation.source),
            group=group,
        )
        label, labels = _labels(federation, dataset.y), tuple(class_names(federation))
        by = str(federation.source.get("group", "group"))
        return SiteSamples(dataset, federation.content, label, labels, scale, tuple(remarks), group, by)


def _owners(federation: Federation) -> np.ndarray:
    """Return the client of each sample, (n,): of the training samples, then of the clients' test samples, if any."""
    clients, offsets = np.arange(federation.num_clients), federation.test_offsets
    owner = np.repeat(clients, federation.sizes)
    return owner if offsets is None else np.concatenate([owner, np.repeat(clients, np.diff(offsets))])


def _copied(
    federation: Federation, owner: np.ndarray, filled: np.ndarray | None, scale: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, …), unscaled and with NaN in filled cells, and y (n, …), memory-mapped from temporary files."""
    dtype = np.float32 if federation.x_dtype == np.float16 else federation.x_dtype
    x, y = Spool(federation.feature_shape, dtype), Spool(federation.target_shape, federation.y_dtype)
    for part, target, place in _blocks(federation, federation.test_offsets is not None):
        values = _unscaled(part, owner[place], federation) if scale == CLIENT else part
        x.append(values if filled is None else np.where(filled[place] != 0, np.nan, values))
        y.append(target)
    return x.finish(), y.finish()


def _of_all(read: Callable[[str], np.ndarray | None], has_tests: bool) -> np.ndarray | None:
    """Return an array with a row per sample, (n, …), of training, then test samples; None if the file lacks a part.

    `read` returns the array of one part, ``train`` or ``test``, or None.
    """
    found = [read(part) for part in (("train", "test") if has_tests else ("train",))]
    parts = [part for part in found if part is not None]
    return np.concatenate(parts) if len(parts) == len(found) else None


def _way(source: Mapping[str, Any]) -> str:
    """Return the statistic that fills missing numbers in the file: `MEAN` or `MEDIAN`."""
    filled = source.get("filled")
    return MEDIAN if isinstance(filled, dict) and MEDIAN in filled else MEAN


def _scale(federation: Federation) -> tuple[str, Standardization | None]:
    """Return how the file is scaled, ``client``, ``pooled`` or ``none``, and the constants to keep, if any."""
    constants = federation.normalization
    if federation.statistics is not None:
        return CLIENT, None
    if constants is not None and len(federation.feature_shape) == 1 and len(constants.mean) > 1:
        return POOLED, None
    return NONE, constants


def _blocks(federation: Federation, has_tests: bool) -> Iterator[tuple[np.ndarray, np.ndarray, slice]]:
    """Yield blocks of x and y with their positions among all samples: training samples first, then test samples."""
    size = rows_per_block(federation.feature_shape, federation.x_dtype)
    train_x, train_y = federation.train()
    for start in range(0, federation.num_samples, size):
        stop = min(start + size, federation.num_samples)
        yield train_x[start:stop], train_y[start:stop], slice(start, stop)
    for start in range(0, federation.num_test if has_tests else 0, size):
        stop = min(start + size, federation.num_test)
        place = slice(federation.num_samples + start, federation.num_samples + stop)
        yield *federation.test(start, stop), place


def _unscaled(x: np.ndarray, owner: np.ndarray, federation: Federation) -> np.ndarray:
    """Return x (n, …), float64, as it was before each site was scaled by its own training samples."""
    assert federation.statistics is not None
    trailing = (1,) * (x.ndim - 2)
    mean, std = (part[owner].reshape(len(x), -1, *trailing) for part in federation.statistics)
    return x.astype(np.float64) * std + mean


def _categories(federation: Federation) -> tuple[tuple[int, int], ...]:
    """Return, for each categorical column in one-hot coding, the range (start, stop) of its features."""
    names, found = list(federation.features or ()), []
    for column, levels in categories_of(federation.source):
        hot = [f"{column}={level}" for level in levels]
        start = names.index(hot[0]) if hot and hot[0] in names else -1
        if start >= 0 and names[start : start + len(hot)] == hot:
            found.append((start, start + len(hot)))
    return tuple(found)


def _labels(federation: Federation, y: np.ndarray) -> np.ndarray | None:
    """Return each sample's label, (n,): its class, or 1 if it had an event, else 0; None for other kinds of targets."""
    if federation.task == "classification":
        return y.astype(np.int64)
    if federation.task == "survival" or (federation.task == "multi-label" and federation.num_classes == 1):
        return y[:, 0].astype(np.int64)
    return None
