"""The outcome of a verification as numbers, beside the lines that are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGREES, DIFFERS, IN_PART = 0, 1, 5
"""Exit codes; 2 and 4 where verification cannot be done."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a verification; `code` is the same on every rank, all else is rank 0's.

    Attributes:
        code: the exit code.
        faults: what is not as recorded: `hpcfed.run_folder.certificate.Fault`, `Difference`, or words.
        round: the round that differs, None if it is none.
        total: rounds of the record, None if it was not read.
        computed: rounds that were computed again and are as recorded.
        drawn: those of them that were drawn evenly.
        states: rounds whose kept state was measured.
        not_checked: rounds that no kept state leads to, or whose code is not at hand.
        chance_missed: probability of a spot check to miss one wrong round; None if it was none, or differs.
        tolerance: relative difference allowed in single rounds; None where bits were compared.
        largest: largest relative difference within the tolerance.
    """

    code: int
    faults: Sequence[object] = ()
    round: int | None = None
    total: int | None = None
    computed: Sequence[int] = ()
    drawn: Sequence[int] = ()
    states: Sequence[int] = ()
    not_checked: Sequence[int] = ()
    chance_missed: float | None = None
    tolerance: float | None = None
    largest: float | None = None
