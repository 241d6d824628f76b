"""A recorded run, read from its folder: its recipe with current paths, its record, and the states it has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.provenance.code_of_rounds import NO_PERMISSION, CodeOfRounds, Permission, code_of_rounds
from hpcfed.ranks.devices import visible_devices
from hpcfed.run_folder.certificate import DIGITS, named_files, read_certificate, sha256_of
from hpcfed.run_folder.checkpoint.layout import Damaged, Manifest, refuse_other_arithmetic, stem
from hpcfed.run_folder.checkpoint.writer import manifests, round_of
from hpcfed.run_folder.code import without_given_observers
from hpcfed.run_folder.contents import CHECKPOINTS, refuse_unusable
from hpcfed.run_folder.data import present_data
from hpcfed.run_folder.files import RESULT, read_mapping
from hpcfed.run_folder.rounds import OWN_RECORD, RECORD, read_rounds


@dataclass(frozen=True)
class RecordedRun:
    """A run folder.

    Attributes:
        folder: of the run.
        code: the user's code of each stretch of rounds.
        rows: the record, round t at t − 1.
        checkpoints: rounds whose state is kept, ascending.
        environment: ``environment.json``.
        result: ``result.json``.
        measured: round of a kept state → the keys of ``evaluate`` that name the model of its scores.
    """

    folder: Path
    code: Sequence[CodeOfRounds]
    rows: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[int]
    environment: Mapping[str, Any]
    result: Mapping[str, Any]
    measured: Mapping[int, Mapping[str, str]]

    def measured_otherwise(self, round: int) -> str:
        """Return the keys of ``evaluate`` that named another model for a round's scores than the recipe's, in words, or
        "".

        The next kept state has them.
        """
        section = self.code[-1].recipe.evaluate
        following = (self.measured[kept] for kept in self.checkpoints if kept >= round)
        found = next(following, {}).items()
        return ", ".join(f"evaluate.{key}: {value}" for key, value in found if getattr(section, key, value) != value)

    @property
    def recipe(self) -> Recipe:
        """The recipe, resolved, with the present places of data and of the last rounds' code."""
        return self.at(len(self.rows)).recipe

    def at(self, round: int) -> CodeOfRounds:
        """Return the code that a round was trained with.

        Raises:
            InputError: it is not at hand.
        """
        found = next(one for one in self.code if round <= one.last)
        found.check(self.folder)
        return found


def placed_recipe(run: Path, data: Path | None, code: Path | None) -> Recipe:
    """Return the recipe of a run folder with the current paths of data and user's code, on a device of this machine.

    A schedule or weights file that has moved is looked for by name and content: beside the federation file, in the run
    folder and beside it, and in the folder of the code.

    Raises:
        InputError: it is no run folder, or its recipe cannot be read, or a file that it names is not the run's.
    """
    path = run / "recipe.yaml"
    if not path.is_file():
        raise InputError("not a run folder", where=str(run), remedy="name the output folder of a run")
    recipe = without_given_observers(load_recipe(path))
    moved: dict[str, Any] = {"output": run}
    if recipe.device not in ("auto", "cpu") and not visible_devices(recipe.device):
        moved["device"] = "cpu"  # of other bits, which `verify` says
    moved["data"] = present_data(recipe, run) if data is None else data.resolve()
    if code is not None:
        moved["python_path"] = [code.resolve()]
    recipe = recipe.model_copy(update=moved)
    return _with_named_files(recipe, [recipe.data.parent, run, run.parent, *recipe.python_path])


def _with_named_files(recipe: Recipe, folders: Sequence[Path]) -> Recipe:
    """Return the recipe with its schedules and weights where files of the certified content are.

    Raises:
        InputError: one is missing or another, and none of `folders` has it.
    """
    certified = (read_certificate(recipe.output) or {}).get("named_files", {})
    for key, path in named_files(recipe).items():
        wanted = certified.get(key)
        if wanted is None or (path.is_file() and sha256_of(path) == wanted):
            continue
        here = [folder / path.name for folder in folders]
        here = [each for each in here if each.is_file() and not each.is_symlink()]
        found = next((each for each in here if sha256_of(each) == wanted), None)
        if found is None:
            what = "is not the file that the run used" if path.is_file() else "no such file"
            remedy = f"put the run's {path.name} (sha256 {wanted[:DIGITS]}…) there, or beside the federation file"
            raise InputError(f"{key}: {what}", where=str(path), remedy=remedy)
        section, name = key.split(".")
        own = getattr(recipe, section).model_copy(update={name: found})
        recipe = recipe.model_copy(update={section: own})
    return recipe


def recorded(run: Path, recipe: Recipe, permission: Permission = NO_PERMISSION) -> RecordedRun:
    """Read a run folder and resolve its recipe.

    Raises:
        InputError: the record is damaged or empty, the recipe cannot be run here, no round's code is at hand, or its
            bits are of another arithmetic.
    """
    refuse_unusable(run)
    rows = read_rounds(run / RECORD)
    if not rows:
        raise InputError("no rounds yet", where=str(run / RECORD), remedy="wait for the run's first round")
    for number, row in enumerate(rows, start=1):
        cohort = row.get("cohort")
        if not (isinstance(cohort, list) and all(type(client) is int for client in cohort)):
            raise InputError("no cohort", where=f"{run / RECORD}, line {number}", remedy=OWN_RECORD)
    environment, result = read_mapping(run / "environment.json"), read_mapping(run / RESULT)
    refuse_other_arithmetic(environment, run)
    code = code_of_rounds(run, recipe, len(rows), permission)
    kept = sorted(round_of(path) for path in manifests(run / CHECKPOINTS))
    kept = [round for round in kept if round <= len(rows)]
    measured = {round: _measured(run / CHECKPOINTS / f"{stem(round)}.json") for round in kept}
    return RecordedRun(run, code, rows, kept, environment, result, measured)


def _measured(manifest: Path) -> Mapping[str, str]:
    try:
        return Manifest.read(manifest).progress.stopping.measured
    except Damaged:  # which is told elsewhere
        return {}
