"""Sources that come as two halves, one for training and one for testing, each by client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from hpcfed.data.federation import Standardization


@dataclass
class Half:
    """The samples of one half: x and y (n, …), the client of each, and the clients' names."""

    x: np.ndarray
    y: np.ndarray
    owner: np.ndarray
    clients: tuple[str, ...]


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return labels or clients, concatenated; int64 also where there are none."""
    return np.concatenate([np.empty(0, np.int64), *arrays])


def of_halves(
    name: str,
    train: Half,
    test: Half,
    num_classes: int,
    source: dict[str, Any],
    remarks: tuple[str, ...],
    *,
    of_others: str = "",
    vocabulary: str | None = None,
    normalization: Standardization | None = None,
) -> Dataset:
    """Return the data set: test samples keep their clients if all of these are training clients too.

    Else they are a common set, of which `of_others` is a remark. With a vocabulary the samples are tokens.
    """
    numbers = {client: number for number, client in enumerate(train.clients)}
    has_tests = bool(len(test.y))
    shared = has_tests and numbers.keys() >= set(test.clients)
    if of_others and has_tests and not shared:
        remarks += (of_others,)
    return Dataset(
        name=name,
        task="next-token" if vocabulary else "classification",
        x=train.x,
        y=train.y,
        num_classes=num_classes,
        test_x=test.x if has_tests else None,
        test_y=test.y if has_tests else None,
        normalization=normalization,
        source=source,
        owner=train.owner,
        test_owner=np.array([numbers[client] for client in test.clients])[test.owner] if shared else None,
        clients=train.clients,
        vocabulary=vocabulary,
        remarks=remarks,
    )
