"""The tables of a report in plain text, the same for the page and for the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import EngFormatter

from hpcfed.report.group import ABSENT, Group, differences, experiment_recipe
from hpcfed.report.measure import Criterion, Reach, Spread, best, final, mean_seconds, reach, spread
from hpcfed.report.read import TIMERS, Run

Format = Callable[[Spread], str]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def results_table(groups: Sequence[Group], criterion: Criterion) -> Table:
    """One row a group: how it ended, final and best value of the criterion, and what all its rounds cost."""
    final_title, best_title = f"Final {criterion.title}", f"Best {criterion.title}"
    header = ("Method", "Seeds", "Rounds", final_title, best_title, "Params sent", "Gradients", "Per round", "Status")
    return Table("Results", header, tuple(_result(group, criterion) for group in groups))


def _result(group: Group, criterion: Criterion) -> tuple[str, ...]:
    def over_runs(value: Callable[[Run], float], text: Format) -> str:
        return _cell(spread(value(run) for run in group.runs), text, len(group.runs))

    def in_units(value: Spread) -> str:
        return criterion_text(value, criterion)

    return (
        group.label,
        group.seeds,
        _range([run.num_rounds for run in group.runs]),
        over_runs(lambda run: final(run, criterion.column), in_units),
        over_runs(lambda run: best(run, criterion), in_units),
        over_runs(lambda run: final(run, "params"), count_text),
        over_runs(lambda run: final(run, "gradients"), count_text),
        over_runs(lambda run: mean_seconds([run], "total"), seconds_text),
        _status(group),
    )


def targets_table(
    groups: Sequence[Group], criterion: Criterion, targets: Sequence[float], window: int, note: str
) -> Table:
    """One row a target and group: rounds, parameters, gradients and seconds that its runs spent to reach the target."""
    header = ("Method", "Target", "Rounds", "Params sent", "Gradients", "Time")
    rows = [_reach_row(group, criterion, reach(group, criterion, goal, window)) for goal in targets for group in groups]
    return Table("Cost to reach a target", header, tuple(rows), note)


def _reach_row(group: Group, criterion: Criterion, cost: Reach) -> tuple[str, ...]:
    target = target_text(cost.target, criterion)
    if not cost.reached:
        ongoing = any(run.status == "unfinished" for run in group.runs)
        return group.label, target, "not reached yet" if ongoing else "not reached", ABSENT, ABSENT, ABSENT
    rounds = _cell(cost.rounds, rounds_text, cost.runs)
    params = _cell(cost.params, count_text, cost.reached)
    gradients = _cell(cost.gradients, count_text, cost.reached)
    return group.label, target, rounds, params, gradients, _cell(cost.seconds, seconds_text, cost.reached)


def timing_table(groups: Sequence[Group]) -> Table:
    """One row a group: mean seconds of a round by phase, and the imbalance of the ranks."""
    rows = []
    for group in groups:
        seconds = [_cell(spread([mean_seconds(group.runs, timer)]), seconds_text, 1) for timer in TIMERS]
        imbalance = np.concatenate([run.column("imbalance") for run in group.runs])
        imbalance = imbalance[np.isfinite(imbalance)]
        text = f"{imbalance.mean():.2f} ({imbalance.max():.2f})" if len(imbalance) else ABSENT
        rows.append((group.label, *seconds, text))
    header = ("Method", *(timer.capitalize() for timer in TIMERS), "Imbalance, mean (max)")
    return Table("Time of a round", header, tuple(rows), "Means over all rounds of all runs of a group.")


def recipes_table(groups: Sequence[Group]) -> Table:
    """One row for every recipe key whose value is not the same in all groups."""
    apart = differences([experiment_recipe(group.recipe) for group in groups])
    rows = tuple((key, *values) for key, values in apart.items())
    note = "All other keys are equal." if len(groups) > 1 else ""
    return Table("What differs between the recipes", ("Key", *(group.label for group in groups)), rows, note)


def environment_table(groups: Sequence[Group]) -> Table:
    """One row a run: its folder, seed, and what of the environment is not the same for all runs."""
    runs = [(group, run) for group in groups for run in group.runs]
    apart = differences([run.environment for _, run in runs])
    rows = [
        (str(run.folder), group.label, run.seed, run.status, *(values[index] for values in apart.values()))
        for index, (group, run) in enumerate(runs)
    ]
    return Table("Runs", ("Folder", "Method", "Seed", "Status", *apart), tuple(rows))


def criterion_text(value: Spread, criterion: Criterion) -> str:
    """``96.62 ± 0.13 %`` for an accuracy, ``0.1234 ± 0.0021`` for a loss."""
    if criterion.column.endswith("accuracy"):
        return _with_deviation(value, lambda number: f"{100 * number:.2f}") + " %"
    return _with_deviation(value, lambda number: f"{number:.4g}")


def target_text(target: float, criterion: Criterion) -> str:
    return f"{100 * target:.6g} %" if criterion.column.endswith("accuracy") else f"{target:.6g}"


def rounds_text(value: Spread) -> str:
    """``41 ± 2``."""
    return _with_deviation(value, lambda number: f"{number:.1f}".removesuffix(".0"))


def count_text(value: Spread) -> str:
    """``797.4 ± 3.1 M``: an SI prefix, chosen by the mean, from ten thousand on."""
    exponent = 3 * int(math.log10(value.mean) // 3) if value.mean >= 10_000 else 0
    digits = 1 if exponent else 0
    text = _with_deviation(value, lambda number: f"{number / 10**exponent:.{digits}f}")
    return f"{text} {EngFormatter.ENG_PREFIXES[exponent]}".rstrip()


def seconds_text(value: Spread) -> str:
    """``12.3 ms``, ``1.53 ± 0.02 s``, ``125 ± 3 s``."""
    factor, unit = (1e3, "ms") if value.mean < 1 else (1, "s")
    digits = max(0, 2 - math.floor(math.log10(value.mean * factor))) if value.mean * factor >= 0.01 else 4
    return _with_deviation(value, lambda number: f"{number * factor:.{digits}f}") + f" {unit}"


def _with_deviation(value: Spread, text: Callable[[float], str]) -> str:
    """Write mean ± deviation, without the deviation for a single value or when it is zero."""
    return f"{text(value.mean)} ± {text(value.std)}" if value.std else text(value.mean)


def _cell(value: Spread | None, text: Format, num_runs: int) -> str:
    """Write a value, and say when it is not a mean over all runs of the group: ``2 of 3: 41 ± 2``."""
    if value is None:
        return ABSENT
    return text(value) if value.count == num_runs else f"{value.count} of {num_runs}: {text(value)}"


def _range(rounds: Sequence[int]) -> str:
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"


def _status(group: Group) -> str:
    counts = Counter(run.status for run in group.runs)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())
