"""Where the time of a round goes, from what its record says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

PHASES = ("local", "convert", "wait", "reduce", "server", "evaluate", "record")
"""In the order of a round.

local: clients' training on the average rank, cohort and placement included; convert: adding their reports to the sums;
wait: the average rank's for the slowest; reduce: the Allreduce, and its result as float64; server, evaluate: as they
say; record: what is left, writing the record and checkpoints.
"""


def phases_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Split a round's ``seconds``, as its record has them, into phases that add up to ``total``."""
    split = {name: seconds[name] for name in ("convert", "wait", "reduce", "server", "evaluate")}
    split["local"] = max(seconds["local"] - seconds["wait"] - seconds["convert"], 0.0)
    split["record"] = max(seconds["total"] - sum(split.values()), 0.0)
    return {name: split[name] for name in PHASES}


def median_ms(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the milliseconds of each phase, medians over the rounds' ``seconds``."""
    split = [phases_of(seconds) for seconds in rounds]
    return {name: 1e3 * median(row[name] for row in split) for name in PHASES}
