"""An experiment's runs as a sweep, resumable on any number of ranks and in any number of jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfed.assembly import resolve
from hpcfed.config.load import load_recipe
from hpcfed.config.metrics import direction_of
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.lab.reproduce.experiment import STEPS_OF_AVERAGE, Case, Content, Experiment, Goal
from hpcfed.lab.reproduce.inputs import Places
from hpcfed.lab.sweep.grid import Point, parse_grids, points
from hpcfed.lab.sweep.plan import Plan, Unit
from hpcfed.run_folder.rounds import RECORD, count_rounds


@dataclass(frozen=True)
class Setting:
    """One method in one case at one point of its grids, with its number of rounds and a run folder per seed."""

    case: str
    method: str
    point: Point
    rounds: int
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class ExperimentLayout:
    """An experiment's runs, as the plan of a sweep (`plan`) and grouped by setting (`settings`)."""

    plan: Plan
    settings: tuple[Setting, ...]

    def recipe_of(self, number: int) -> Recipe:
        """Return the recipe of the first run of ``settings[number]``."""
        return next(unit.recipe for unit in self.plan.units if unit.point == number)


def folder_of(experiment: Experiment, scale: str, places: Places) -> Path:
    """Return the folder of an experiment's runs, tables and figures."""
    return places.output / (experiment.name if scale == "full" else f"{experiment.name}-{scale}")


def lay_out(
    experiment: Experiment,
    scale: str,
    places: Places,
    rounds: int | None = None,
    *,
    to_targets: bool = False,
    methods: Sequence[str] = (),
) -> ExperimentLayout:
    """Return all runs of an experiment whose data is prepared: cases × methods × grid points × seeds.

    Args:
        experiment, scale: the experiment at that scale, limited to the cases that have data.
        places: folders of data and runs.
        rounds: maximum number of rounds per run; a run that has recorded more keeps them. None: the experiment's own.
        to_targets: whether a run ends once it reaches its case's hardest target; without effect if no target is a
            number, or if the measured column is not a score on the test set.
        methods: the methods to run; all if empty.

    Raises:
        InputError: a recipe cannot be run.
    """
    folder = folder_of(experiment, scale, places) / "sweep"
    settings: list[Setting] = []
    units: list[Unit] = []
    for name, case in experiment.cases.items():
        for method, entry in experiment.methods_of(case).items():
            if methods and method not in methods:
                continue
            content = experiment.recipe_of(case, method, scale)
            if to_targets:
                content = {**content, **_stop(experiment, case)}
            grids = case.grids.get(method, entry.grids)
            for point in points(parse_grids([f"{key}={values}" for key, values in grids.items()])):
                outputs = []
                for seed in experiment.seed_numbers:
                    recipe = _recipe(f"{name}.{method}", seed, content, case, point, folder / "runs", places)
                    units.append(Unit(recipe.output.name, len(settings), str(seed), _limited(recipe, rounds)))
                    outputs.append(recipe.output)
                settings.append(Setting(name, method, point, content["rounds"], tuple(outputs)))
    units.sort(key=lambda unit: int(unit.seed))  # all settings of one seed before the next
    labels = tuple(setting.point for setting in settings)
    return ExperimentLayout(Plan(folder.parent.name, folder, (), labels, tuple(units)), tuple(settings))


def _stop(experiment: Experiment, case: Case) -> Content:
    """Return a recipe's ``stop`` at the case's hardest target; {} if no target is a number on the test set.

    A run stops once ``measure.window`` evaluations in a row have all reached the target.
    """
    part, _, metric = experiment.measure.column.partition("_")
    targets = [target for target in case.targets if not isinstance(target, Goal)]
    if part != "test" or not targets:
        return {}
    hardest = max(targets) if direction_of(metric, experiment.metrics) else min(targets)
    rule = {"test_accuracy": hardest} if metric == "accuracy" else {"metric": metric, "target": hardest}
    return {"stop": {**rule, "for": experiment.measure.window}}


def _recipe(name: str, seed: int, content: Content, case: Case, point: Point, runs: Path, places: Places) -> Recipe:
    data, start = places.federation(case.data, seed), places.start(case.data, seed)
    words = f",{point.label}".replace(", ", ",") if point.keys else ""
    whole = {
        **content,
        "name": name,
        "seed": {"model": seed, "cohort": seed, "batches": seed, **content.get("seed", {})},
        "data": str(data),
        "model": {**content["model"], **({"init": str(start)} if start else {})},
        "local": _local(content["local"], data),
        "output": str(runs / f"{name}{words}.{seed}"),
    }
    return resolve(load_recipe(whole, point.overrides))


def _limited(recipe: Recipe, rounds: int | None) -> Recipe:
    """Return the recipe with at most `rounds` rounds, but no fewer than its run has recorded; None: unchanged."""
    if rounds is None:
        return recipe
    done = count_rounds(recipe.output / RECORD)
    return recipe.model_copy(update={"rounds": min(recipe.rounds, max(rounds, done))})


def _local(local: Content, data: Path) -> Content:
    """Return ``local`` with `STEPS_OF_AVERAGE` replaced by epochs × ⌈mean client size / batch size⌉ steps."""
    if local.get("steps") != STEPS_OF_AVERAGE:
        return local
    with Federation.open(data) as federation:
        average = int(federation.sizes.sum()) / federation.num_clients
    steps = local["epochs"] * math.ceil(average / local["batch_size"])
    return {**{key: value for key, value in local.items() if key != "epochs"}, "steps": steps}
