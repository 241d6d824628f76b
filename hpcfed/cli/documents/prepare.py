"""The document of ``hpcfed prepare``."""

from __future__ import annotations

from dataclasses import dataclass

from hpcfed.cli.documents._parts import FederationFacts


@dataclass(frozen=True)
class PrepareDocument:
    """A federation file that has been written."""

    federation: FederationFacts
    """The file."""
    prepared_from: str
    """The source by its name on the command line."""
    bytes: int
    """Size of the file."""
    seconds: float
    """Seconds that it took."""
    remarks: list[str]
    """What was found or changed in the raw data, and what to look at."""


DOCUMENT = PrepareDocument
