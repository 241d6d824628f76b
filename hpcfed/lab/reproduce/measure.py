"""The results of an experiment's runs: rounds to a target, final values, and the best of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.config.load import to_plain
from hpcfed.config.metrics import direction_of_column, is_percentage
from hpcfed.config.recipe import Recipe
from hpcfed.lab.report.group import Group
from hpcfed.lab.report.measure import CRITERIA, Criterion, Quantity, Spread, best, final, moving, round_reached, spread
from hpcfed.lab.report.paired import student
from hpcfed.lab.report.read import Run, is_run_folder, read_run
from hpcfed.lab.reproduce.experiment import Case, Experiment, Goal
from hpcfed.lab.reproduce.plan import ExperimentLayout, Setting
from hpcfed.run_folder.code import CodeRecord
from hpcfed.run_folder.identity import FREE, differences
from hpcfed.run_folder.rounds import RECORD


@dataclass(frozen=True)
class SettingRuns:
    """The recorded runs of one setting: one method in one case at one grid point.

    Attributes:
        setting: the case, method and grid point.
        title: the method's title.
        runs: index of the seed → run.
        others: index of the seed → how a run that was left out differs from the experiment's recipe, data or code.
    """

    setting: Setting
    title: str
    runs: dict[int, Run]
    others: dict[int, str] = field(default_factory=dict)

    @property
    def absent(self) -> str:
        """Text of a table's cells if there are no runs: ``left out`` or ``not run``."""
        return "left out" if self.others else "not run"

    @property
    def rounds(self) -> int:
        """Number of rounds of the shortest run; 0 without runs."""
        return min((run.num_rounds for run in self.runs.values()), default=0)

    @property
    def seeds(self) -> str:
        """Text of a table's cell: how many of the planned runs there are, and how many of these diverged."""
        diverged = f", {self.diverged} diverged" if self.diverged else ""
        return f"{len(self.runs)} of {len(self.setting.folders)}{diverged}"

    @property
    def diverged(self) -> int:
        """Number of runs that diverged: they have no more rounds than these."""
        return sum(run.status == "diverged" for run in self.runs.values())

    @property
    def group(self) -> Group:
        """The runs as a group, the form in which a report's figures take them."""
        return Group(self.title, tuple(self.runs.values()))


@dataclass(frozen=True)
class TargetCost:
    """The cost of reaching a target, for a setting's runs.

    Attributes:
        rounds, params, gradients: mean and deviation of the rounds, parameters sent and gradients computed up to the
            target, over the runs that reached it; None if none did.
        arrived, runs: number of runs that reached the target, and number of planned runs.
        is_known: whether any run has a target; a `Goal` gives one once its method's runs of that seed reach its round.
    """

    rounds: Spread | None
    params: Spread | None
    gradients: Spread | None
    arrived: int
    runs: int
    is_known: bool = True

    @property
    def mean(self) -> float:
        """Mean number of rounds to the target; nan unless all planned runs reached it."""
        return self.rounds.mean if self.rounds and self.arrived == self.runs else math.nan


def read_settings(experiment: Experiment, layout: ExperimentLayout) -> list[SettingRuns]:
    """Return the recorded runs of each setting; runs of another recipe, data or code are in `SettingRuns.others`.

    Raises:
        InputError: a record is damaged.
    """
    recipes = {unit.recipe.output: unit.recipe for unit in layout.plan.units}
    found = []
    for setting in layout.settings:
        one = SettingRuns(setting, experiment.methods[setting.method].title, {})
        for seed, path in enumerate(setting.folders):
            if is_run_folder(path) and (path / RECORD).stat().st_size > 0:
                run = read_run(path)
                if other := _other(run, recipes[path]):
                    one.others[seed] = other
                else:
                    one.runs[seed] = run
        found.append(one)
    return found


def left_out(experiment: Experiment, measured: Sequence[SettingRuns]) -> str:
    """Return a remark on runs left out because of another recipe, data or code; "" if there are none."""
    words = [
        f"{one.title}, {experiment.cases[one.setting.case].title} ({next(iter(one.others.values()))})"
        for one in measured
        if one.others
    ]
    if not words:
        return ""
    more = f", and {len(words) - 3} more" if len(words) > 3 else ""
    return f"Left out, because their runs are others than the experiment's now: {'; '.join(words[:3])}{more}."


def _other(run: Run, recipe: Recipe) -> str:
    """Return in words how a run's recipe, data or code differs from the experiment's; "" if nothing differs."""
    changed = differences(_of_the_numbers(run.recipe), _of_the_numbers(to_plain(recipe)), FREE)
    if changed:
        first = "other data" if changed[0].startswith("data_content ") else changed[0]
        return first + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
    code = CodeRecord(run.folder).changes(recipe)
    return f"other code: {code}" if code else ""


def _of_the_numbers(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe in the form that is compared: a new key ``evaluated`` has the evaluated model and the metrics,
    and ``model.init`` has only the file's name, since the folder may have moved.
    """
    model, evaluate = dict(recipe.get("model", {})), recipe.get("evaluate", {})
    if model.get("init"):
        model["init"] = Path(model["init"]).name
    return {**recipe, "model": model, "evaluated": {key: evaluate.get(key) for key in ("model", "metrics")}}


def criterion_of(experiment: Experiment) -> Criterion:
    """Return the criterion of the measured column: its title, unit and better direction."""
    column, metrics = experiment.measure.column, experiment.metrics
    known = next((one for one in CRITERIA if one.column == column), None)
    if known is not None:
        return known
    title = column.replace("train_", "training ").replace("_", " ")
    unit: Quantity = "fraction" if is_percentage(column, metrics) else "number"
    return Criterion(column, title, bool(direction_of_column(column, metrics)), unit)


def reached(
    experiment: Experiment, one: SettingRuns, of_case: Sequence[SettingRuns], target: float | Goal
) -> TargetCost:
    """Return the cost of reaching a target, for the runs of the setting `one`.

    `of_case` has the runs of all settings of the case; from them the value of a `Goal` is computed.
    """
    criterion, window = criterion_of(experiment), experiment.measure.window
    goals = {seed: _goal(target, of_case, seed, criterion) for seed in one.runs}
    known = [(run, goals[seed]) for seed, run in one.runs.items() if not math.isnan(goals[seed])]
    rounds = [(run, round_reached(run, criterion, goal, window)) for run, goal in known]
    there = [(run, number) for run, number in rounds if number is not None]
    cost = over_seeds(experiment, (number for _, number in there))
    sent, computed = (
        over_seeds(experiment, (run.column(column)[number - 1] for run, number in there))
        for column in ("params", "gradients")
    )
    return TargetCost(cost, sent, computed, len(there), len(one.setting.folders), bool(known))


def over_seeds(experiment: Experiment, values: Iterable[float]) -> Spread | None:
    """Return mean and deviation of `values`, one value per seed, in the form of `shown`; None if no value is finite."""
    return shown(experiment, spread(values))


def shown(experiment: Experiment, found: Spread | None) -> Spread | None:
    """Return `found` for tables: with ``measure.intervals``, half the mean's 95 % interval replaces the deviation."""
    if found is None or found.std is None or not experiment.measure.intervals:
        return found
    return replace(found, std=student(found.count - 1) * found.std / math.sqrt(found.count))


def beyond(experiment: Experiment, one: SettingRuns, reference: SettingRuns, target: float) -> Spread | None:
    """Return how far `reference` is past `target` in the round in which `one` reaches it.

    The result is a mean with its deviation over seeds, positive if `reference` is better than the target; None unless
    `one` reaches the target with every seed, and `reference` has run at least until that round with each seed.
    """
    criterion, window = criterion_of(experiment), experiment.measure.window
    found = []
    for seed, run in one.runs.items():
        number = round_reached(run, criterion, target, window)
        other = reference.runs.get(seed)
        if number is None or other is None or other.num_rounds < number:
            return None
        value = moving(other.column(criterion.column), window)[number - 1]
        found.append(float(value - target if criterion.higher_is_better else target - value))
    return over_seeds(experiment, found) if len(found) == len(one.setting.folders) else None


def _goal(target: float | Goal, of_case: Sequence[SettingRuns], seed: int, criterion: Criterion) -> float:
    """Return a target's value; nan until all runs of the method that sets it have reached its round or diverged."""
    if isinstance(target, float | int):
        return target
    runs = [one.runs.get(seed) for one in of_case if one.setting.method == target.of]
    there = [run for run in runs if run is not None and run.num_rounds >= target.round]
    if not there or any(run is None or (run not in there and run.status != "diverged") for run in runs):
        return math.nan
    values = [float(run.column(criterion.column)[target.round - 1]) for run in there]
    return criterion.best([value for value in values if math.isfinite(value)] or [math.nan])


def tuned_to(settings: Sequence[SettingRuns], costs: Sequence[TargetCost]) -> dict[str, int]:
    """Return method → index in `settings` of the method's best grid point.

    The best has the most runs that reached the target and, among equals, the fewest rounds on average. `costs` has the
    cost of each setting.
    """
    places: dict[str, int] = {}
    for place, one in enumerate(settings):
        known = places.setdefault(one.setting.method, place)
        if _cost(costs[place]) < _cost(costs[known]):
            places[one.setting.method] = place
    return places


def _cost(reached: TargetCost) -> tuple[int, float]:
    return -reached.arrived, reached.rounds.mean if reached.rounds else math.inf


def final_of(experiment: Experiment, one: SettingRuns) -> Spread | None:
    """Return mean and deviation of a score over a setting's runs; None if no run has a finite score.

    A run's score is the measured column's mean over the last evaluations or, for ``kind: best``, its best evaluation.
    """
    measure, criterion = experiment.measure, criterion_of(experiment)
    if measure.kind == "best":
        return over_seeds(experiment, (best(run, criterion, measure.window) for run in one.runs.values()))
    return over_seeds(experiment, (final(run, measure.column, measure.last) for run in one.runs.values()))


def best_of(experiment: Experiment, grid: Sequence[SettingRuns]) -> list[SettingRuns]:
    """Return the settings of a grid whose planned runs all have a finite score and did not diverge, the best first."""
    criterion = criterion_of(experiment)
    means = {}
    for place, one in enumerate(grid):
        value, is_finished = final_of(experiment, one), all(run.status != "diverged" for run in one.runs.values())
        if value and value.count == len(one.setting.folders) and is_finished:
            means[place] = -value.mean if criterion.higher_is_better else value.mean
    return [grid[place] for place in sorted(means, key=means.__getitem__)]


def by_case(experiment: Experiment, measured: Sequence[SettingRuns]) -> dict[str, tuple[Case, list[SettingRuns]]]:
    """Return case name → (the case, the runs of each of its settings)."""
    return {
        name: (case, [one for one in measured if one.setting.case == name]) for name, case in experiment.cases.items()
    }


def rounds_apart(settings: Iterable[SettingRuns], column: str) -> int:
    """Return the median number of rounds from one recorded value of a column to the next; 1 if no run has two."""
    runs = [run for one in settings for run in one.runs.values()]
    gaps = [np.diff(np.flatnonzero(np.isfinite(run.column(column)))) for run in runs]
    return int(np.median(found)) if len(found := np.concatenate([*gaps, []])) else 1


def last_rounds(experiment: Experiment, settings: Iterable[SettingRuns], column: str) -> int:
    """Return the number of rounds that the last ``measure.last`` evaluations of a column span."""
    last = experiment.measure.last
    return 1 if last == 1 else last * rounds_apart(settings, column)
