"""The phases of a round, computed from the timers in its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

PHASES = ("local", "convert", "wait", "reduce", "server", "evaluate", "record")
"""Phases in the order of a round.

local: drawing the cohort, assigning it to ranks and training, mean over ranks; convert: adding clients' results to the
sums; wait: waiting for the slowest rank, mean over ranks; reduce: the Allreduce and converting its result to float64;
server: the server step; evaluate: the evaluation; record: the rest, writing the record and checkpoints.
"""


def phases_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase, which add up to ``total``, from the object ``seconds`` in a round's record."""
    split = {name: seconds[name] for name in ("convert", "wait", "reduce", "server", "evaluate")}
    split["local"] = max(seconds["local"] - seconds["wait"] - seconds["convert"], 0.0)
    split["record"] = max(seconds["total"] - sum(split.values()), 0.0)
    return {name: split[name] for name in PHASES}


def phases_ms(
    rounds: Sequence[Mapping[str, float]], middle: Callable[[Iterable[float]], float] = median
) -> dict[str, float]:
    """Return the milliseconds of each phase: their `middle` over `rounds`, the ``seconds`` of the rounds' records."""
    split = [phases_of(seconds) for seconds in rounds]
    return {name: 1e3 * middle(row[name] for row in split) for name in PHASES}
