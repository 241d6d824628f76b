"""The document of ``hpcfed verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hpcfed.provenance.verify.verdict import Verdict


@dataclass(frozen=True)
class FoundFault:
    """Something that is not as recorded."""

    place: str
    """File, part, or column of the record."""
    what: str
    """What is wrong with it."""
    recorded: Any
    """Value of the record, null for other faults."""
    here: Any
    """Value that was computed here, null for other faults."""


@dataclass(frozen=True)
class VerifyDocument:
    """Outcome of a verification."""

    run: str
    """The run folder."""
    exit_code: int
    """0 as recorded; 1 differs; 5 in part: see `lines`."""
    verdict: Literal["verified", "differs", "in part"]
    """The exit code in words."""
    seed: int | None
    """--seed of the draw, null with --all."""
    ranks: int
    """Ranks that computed."""
    rounds: int | None
    """Rounds of the record, null where a file was wrong before it was read."""
    computed: list[int]
    """Rounds that were computed again and are as recorded."""
    drawn: list[int]
    """Those of them that were drawn, each round with the same probability."""
    states: list[int]
    """Rounds whose kept state was measured again."""
    not_checked: list[int]
    """Rounds that cannot be computed here: no state is kept near, or their code is not at hand."""
    chance_missed: float | None
    """Probability that this draw misses one wrong round; null if all were checked, or something differs."""
    bitwise: bool
    """Whether bits were compared; else numbers, within `tolerance`."""
    tolerance: float | None
    """Relative difference allowed in single rounds where this machine computes other bits."""
    largest_difference: float | None
    """Largest relative difference found within the tolerance."""
    differs_in: int | None
    """The first round that differs, null if none does."""
    faults: list[FoundFault]
    """What is not as recorded."""
    lines: list[str]
    """All that the command says, in order."""


DOCUMENT = VerifyDocument
WORDS: dict[int, Literal["verified", "differs", "in part"]] = {0: "verified", 1: "differs", 5: "in part"}


def verify_document(run: Path, found: Verdict, seed: int | None, ranks: int, lines: Sequence[str]) -> VerifyDocument:
    """Return the document of a verdict."""
    return VerifyDocument(
        run=str(run),
        exit_code=found.code,
        verdict=WORDS[found.code],
        seed=seed,
        ranks=ranks,
        rounds=found.total,
        computed=[*found.computed],
        drawn=[*found.drawn],
        states=[*found.states],
        not_checked=[*found.not_checked],
        chance_missed=found.chance_missed,
        bitwise=found.tolerance is None,
        tolerance=found.tolerance,
        largest_difference=found.largest,
        differs_in=found.round,
        faults=[_fault(one) for one in found.faults],
        lines=[*lines],
    )


def _fault(found: object) -> FoundFault:
    from hpcfed.provenance.differences import Difference
    from hpcfed.run_folder.certificate import Fault

    if isinstance(found, Difference):
        return FoundFault(found.column, "differs", found.recorded, found.here)
    if isinstance(found, Fault):
        return FoundFault(found.part, found.what, None, None)
    return FoundFault("", str(found), None, None)
