"""What a source hands over: samples in the source's own order, and what is known about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfed.data.federation import Normalization


@dataclass(frozen=True)
class Dataset:
    """Samples of one source, before they are given to clients.

    Attributes:
        name: short name, the default name of the federation.
        task: ``classification``, ``regression`` or ``next-token``.
        x, y: (n, ...) and (n,) or (n, ...): arrays or memory maps in the types to be stored.
        num_classes: labels are 0 … num_classes - 1; None for regression.
        test_x, test_y: the common test set; None where there is none.
        normalization: what the run subtracts and divides by; None for "use x as it is".
        source: provenance, stored as JSON: files with sha256, or the generator with its parameters.
        owner: (n,) int64, the client of each sample where the source comes already split; None elsewhere.
        test_owner: (num_test,) int64, likewise for the test set where it comes split; None for a common one.
        clients: names of the source's clients, each once; None where they have none.
        rows: (n,) int64, the row of each sample in the source, or (n, 2), file and row; None for 0 … n-1.
        vocabulary: what tokens stand for, stored as JSON; None where there are none.
        features: names of the p features of x (n, p); None where they have none.
        indicators: numbers of the features that are 0 or 1 by a one-hot column.
        fill: how NaN in x is filled from training rows once they are known, ``mean`` or ``median``; "" for no NaN.
        statistics: means and deviations (N, C) by which each client's x has been scaled; None where it has not been.
        remarks: lines for the person who prepares the data, such as the verdict on checksums.
    """

    name: str
    task: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int | None = None
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    normalization: Normalization | None = None
    source: dict[str, Any] = field(default_factory=dict)
    owner: np.ndarray | None = None
    test_owner: np.ndarray | None = None
    clients: Sequence[str] | None = None
    rows: np.ndarray | None = None
    vocabulary: Any = None
    features: Sequence[str] | None = None
    indicators: tuple[int, ...] = ()
    fill: str = ""
    statistics: tuple[np.ndarray, np.ndarray] | None = None
    remarks: tuple[str, ...] = ()


def sha256(*arrays: np.ndarray) -> str:
    """Return the hex digest of the arrays' bytes, for provenance."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
