"""Parts that documents of several commands have: a federation's facts, means over runs, estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpcfed.data.federation import Federation
    from hpcfed.lab.report.measure import Spread
    from hpcfed.lab.report.paired import MeanEstimate


@dataclass(frozen=True)
class ClientSizes:
    """Training samples of a client."""

    min: int
    """Of the smallest client."""
    median: float
    """Over all clients."""
    max: int
    """Of the largest client."""


@dataclass(frozen=True)
class ArrayFacts:
    """One sample's array."""

    dtype: str
    """Type of its numbers, as NumPy names it."""
    shape: list[int]
    """Of one sample; [] for a single number."""


@dataclass(frozen=True)
class FederationFacts:
    """A federation file."""

    file: str
    """Path of the file."""
    name: str
    """Name of the federation."""
    task: str
    """classification, multi-label, regression, survival or next-token."""
    content: str | None
    """Hash of the data, null where the file records none."""
    num_clients: int
    """Clients, N."""
    num_samples: int
    """Training samples of all clients."""
    num_test: int
    """Test samples, 0 without a test set."""
    num_classes: int | None
    """Classes, labels or tokens; null where targets are numbers."""
    sizes: ClientSizes
    """Training samples of a client."""
    x: ArrayFacts
    """Features of a sample."""
    y: ArrayFacts
    """Target of a sample."""
    partition: dict[str, Any]
    """How samples went to clients: scheme, parameters, seed."""
    source: dict[str, Any]
    """Files and settings that the data were prepared from."""


def federation_facts(federation: Federation) -> FederationFacts:
    """Return the facts of an open federation file."""
    sizes = federation.sizes
    return FederationFacts(
        file=str(federation.path),
        name=federation.name,
        task=federation.task,
        content=federation.content or None,
        num_clients=int(federation.num_clients),
        num_samples=int(federation.num_samples),
        num_test=int(federation.num_test),
        num_classes=None if federation.num_classes is None else int(federation.num_classes),
        sizes=ClientSizes(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
        x=ArrayFacts(str(federation.x_dtype), [*map(int, federation.feature_shape)]),
        y=ArrayFacts(str(federation.y_dtype), [*map(int, federation.target_shape)]),
        partition=federation.partition,
        source=federation.source,
    )


@dataclass(frozen=True)
class MeanOverRuns:
    """Mean over the runs that have a value."""

    mean: float
    """Their mean."""
    std: float | None
    """Their sample standard deviation, null for one run."""
    runs: int
    """How many runs."""


def over_runs(value: Spread | None) -> MeanOverRuns | None:
    """Return a spread as a part of a document."""
    return None if value is None else MeanOverRuns(value.mean, value.std, value.count)


@dataclass(frozen=True)
class MeanDifference:
    """Mean of paired differences."""

    mean: float
    """Method minus baseline."""
    low: float | None
    """Lower end of the 95 % confidence interval of the mean; null without an interval."""
    high: float | None
    """Its upper end."""
    pairs: int
    """How many pairs."""


def as_difference(value: MeanEstimate | None) -> MeanDifference | None:
    """Return an estimate as a part of a document."""
    if value is None:
        return None
    low, high = value.interval or (None, None)
    return MeanDifference(value.mean, low, high, value.count)
