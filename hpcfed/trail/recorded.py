"""A recorded run as it is found: its recipe with present places, its record and its kept states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.checkpoint.writer import manifests, round_of
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.run_folder.code import CodeRecord
from hpcfed.run_folder.files import read_mapping
from hpcfed.run_folder.rounds import RECORD, read_rounds
from hpcfed.setup import resolve
from hpcfed.user_code.modules import forget, outdated


@dataclass(frozen=True)
class Recorded:
    """A run folder.

    Attributes:
        folder: of the run.
        recipe: resolved, with the present places of data and code.
        rows: the record, round t at t − 1.
        checkpoints: rounds whose state is kept, ascending.
        environment: ``environment.json``.
        finished: whether the run has ended.
    """

    folder: Path
    recipe: Recipe
    rows: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[int]
    environment: Mapping[str, Any]
    finished: bool


def placed_recipe(run: Path, data: Path | None, code: Path | None) -> Recipe:
    """Return the recipe of a run folder, its data and the user's code where they lie now.

    Raises:
        InputError: it is no run folder, or its recipe cannot be read.
    """
    path = run / "recipe.yaml"
    if not path.is_file():
        raise InputError("not a run folder", where=str(run), remedy="name the output folder of a run")
    recipe = load_recipe(path)
    moved: dict[str, Any] = {"output": run}
    if data is not None:
        moved["data"] = data.resolve()
    if code is not None:
        moved["python_path"] = [code.resolve()]
    return recipe.model_copy(update=moved)


def recorded(run: Path, recipe: Recipe) -> Recorded:
    """Return a run folder, read, with its recipe resolved.

    Raises:
        InputError: the record is damaged or empty, the recipe cannot be run here, or the code is not the run's.
    """
    rows = read_rounds(run / RECORD)
    if not rows:
        raise InputError("no rounds yet", where=str(run / RECORD), remedy="wait for the run's first round")
    forget(outdated(recipe.python_path))
    resolved = resolve(recipe)
    if changed := CodeRecord(run).changes(resolved):
        remedy = "name the folder of the recorded code with --code"
        raise InputError(f"the code is not this run's: {changed}", where=str(run), remedy=remedy)
    kept = sorted(round_of(path) for path in manifests(run / "checkpoints"))
    finished = read_mapping(run / "result.json").get("status") == "finished"
    kept = [round for round in kept if round <= len(rows)]
    return Recorded(run, resolved, rows, kept, read_mapping(run / "environment.json"), finished)
