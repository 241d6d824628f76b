"""The versions of the user's code in a recorded run, ready to be imported, each with the rounds trained with it.

Code in the recipe's folders (or in the folder of ``--code``), in the running script or in the notebook is used if it is
as recorded and lies outside the run folder. Otherwise the text in ``code.json`` is used. Since a run folder may come
from somebody else, this text runs only with the user's permission, and so does a call of an installed package with the
recipe's arguments (`installed_calls`). Observers, which decide no result, are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.assembly import resolve
from hpcfed.config.factory import named_code
from hpcfed.config.metrics import OwnMetric
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.modules import Source, at_hand, forget, lies_in, outdated, unrecorded
from hpcfed.config.user_code.recorded import as_recorded, modules_of, recorded_code
from hpcfed.errors import InputError, counted
from hpcfed.run_folder.code import CODE_FILE, CodeRecord, CodeVersion, installed_calls, references
from hpcfed.run_folder.files import RECIPE, SIGNATURE


@dataclass(frozen=True)
class Permission:
    """Permission to run code from a run's record.

    Attributes:
        given: whether the code may run without asking the user.
        ask: shows the user a description of the code, and returns whether the code may run; None: the user is not
            asked, and `given` decides.
        option: the option that gives permission, named in errors; "" if the caller has no such option.
        installed: whether the recipe may call installed packages with its arguments without asking the user.
    """

    given: bool = False
    ask: Callable[[str], bool] | None = None
    option: str = ""
    installed: bool = False

    def asked(self, what: str) -> bool:
        """Return whether code may run; the user is asked if necessary, with `what` as the description of the code."""
        return self.given or (self.ask is not None and self.ask(what))


NO_PERMISSION = Permission()
RUN_CODE = "--run-code (run_code=True of hpcfed.replay)"


@dataclass(frozen=True)
class CodeOfRounds:
    """One version of the user's code, and the consecutive rounds trained with it; most runs have one version only.

    Attributes:
        first, last: first and last of these rounds.
        recipe: the recipe; resolved if the code can run.
        modules: name → module to import from ``code.json``; empty if the code is in the recipe's folders.
        hindrance: why the code cannot run; "" if it can.
        remedy: how the user can make the code run; "" if it can run.
    """

    first: int
    last: int
    recipe: Recipe
    modules: Mapping[str, Source]
    hindrance: str = ""
    remedy: str = ""

    def check(self, folder: Path) -> None:
        """Refuse code that cannot run.

        Raises:
            InputError: the code cannot run; the message has `hindrance` and `remedy`.
        """
        if self.hindrance:
            what = f"the code is not this run's: {self.hindrance} (rounds {self.first} to {self.last})"
            raise InputError(what, where=str(folder), remedy=self.remedy)

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Context in which imports of the user's modules load this version of the code."""
        forget(outdated(self.recipe.python_path))
        with recorded_code(self.modules) if self.modules else nullcontext():
            yield


def code_of_rounds(run: Path, recipe: Recipe, rounds: int, permission: Permission) -> list[CodeOfRounds]:
    """Return the versions of a run's code, in the order of their rounds; together they have all rounds.

    Args:
        run: the run folder.
        recipe: its recipe with current paths.
        rounds: number of recorded rounds.
        permission: whether code from ``code.json`` may run.

    Raises:
        InputError: ``code.json`` is damaged, the recipe cannot be run here, no version of the code can run, or a call
            of an installed package has no permission.
    """
    _check_installed(run, recipe, permission)
    versions = _completed(CodeRecord(run).versions())
    named = references(recipe)
    following = [*(one.since for one in versions[1:]), rounds + 1]
    found, recorded = list[CodeOfRounds](), list[CodeOfRounds]()
    remedy = "name the folder of the recorded code with --code"
    if permission.option:
        remedy = f"{remedy}, or run the recorded text with {permission.option}"
    first = 1
    for number, version in enumerate(versions):
        last = min(following[number:]) - 1
        if first > last:  # accepted, and not trained with yet, or only before the run was cut
            continue
        one = _present(run, recipe, version, (first, last), named)
        if one is None:
            hindrance = _hindrance(run, recipe, version, named)
            one = CodeOfRounds(first, last, recipe, version.files, hindrance, remedy)
            recorded.append(one)
        found.append(one)
        first = last + 1
    if recorded and permission.asked(_question(run, recorded)):
        found = [_from_record(one, named) if one in recorded else one for one in found]
    if all(one.hindrance for one in found):
        found[-1].check(run)
    return found


def _check_installed(run: Path, recipe: Recipe, permission: Permission) -> None:
    """Refuse a recipe that calls installed packages with its arguments, unless it may.

    Raises:
        InputError: it may not.
    """
    calls = ", ".join(installed_calls(recipe))
    what = f"{run / RECIPE} calls {calls}, which is installed here, with arguments of its own and all your rights"
    if calls and not (permission.installed or permission.asked(what)):
        remedy = f"read its arguments; allow it with {permission.option}" if permission.option else ""
        raise InputError(f"calls {calls}, which is installed here", where=str(run / RECIPE), remedy=remedy)


def _completed(versions: Sequence[CodeVersion]) -> list[CodeVersion]:
    """Return the versions, each with the modules that only later ones have: a metric that was added on the way."""
    later: Mapping[str, Source] = {}
    found = list[CodeVersion]()
    for one in reversed(versions):
        later = {**later, **one.files}
        found.insert(0, CodeVersion(one.since, later))
    return found


def _present(
    run: Path, recipe: Recipe, version: CodeVersion, rounds: tuple[int, int], named: Sequence[str]
) -> CodeOfRounds | None:
    """Return a version read from the recipe's folders; None if the code there differs, or lies in the run folder.

    `rounds`: the first and the last of its rounds.
    """
    if named and not (
        at_hand(version.files, named, recipe.python_path)
        and not unrecorded(version.files, named)
        and not lies_in(run, version.files, named, recipe.python_path)
    ):
        return None
    one = CodeOfRounds(*rounds, recipe, {})
    with one.imported():
        unwatched = resolve(recipe.model_copy(update={"observers": []}))
    return CodeOfRounds(*rounds, unwatched.model_copy(update={"observers": recipe.observers}), {})


def _from_record(one: CodeOfRounds, named: Sequence[str]) -> CodeOfRounds:
    modules = modules_of(one.modules, named)
    recipe = with_references(one.recipe)
    with recorded_code(modules):
        return CodeOfRounds(one.first, one.last, resolve(recipe), modules)


def _hindrance(run: Path, recipe: Recipe, version: CodeVersion, named: Sequence[str]) -> str:
    if missing := unrecorded(version.files, named):
        return f"{CODE_FILE} does not have {', '.join(missing)}"
    changed = CodeRecord(run).changed_from(recipe, version.files)
    return ", ".join([*changed.values()][:3]) or f"{', '.join(version.files)} of the run's own folder"


def _question(run: Path, recorded: Sequence[CodeOfRounds]) -> str:
    """Return the question for permission: whether the run is signed, and which files would run for which rounds."""

    def what(source: Source) -> str:
        return f"{source.path or source.file} ({counted(len((source.text or '').splitlines()), 'line')})"

    whose = "signed" if (run / SIGNATURE).is_file() else "not signed by anybody"
    which = "; ".join(
        f"of rounds {one.first} to {one.last}: {', '.join(map(what, one.modules.values()))}" for one in recorded
    )
    return f"code.json of {run}, {whose}, has code that would run with all your rights, {which}"


def with_references(recipe: Recipe) -> Recipe:
    """Return the recipe for code from ``code.json``: the code named as there, no folders of code, no observers."""

    def of_metric(metric: Any) -> Any:
        if isinstance(metric, OwnMetric):
            own = {key: as_recorded(text) for key in ("whole", "sum") if (text := getattr(metric, key)) is not None}
            return metric.model_copy(update=own)
        return as_recorded(metric)

    update: dict[str, Any] = {"python_path": [], "observers": []}
    for name in ("algorithm", "model", "loss"):
        section = getattr(recipe, name)
        if section.factory is not None:
            update[name] = section.model_copy(update={"factory": as_recorded(section.factory)})
    if recipe.local.step is not None:
        update["local"] = recipe.local.model_copy(update={"step": as_recorded(recipe.local.step)})
    metrics = {name: of_metric(metric) for name, metric in recipe.evaluate.metrics.items()}
    update["evaluate"] = recipe.evaluate.model_copy(update={"metrics": metrics})
    return recipe.model_copy(update=update)


def runs(code: Sequence[CodeOfRounds]) -> Iterator[str]:
    """Yield a line for each version of the user's code that can run.

    A line has the code's names in the recipe, its folder or file, and, if there are several versions, its rounds.
    """
    for one in code:
        if one.hindrance or not (named := named_code(one.recipe.model_copy(update={"observers": []}))):
            continue
        place = ", ".join(map(str, one.recipe.python_path)) or "the installed packages"
        if one.modules:
            place = "code.json: " + ", ".join(source.file for source in one.modules.values())
        which = f" for rounds {one.first} to {one.last}" if len(code) > 1 else ""
        yield f"runs the code {', '.join(named)}{which}, from {place}"
