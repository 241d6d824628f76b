"""The outcome of a verification as data, for programs; `hpcfed verify` prints it as lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGREES, DIFFERS, IN_PART = 0, 1, 5
"""Exit codes of a completed verification; one that cannot be done exits with 2 or 4."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a verification; `code` is the same on all ranks, the other attributes are complete on rank 0 alone.

    Attributes:
        code: the exit code.
        faults: everything that is not as recorded: `hpcfed.run_folder.certificate.Fault`, `Difference`, text or error.
        round: the round that differs; None if no round does.
        total: number of recorded rounds; None if the record was not read.
        computed: rounds that were computed again and are as recorded.
        drawn: rounds that a spot check drew uniformly.
        states: rounds whose checkpoint was evaluated and has the recorded scores.
        not_checked: rounds that cannot be computed: no checkpoint leads to them, or their code is not available.
        chance_missed: upper bound of the probability that the spot check missed the only wrong round of the run; None
            without a spot check, if the run differs, if bits were not compared, or if `not_checked` is not empty.
        tolerance: relative difference that was allowed in a round; None if bits were compared.
        largest: largest relative difference that was found and tolerated; None if bits were compared.
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
