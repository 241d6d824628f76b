"""A recorded run, read from its folder: its recipe with current paths, its record, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.provenance.code_of_rounds import NO_PERMISSION, CodeOfRounds, Permission, code_of_rounds
from hpcfed.ranks.devices import visible_devices
from hpcfed.run_folder.certificate import DIGITS, named_files, not_kept, read_certificate, sha256_of
from hpcfed.run_folder.checkpoint.layout import Damaged, Manifest, refuse_other_arithmetic, stem
from hpcfed.run_folder.checkpoint.writer import manifests, round_of
from hpcfed.run_folder.code import without_given_observers
from hpcfed.run_folder.contents import CHECKPOINTS, refuse_unusable
from hpcfed.run_folder.data import present_data
from hpcfed.run_folder.files import RESULT, read_environment, read_mapping
from hpcfed.run_folder.rounds import OWN_RECORD, RECORD, no_rounds, read_rounds
from hpcfed.run_folder.stopping import OF_CLIENTS, measured_by


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run folder.

    Attributes:
        folder: the run folder.
        code: versions of the user's code, each with the consecutive rounds trained with it, in the order of rounds.
        rows: rows of the record; round t has index t − 1.
        checkpoints: rounds after which a checkpoint was kept, ascending.
        environment: content of ``environment.json``.
        result: content of ``result.json``.
        measured: round → `measured_by` when it was trained, of rounds with a checkpoint and of those after which the
            run went on with others, ascending.
    """

    folder: Path
    code: Sequence[CodeOfRounds]
    rows: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[int]
    environment: Mapping[str, Any]
    result: Mapping[str, Any]
    measured: Mapping[int, Mapping[str, str]]

    def measured_otherwise(self, round: int, *, clients: bool = False) -> str:
        """Return how a round was scored if not as by the recipe now, such as "evaluate.model: client-average".

        The text has the entries of `measured` for the round, or for the next later one, that differ from the recipe's
        ``evaluate``; "" if none does, or if there is no such round. With `clients`, they are those of clients' scores
        alone; without, all others.
        """
        now = measured_by(self.code[-1].recipe.evaluate)
        following = (then for known, then in self.measured.items() if known >= round)
        return ", ".join(
            f"evaluate.{key}: {value}"
            for key, value in next(following, {}).items()
            if key.startswith(OF_CLIENTS) == clients and now.get(key, value) != value
        )

    def not_kept(self) -> dict[str, Any]:
        """Return name → SHA-256 of the models that the folder lacks because, by the certificate, they are not kept."""
        return {name: digest for name, digest in not_kept(self.folder).items() if not (self.folder / name).is_file()}

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe, with current paths of the data and of the last round's code.

        Raises:
            InputError: that code is not available.
        """
        return self.at(len(self.rows)).recipe

    def at(self, round: int) -> CodeOfRounds:
        """Return the version of the user's code with which a round was trained.

        Raises:
            InputError: that code is not available.
        """
        found = next(one for one in self.code if round <= one.last)
        found.check(self.folder)
        return found


def placed_recipe(run: Path, data: Path | None, code: Path | None) -> Recipe:
    """Return the recipe of a run folder, with current paths of the files it names and a device that this machine has.

    A schedule or weights file that has moved is searched by name and content: beside the federation file, in the run
    folder, beside the run folder, and in the folder of the code.

    Args:
        run: the run folder.
        data: current path of the federation file; None: found from the recipe.
        code: current folder of the user's code; None: the recipe's.

    Raises:
        InputError: `run` is not a run folder, its recipe cannot be read, a file named there has another content, or
            `code` is not a folder.
    """
    path = run / "recipe.yaml"
    if not path.is_file():
        raise InputError("not a run folder", where=str(run), remedy="name the output folder of a run")
    recipe = without_given_observers(load_recipe(path))
    moved: dict[str, Any] = {"output": run}
    if recipe.device not in ("auto", "cpu") and not visible_devices(recipe.device):
        moved["device"] = "cpu"  # it computes other bits, which `verify` reports
    moved["data"] = present_data(recipe, run) if data is None else data.resolve()
    if code is not None:
        if not code.is_dir():
            raise InputError("not a folder", where=f"--code {code}", remedy="name the folder of the recorded code")
        moved["python_path"] = [code.resolve()]
    recipe = recipe.model_copy(update=moved)
    return _with_named_files(recipe, [recipe.data.parent, run, run.parent, *recipe.python_path])


def _with_named_files(recipe: Recipe, folders: Sequence[Path]) -> Recipe:
    """Return the recipe with its schedule and weights files found in `folders`, by name and certified content.

    Raises:
        InputError: a file is missing or has another content, and none of `folders` has one with the certified content.
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

    Args:
        run: the run folder.
        recipe: its recipe, from `placed_recipe`.
        permission: whether code from ``code.json`` may run.

    Raises:
        InputError: the record is damaged or empty, the recipe cannot be run here, no version of its code is available,
            or the run was computed by a version of hpcfed whose arithmetic differs.
    """
    refuse_unusable(run)
    rows = read_rounds(run / RECORD)
    if not rows:
        raise no_rounds(run)
    for number, row in enumerate(rows, start=1):
        cohort = row.get("cohort")
        if not (isinstance(cohort, list) and all(type(client) is int for client in cohort)):
            raise InputError("no cohort", where=f"{run / RECORD}, line {number}", remedy=OWN_RECORD)
    environment, result = read_environment(run), read_mapping(run / RESULT)
    refuse_other_arithmetic(environment, run)
    code = code_of_rounds(run, recipe, len(rows), permission)
    kept = sorted(round_of(path) for path in manifests(run / CHECKPOINTS))
    kept = [round for round in kept if round <= len(rows)]
    return RecordedRun(run, code, rows, kept, environment, result, _measured(run, kept))


def _measured(run: Path, kept: Iterable[int]) -> Mapping[int, Mapping[str, str]]:
    """Return `RecordedRun.measured`; each checkpoint knows of all earlier ones."""
    found = dict[int, Mapping[str, str]]()
    for round in kept:
        try:
            stopping = Manifest.read(run / CHECKPOINTS / f"{stem(round)}.json").progress.stopping
        except Damaged:  # reported where the checkpoint is used
            continue
        found |= {before.until: before.measured for before in stopping.measured_before}
        found[round] = stopping.measured
    return dict(sorted(found.items()))
