"""The plan of a sweep: every configuration × seed as a run, validated before any of them starts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcfed.assembly import resolve
from hpcfed.config.load import in_utf8, load_recipes, to_plain
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted
from hpcfed.io.node import working_folder
from hpcfed.io.pace import Pace, nobody
from hpcfed.lab.report.group import method_name
from hpcfed.lab.report.unlike import unlike
from hpcfed.lab.sweep.grid import Grid, Point, points
from hpcfed.run_folder import files
from hpcfed.run_folder.identity import WITHOUT_EFFECT, identity

MAX_NAME_LENGTH = 120
"""Maximum length of a run's name in characters, since file systems limit names."""


@dataclass(frozen=True)
class Unit:
    """One run of a sweep.

    Attributes:
        name: unique in the sweep, valid as a file name.
        point: index of its configuration in `Plan.points`.
        seed: the run's seed as text; a JSON object, purpose → seed, if the seeds of its random streams differ.
        recipe: resolved; its output lies in the sweep's folder.
    """

    name: str
    point: int
    seed: str
    recipe: Recipe

    @cached_property  # asked for of every run at every look at the claims
    def digest(self) -> str:
        """Digest of the recipe's keys that affect results, the number of rounds among them."""
        return identity(self.recipe, WITHOUT_EFFECT)


@dataclass(frozen=True)
class Plan:
    """A sweep: its folder, grids, configurations (`points`), and runs (`units`, one seed after another)."""

    name: str
    folder: Path
    grids: tuple[Grid, ...]
    points: tuple[Point, ...]
    units: tuple[Unit, ...]

    def __str__(self) -> str:
        seeds = len(self.units) // len(self.points)
        return f"{counted(len(self.points), 'configuration')} × {counted(seeds, 'seed')}"

    def unlike(self) -> list[str]:
        """Return a warning per setting that differs between the methods and so confounds their comparison."""
        recipes = {unit.point: unit.recipe for unit in self.units}.values()
        equal = all(_has_equal_clients(path) for path in {unit.recipe.data for unit in self.units})
        return unlike([self.labelled(recipe) for recipe in recipes], equal_clients=equal)

    def labelled(self, recipe: Recipe) -> tuple[str, dict[str, Any]]:
        """Return the name of a run's method, and the run's recipe as plain data, for `unlike`."""
        plain = to_plain(recipe)
        return method_name(plain), plain


def _has_equal_clients(path: Path) -> bool:
    with Federation.open(path) as federation:
        return len({*federation.sizes.tolist()}) == 1


def make_plan(
    source: str | Path,
    overrides: Sequence[str],
    grids: Sequence[Grid],
    seeds: Sequence[int],
    output: Path | None,
    say: Callable[[str], None] = nobody,
) -> Plan:
    """Return the plan of a sweep: every configuration × seed as a validated run with its folder.

    Args:
        source: the recipe's file.
        overrides: ``section.key=value`` texts, applied before those of a configuration.
        grids: see `hpcfed.lab.sweep.grid`.
        seeds: the seeds; empty: the recipe's.
        output: the sweep's folder; default: the recipe's output with ``-sweep`` appended.
        say: prints a line on the progress, which thousands of configurations take some 20 ms each for.

    Raises:
        InputError: a configuration cannot be run; the message names the grid or configuration at fault.
    """
    configurations = points(grids)
    fixed = [*overrides, *([f"seeds={list(seeds)}"] if seeds else [])]
    try:
        folder = working_folder() / (output or _beside(source, fixed, configurations[0]))
    except InputError as error:
        raise _blame(error, source, fixed, configurations[0]) from None
    folder = in_utf8(os.path.normpath(folder), "the sweep's folder")
    names = _names(configurations)
    outputs = [folder / "runs" / name for name in names]
    by_point, pace = list[list[Recipe]](), Pace()
    for path, point in zip(outputs, configurations, strict=True):
        if pace.is_due():
            done, total = len(by_point), len(outputs)
            say(f"{source}: {done:,} of {total:,} configurations checked{pace.left(done, total)}")
        try:
            loaded = _load(source, [*fixed, f"output={json.dumps(str(path))}"], point)
            by_point.append(_at_existing_runs(loaded, path))
        except InputError as error:
            raise _blame(error, source, fixed, point) from None
    units = [
        Unit(name if recipe.output == path else f"{name}.{recipe.output.name}", number, _seed(recipe), recipe)
        for recipes in zip(*by_point, strict=True)
        for number, (name, path, recipe) in enumerate(zip(names, outputs, recipes, strict=True))
    ]
    first = units[0].recipe
    if any(unit.recipe.stop.max_hours for unit in units):
        remedy = "leave the end of the job to its time limit, or to a signal: timeout -s USR1 8h mpirun …"
        raise InputError("stop.max_hours", where=str(source), expected="no such limit in a sweep", remedy=remedy)
    return Plan(first.name, folder, tuple(grids), tuple(configurations), tuple(units))


def _at_existing_runs(recipes: list[Recipe], path: Path) -> list[Recipe]:
    """Return a configuration's recipes, one per seed; a run that is already in the folder `path` itself stays there.

    A sweep of one seed writes a configuration's run to `path`; runs of seeds added later have folders inside it.
    """
    if not (path / files.RECIPE).is_file():
        return recipes
    seed = files.read_recipe(path).get("seed")
    return [one.model_copy(update={"output": path}) if one.seed.model_dump() == seed else one for one in recipes]


def _load(source: str | Path, fixed: Sequence[str], point: Point) -> list[Recipe]:
    return [resolve(recipe) for recipe in load_recipes(source, [*fixed, *point.overrides])]


def _beside(source: str | Path, fixed: Sequence[str], point: Point) -> Path:
    """Return the recipe's output with ``-sweep`` appended."""
    output = load_recipes(source, [*fixed, *point.overrides, "seeds=[0]"])[0].output.parent
    return output.with_name(f"{output.name}-sweep")


def _blame(error: InputError, source: str | Path, fixed: Sequence[str], point: Point) -> InputError:
    """Return a configuration's error with its cause named: the recipe itself, one grid's value, or all values."""
    try:
        _load(source, fixed, Point((), ()))
    except InputError as own:
        if str(own) == str(error):
            return error
    for key, value in zip(point.keys, point.values, strict=True):
        try:
            _load(source, fixed, Point((key,), (value,)))
        except InputError as alone:
            if str(alone) == str(error):
                return InputError(str(error), where=f"--grid {key}, value {value.label}")
    return InputError(str(error), where=f"configuration {point.label}")


def _names(configurations: Sequence[Point]) -> list[str]:
    """Return a folder name for each configuration: readable, and independent of the other values in the grids."""
    names = [re.sub(r"[^\w.,=+-]+", "-", point.label.replace(", ", ",")) for point in configurations]
    repeated = Counter(names)
    return [
        name
        if len(name) <= MAX_NAME_LENGTH and repeated[name] == 1
        else f"{name[:MAX_NAME_LENGTH]}-{hashlib.sha256(' '.join(point.overrides).encode()).hexdigest()[:8]}"
        for name, point in zip(names, configurations, strict=True)
    ]


def _seed(recipe: Recipe) -> str:
    by_purpose = recipe.seed.model_dump()
    return str(recipe.seed.model) if len(set(by_purpose.values())) == 1 else json.dumps(by_purpose)
