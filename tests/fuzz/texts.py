"""What reads text: recipes and overrides, runs of them, schedules, site files, and the two readers of plain data."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

import hpcfed
from hpcfed.assembly import resolve
from hpcfed.cluster.submit.site import Site, read_site
from hpcfed.cohort import Cohorts
from hpcfed.config.load import dump_yaml, load_recipe, load_recipes, to_plain
from hpcfed.data.federation import Federation
from hpcfed.errors import Diverged, EnvironmentFailure
from hpcfed.io.text import parse_json, parse_yaml
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.identity import identity
from tests.mpi.recipes import small, write_recipe, write_small

MOST_WORK = 200
"""Rounds times steps of a recipe that is run."""


def _check_recipes(source: Path, overrides: Sequence[str]) -> None:
    """Read recipes, resolve them, and see that what is written of them is read back as the same."""
    for recipe in load_recipes(source, overrides)[:3]:
        resolved = resolve(recipe)
        written = source.with_name("written.yaml")
        written.write_text(dump_yaml(to_plain(resolved)), encoding="utf-8")
        assert to_plain(load_recipe(written)) == to_plain(resolved)
        identity(resolved)
        RunFolder(resolved.output).is_finished(resolved)


def prepared(folder: Path) -> Path:
    """Write the federation that recipes name, once, and the recipe."""
    if not (folder / "small.h5").exists():
        write_small(folder)
        write_recipe(folder)
    return folder / "recipe.yaml"


def recipe(folder: Path, text: str) -> None:
    path = prepared(folder).with_name("changed.yaml")
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    _check_recipes(path, ["output=run"])


def override(folder: Path, texts: list[str]) -> None:
    _check_recipes(prepared(folder), texts)


def run(folder: Path, texts: list[str]) -> None:
    """Train a recipe with changes, if it is soon done; how it ends must be one of the ways that are known."""
    changes = [*texts, "device=cpu", f"output={folder / 'run'}"]
    for recipe in load_recipes(prepared(folder), changes)[:1]:
        local, budget = recipe.local, recipe.budget
        steps = max(local.steps or 0, 10 * (local.epochs or 0), (budget and budget.high) or 0)
        if recipe.rounds * steps > MOST_WORK or recipe.threads > 2:
            return
        try:
            done = hpcfed.run(to_plain(recipe), quiet=True)
            assert all(
                math.isfinite(value) for row in done.metrics for value in row.values() if isinstance(value, float)
            )
        except Diverged:
            pass
        except EnvironmentFailure as failure:
            if "not enough memory" not in str(failure):  # under the limit that each child has
                raise
        finally:
            shutil.rmtree(folder / "run", ignore_errors=True)


def schedule(folder: Path, text: str) -> None:
    prepared(folder)
    (folder / "schedule.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    key = ("cohort", "budget")[len(text) % 2]
    source = small(folder / "run", rounds=2, data=str(folder / "small.h5"))
    source[key] = {"schedule": str(folder / "schedule.json")}
    recipe = load_recipe(source)
    cohorts = Cohorts(recipe, _sizes(recipe.data))
    for number in range(1, recipe.rounds + 1):
        cohorts.round(number)


@cache
def _sizes(data: Path) -> np.ndarray:
    with Federation.open(data) as federation:
        return federation.sizes


def site(folder: Path, text: str) -> None:
    """The settings of a site file are those that the library reads, and the defaults."""
    (folder / "site.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    found = read_site(folder / "site.yaml").model_dump()
    theirs = _theirs(text.removeprefix("\ufeff")) or {}  # a file's byte-order mark is not part of its text
    assert _same(dict(sorted(found.items())), dict(sorted((Site().model_dump() | theirs).items())))


def json_door(folder: Path, text: str) -> None:
    """What is read of JSON is what the standard library reads."""
    assert _same(parse_json(text), json.loads(text))


def yaml_door(folder: Path, text: str) -> None:
    """What is read of YAML is what the library reads, but for dates, which stay text."""
    ours = parse_yaml(text)
    assert _same(ours, _theirs(text))
    if isinstance(ours, dict):
        assert _same(parse_yaml(dump_yaml(ours)), ours)


def _theirs(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return YAML(typ="safe", pure=True).load(text)


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [str(key) for key in ours] == [str(key) for key in theirs] and all(
            map(_same, ours.values(), theirs.values())
        )
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, str) and hasattr(theirs, "isoformat"):
        return True
    return (type(ours) is type(theirs) and ours == theirs) or (ours != ours and theirs != theirs)
