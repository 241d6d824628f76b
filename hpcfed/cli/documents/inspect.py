"""The document of ``hpcfed inspect``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpcfed.cli.documents._parts import FederationFacts, federation_facts
from hpcfed.data.sites import MOST_SITES, absences, feature_names, mean_differences, missing_shares
from hpcfed.data.skew import Skew, skew_of

if TYPE_CHECKING:
    from pathlib import Path

    from hpcfed.data.federation import Federation
    from hpcfed.data.sites import Labels


@dataclass(frozen=True)
class ClientFacts:
    """One client."""

    number: int
    """Its index in the file."""
    name: str
    """Its name."""
    train: int
    """Its training samples."""
    test: int | None
    """Its test samples; null where all clients share the test set, or there is none."""
    labels: list[int] | None
    """Its training samples of each class, in the order of `classes`."""


@dataclass(frozen=True)
class InspectDocument:
    """A federation file and its clients."""

    federation: FederationFacts
    """The file as a whole."""
    clients: list[ClientFacts]
    """All clients, in the file's order."""
    classes: list[str] | None
    """Names of the classes; null for targets without one label a sample."""
    features: list[str] | None
    """Names of the features, null without names."""
    normalization: dict[str, list[float]] | None
    """`mean` and `std` that samples are scaled by when they are read, by channel or feature."""
    skew: Skew
    """How different the clients are."""
    missing: dict[str, list[float]]
    """Column → share of each client's training samples whose cell was missing and has been filled; up to 30 clients."""
    mean_differences: dict[str, list[float | None]]
    """Feature → standardised mean difference of each client from all others; up to 30 clients."""
    remarks: list[str]
    """Classes that clients lack."""
    verified: bool | None
    """With --verify: whether the data have the recorded hash; null if none is recorded, or without --verify."""
    picture: str | None
    """The file that --picture has written."""


DOCUMENT = InspectDocument


def inspect_document(
    federation: Federation, labels: Labels | None, picture: Path | None, *, verified: bool | None
) -> InspectDocument:
    """Return the document of an open federation file."""
    few = 1 < federation.num_clients <= MOST_SITES
    apart = mean_differences(federation) if few else None
    tests = None if federation.test_offsets is None else np.diff(federation.test_offsets)
    counts = None if labels is None else labels.counts
    scales = {} if federation.normalization is None else vars(federation.normalization)
    return InspectDocument(
        federation=federation_facts(federation),
        clients=[
            ClientFacts(
                number=k,
                name=name,
                train=int(federation.sizes[k]),
                test=None if tests is None else int(tests[k]),
                labels=None if counts is None else counts[k].tolist(),
            )
            for k, name in enumerate(federation.client_names())
        ],
        classes=None if labels is None else labels.names,
        features=None if federation.features is None else [*federation.features],
        normalization={name: [*map(float, values)] for name, values in scales.items()} or None,
        skew=skew_of(federation.sizes, counts),
        missing={column: shares.tolist() for column, shares in missing_shares(federation).items()} if few else {},
        mean_differences={} if apart is None else dict(zip(feature_names(federation), apart.T.tolist(), strict=True)),
        remarks=[] if labels is None else [*absences(federation, labels)],
        verified=verified,
        picture=None if picture is None else str(picture),
    )
