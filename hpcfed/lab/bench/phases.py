"""The phases of a round, from the timers in its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

PHASES = ("local", "convert", "wait", "reduce", "server", "evaluate", "record")
"""In the order of a round.

local: the average rank's training of clients, with drawing and placing the cohort; convert: adding their results to
the sums; wait: the average rank's wait for the slowest; reduce: the Allreduce, and its result as float64; server: the
server step; evaluate: the evaluation; record: the rest, writing the record and checkpoints.
"""


def phases_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Split a round's recorded ``seconds`` into phases that add up to ``total``."""
    split = {name: seconds[name] for name in ("convert", "wait", "reduce", "server", "evaluate")}
    split["local"] = max(seconds["local"] - seconds["wait"] - seconds["convert"], 0.0)
    split["record"] = max(seconds["total"] - sum(split.values()), 0.0)
    return {name: split[name] for name in PHASES}


def phases_ms(
    rounds: Sequence[Mapping[str, float]], middle: Callable[[Iterable[float]], float] = median
) -> dict[str, float]:
    """Return the milliseconds of each phase: their median over the rounds, or another average, `middle`."""
    split = [phases_of(seconds) for seconds in rounds]
    return {name: 1e3 * middle(row[name] for row in split) for name in PHASES}
