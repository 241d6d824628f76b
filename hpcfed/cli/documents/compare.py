"""The document of ``hpcfed compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfed.provenance.compare import Parting


@dataclass(frozen=True)
class ColumnDifference:
    """A column of the record in which two rounds differ."""

    column: str
    """Its name."""
    first: Any
    """Value of the first run."""
    second: Any
    """Value of the second run."""


@dataclass(frozen=True)
class CompareDocument:
    """Where two runs part."""

    runs: list[str]
    """The two run folders."""
    exit_code: int
    """0 the same model in all rounds that both have; 1 they part."""
    rounds: list[int]
    """Recorded rounds of each."""
    parts_in: int | None
    """First round after which the models differ, null if none."""
    columns: list[ColumnDifference]
    """Columns that differ in that round; without one, scores of the first round in which a score differs."""
    clients: list[int]
    """Clients whose updates differ in that round."""
    reason: str
    """Where in the round the runs part, or why that cannot be said; "" if they do not."""
    recipe: list[str]
    """Keys in which the recipes differ, with both values."""
    environment: list[str]
    """Facts of the environments that differ and may change last bits."""
    code: list[str]
    """Modules of the user's that differ."""
    doubts: list[str]
    """What the runs' own records say against their bits."""
    lines: list[str]
    """All that the command says, in order."""


DOCUMENT = CompareDocument


def compare_document(runs: Sequence[Path], found: Parting, lines: Sequence[str]) -> CompareDocument:
    """Return the document of a comparison."""
    return CompareDocument(
        runs=[*map(str, runs)],
        exit_code=found.code,
        rounds=[*found.rounds],
        parts_in=found.round,
        columns=[ColumnDifference(one.column, one.recorded, one.here) for one in found.columns],
        clients=[*found.clients],
        reason=found.reason,
        recipe=found.settings["recipe"],
        environment=found.settings["environment"],
        code=found.settings["code"],
        doubts=found.settings["doubts"],
        lines=[*lines],
    )
