"""`Dataset`: a source's samples in the source's order, with their metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcfed.data.federation import Standardization


@dataclass(frozen=True)
class Dataset:
    """Samples of one source, before they are assigned to clients.

    Attributes:
        name: short name, the default name of the federation.
        task: one of `hpcfed.data.federation.TASKS`.
        x, y: (n, ...) and (n,) or (n, ...): arrays or memory maps in the types to be stored.
        num_classes: labels are 0 … num_classes - 1; None for targets that are numbers.
        test_x, test_y: the test set; None if absent.
        normalization: constants by which the run normalizes x; None for "use x as it is".
        source: provenance, stored as JSON: files with sha256, or the generator with its parameters.
        owner: (n,) int64, the client of each sample if the source comes already split; else None.
        test_owner: (num_test,) int64, likewise for the test set; None for a common one.
        clients: names of the source's clients, each once; None without names.
        rows: (n,) int64, the row of each sample in the source, or (n, 2), file and row; None for 0 … n-1.
        vocabulary: the tokens' meaning, stored as JSON; None without tokens.
        features: names of the p features of x (n, p); None without names.
        indicators: indices of the features that are 0 or 1, from one-hot columns.
        categories: first feature of each one-hot column, and the one after its last.
        fill: statistic of the training rows that replaces NaN in x, ``mean`` or ``median``, in `categories` the most
            frequent level; "" for no NaN.
        filled, test_filled: (n, p) and (num_test, p) uint8, 1 for a cell of x that was missing and has been filled;
            None without any.
        group, test_group: (n,) and (num_test,) int64, the group of each sample, such as its patient; None without.
        statistics: means and deviations (N, C) by which each client's x has been scaled; None if unscaled.
        emptied: clients that have no sample because all their rows were dropped for a missing value → whether a row has
            a label.
        remarks: lines for the user, such as the verdict on checksums.
    """

    name: str
    task: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int | None = None
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    normalization: Standardization | None = None
    source: dict[str, Any] = field(default_factory=dict)
    owner: np.ndarray | None = None
    test_owner: np.ndarray | None = None
    clients: Sequence[str] | None = None
    rows: np.ndarray | None = None
    vocabulary: Any = None
    features: Sequence[str] | None = None
    indicators: tuple[int, ...] = ()
    categories: tuple[tuple[int, int], ...] = ()
    fill: str = ""
    filled: np.ndarray | None = None
    test_filled: np.ndarray | None = None
    group: np.ndarray | None = None
    test_group: np.ndarray | None = None
    statistics: tuple[np.ndarray, np.ndarray] | None = None
    emptied: Mapping[str, bool] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def with_tests(self, tests: np.ndarray) -> Dataset:
        """Return the data set with the samples of a mask, (n,) bool, as test samples of their clients."""
        assert self.owner is not None
        train, rows = ~tests, np.arange(len(tests)) if self.rows is None else self.rows
        x, y, owner, rows = (part[train] for part in (self.x, self.y, self.owner, rows))
        test_x, test_y, test_owner = (part[tests] for part in (self.x, self.y, self.owner))
        return replace(self, x=x, y=y, owner=owner, rows=rows, test_x=test_x, test_y=test_y, test_owner=test_owner)

    def without_samples(self) -> list[str]:
        """Return the names of the source's clients that have no sample."""
        if self.owner is None or self.clients is None:
            return []
        sizes = np.bincount(self.owner, minlength=len(self.clients))
        return [name for name, size in zip(self.clients, sizes.tolist(), strict=True) if not size]


def sha256(*arrays: np.ndarray) -> str:
    """Return the hex digest of the arrays' bytes, for provenance."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
