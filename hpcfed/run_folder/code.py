"""``code.json`` of a run folder: the user's code that each round was trained with.

files     module → file, path, hash and text: the code of the rounds from `since` on
since     a round, counted from 1
before    a list with one entry, `files` and `since`, per accepted change: the code of earlier rounds

``accepted-code.json`` beside it has module → hash of other code that was accepted, until a round is trained with it. It
is no part of the run, which may have no round left.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hpcfed.config import metrics
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.capture import RESTORED
from hpcfed.config.user_code.given import is_given
from hpcfed.config.user_code.modules import Source, is_installed, is_recorded, loaded, read_source, source_without_file
from hpcfed.errors import InputError, first_of
from hpcfed.io.atomic import write_whole
from hpcfed.io.text import parse_json, read_text
from hpcfed.ranks.world import World

CODE_FILE, ACCEPTED_CODE_FILE = "code.json", "accepted-code.json"
FRESH = "choose another output, or --fresh (fresh=True), which starts anew and keeps that run under previous-1"
OTHER_VALUES = "values that it holds: seed them, as torch.manual_seed does a module's parameters"
EDITED = f"{FRESH}; or --accept-code (accept_code=True), which goes on and records both"


NETWORKS = ("torch.nn", "torchvision.models")
"""Installed modules whose names are networks, losses and what makes them, whatever their arguments."""


class _CodeSection(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class ModuleEntry(_CodeSection):
    """A module's `Source` as written in ``code.json``."""

    file: str
    path: str
    hash: str
    text: str | None


class VersionEntry(_CodeSection):
    """The code of the rounds from `since` on, by module."""

    files: dict[str, ModuleEntry]
    since: Annotated[int, Field(ge=1)]


class CodeFile(VersionEntry):
    """The content of ``code.json``."""

    before: list[VersionEntry]


NO_CODE: Mapping[str, Any] = {"files": {}, "since": 1, "before": []}
"""The content where there is no file."""


def references(recipe: Recipe) -> list[str]:
    """Return a recipe's references to code that decides its result and is recorded: not those to libraries."""
    named = [*_with_arguments(recipe), *metrics.references(recipe.evaluate.metrics)]
    return [one for one in named if is_recorded(one, recipe.python_path)]


def installed_calls(recipe: Recipe) -> list[str]:
    """Return the references to installed packages that are called with arguments of the recipe, except `NETWORKS`.

    Such a call can do whatever the recipe's author likes: ``subprocess:Popen`` runs a program.
    """
    named = [one for one in _with_arguments(recipe) if is_installed(one, recipe.python_path)]
    return [one for one in dict.fromkeys(named) if one.partition(":")[0] not in NETWORKS]


def _with_arguments(recipe: Recipe) -> list[str]:
    """Return the references that are called with arguments of the recipe: all but metrics and observers."""
    named = (*recipe.own_rules, recipe.model.factory, recipe.loss.factory, recipe.local.step)
    return [one for one in named if one is not None]


def without_given_observers(recipe: Recipe) -> Recipe:
    """Return the recipe as run folders record it: without observers that were passed as Python objects."""
    kept = [one for one in recipe.observers if one.factory is None or not is_given(one.factory)]
    return recipe.model_copy(update={"observers": kept})


def own_code(recipe: Recipe) -> dict[str, Source]:
    """Return the sources of the user's loaded modules, by module; empty if the recipe names none.

    Modules that only observers use are left out, as observers do not affect the result.
    """
    named = references(recipe)
    if not named:
        return {}
    modules = {reference.partition(":")[0] for reference in named}
    observers = {str(one.factory).partition(":")[0] for one in recipe.observers if one.factory} - modules
    return loaded(recipe.python_path, named, observers)


def check_hosts(recipe: Recipe, world: World) -> None:
    """Refuse code that differs between hosts; called on every rank, one rank per host reads.

    Raises:
        InputError: a module differs; the message has its name and the hosts.
    """
    if not references(recipe) or len(set(world.hosts)) == 1:
        return
    reads = world.hosts.index(world.hosts[world.rank]) == world.rank
    own = own_code(recipe) if reads else {}
    everywhere = world.gather({name: source.hash for name, source in own.items()})
    for rank, hashes in enumerate(everywhere):
        for name in sorted(hashes.keys() & everywhere[0].keys()):
            if hashes[name] != everywhere[0][name]:
                raise InputError(
                    f"module {name} is not the same on all hosts",
                    got=f"one on {world.hosts[0]} and another on {world.hosts[rank]}",
                    remedy="keep the recipe and its code in a folder that all hosts share",
                )


@dataclass(frozen=True)
class CodeVersion:
    """The user's modules of the rounds from `since` on."""

    since: int
    files: Mapping[str, Source]


class CodeRecord:
    """The file ``code.json`` of a run folder; used on rank 0 alone.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path):
        self._path, self._accepted_path = folder / CODE_FILE, folder / ACCEPTED_CODE_FILE
        self._recipe: Recipe | None = None
        self._looked_at = 0

    def exists(self) -> bool:
        """Whether the file exists."""
        return self._path.exists()

    def is_new(self, recipe: Recipe, done: int) -> bool:
        """Whether the current code differs from the code of the `done` rounds."""
        return bool(self.changes(recipe)) or int(self._read()["since"]) > done

    def refuse_changes(self, recipe: Recipe) -> None:
        """Refuse to continue a run with changed code.

        Raises:
            InputError: the code was changed; the message has the files.
        """
        changes = self.changes(recipe)
        if changes and self._accepted() != self._present(recipe):
            where = str(self._path.parent)
            raise InputError(f"your code is another than this run's: {changes}", where=where, remedy=EDITED)

    def changes(self, recipe: Recipe) -> str:
        """Name the recorded files that differ from those loaded, or on disk if not loaded yet; "" if none."""
        return first_of(list(self.changed(recipe).values()), 3)

    def versions(self) -> list[CodeVersion]:
        """Return the versions of the user's code, in the order of the rounds; one without files if none is recorded.

        Raises:
            InputError: the file is malformed.
        """
        found = self._read()
        return [
            CodeVersion(one["since"], {name: Source(**entry) for name, entry in one["files"].items()})
            for one in (*found["before"], found)
        ]

    def changed(self, recipe: Recipe) -> dict[str, str]:
        """Return the name of each recorded module that has changed → a phrase for messages on its file."""
        return self.changed_from(recipe, self._files())

    def changed_from(self, recipe: Recipe, files: Mapping[str, Source]) -> dict[str, str]:
        """Return the name of each of these modules that has changed → a phrase for messages on its file."""
        if not references(recipe):
            return {}
        here, changed = own_code(recipe), {}
        for name, then in files.items():
            now = here.get(name) or _now(then, recipe.python_path)
            if now.hash == then.hash:  # "" if it was gone, too, when the code was last accepted
                continue
            if not now.hash:
                changed[name] = f"{then.file} is gone"
            else:
                line = then.differs_at(now)
                changed[name] = then.file + (f" differs from line {line}" if line else " differs")
                if line and _holds_values(then, line) and _holds_values(now, line):
                    changed[name] += f", {OTHER_VALUES}"
        return changed

    def accept(self, recipe: Recipe) -> None:
        """Note that the present code is accepted; `write` records it, once a round is trained with it.

        Raises:
            OSError: as the system reports it.
        """
        if self.changes(recipe):
            write_whole(self._accepted_path, json.dumps(self._present(recipe), indent=1) + "\n")

    def write(self, recipe: Recipe, done: int) -> None:
        """Record the code of the rounds after `done`; that of the earlier rounds is kept, too, if it differs.

        Raises:
            InputError: the present file is malformed.
            OSError: as the system reports it.
        """
        self._recipe, code = recipe, own_code(recipe)
        self._accepted_path.unlink(missing_ok=True)
        if not done:
            if code:
                self._write({"files": _plain(code), "since": 1, "before": []})
            else:
                self._path.unlink(missing_ok=True)
            return
        if not code and not self.exists():
            return
        found = self._read()
        since, then = min(found["since"], done + 1) if self.exists() else done + 1, self._files()
        now = {name: code.get(name) or _now(source, recipe.python_path) for name, source in then.items()} | code
        if any(now[name].hash != source.hash for name, source in then.items()):
            kept = {"files": found["files"], "since": since}
            since, found = done + 1, {**found, "before": [*found["before"], kept]}
        if (_plain(now), since) != (found["files"], found["since"]):
            self._write({**found, "files": _plain(now), "since": since})

    def add(self) -> None:
        """Record modules imported since `write`; costs nothing if there are none.

        Raises:
            OSError: as the system reports it.
        """
        if self._recipe is None or len(sys.modules) == self._looked_at:
            return
        self._looked_at = len(sys.modules)
        if not references(self._recipe):
            return
        found = self._read()
        new = {name: source for name, source in own_code(self._recipe).items() if name not in found["files"]}
        if new:
            self._write({**found, "files": found["files"] | _plain(new)})

    def _accepted(self) -> Any:
        """Return module → hash of the accepted code; None if none was accepted."""
        try:
            return parse_json(read_text(self._accepted_path))
        except (OSError, ValueError):
            return None

    def _present(self, recipe: Recipe) -> dict[str, str]:
        """Return the recorded modules with the hashes that they have now."""
        here = own_code(recipe)
        now = {name: here.get(name) or _now(then, recipe.python_path) for name, then in self._files().items()}
        return {name: source.hash for name, source in sorted(now.items())}

    def _files(self) -> dict[str, Source]:
        return {name: Source(**entry) for name, entry in self._read()["files"].items()}

    def _read(self) -> dict[str, Any]:
        """Return the file's content; an empty record if there is no file.

        Raises:
            InputError: it is malformed, or cannot be read.
        """
        try:
            return CodeFile.model_validate(parse_json(read_text(self._path))).model_dump()
        except FileNotFoundError:
            return {**NO_CODE}
        except OSError as error:
            raise InputError("cannot be read", where=str(self._path), got=error.strerror or str(error)) from None
        except ValueError:  # pydantic's, too
            raise InputError("not a record of code", where=str(self._path), remedy=FRESH) from None

    def _write(self, content: Mapping[str, Any]) -> None:
        files = dict(sorted(content["files"].items()))
        write_whole(self._path, json.dumps({**content, "files": files}, indent=1) + "\n")


def _holds_values(source: Source, line: int) -> bool:
    """Whether a line, from 1, is of an object that was given from Python, stored by its values."""
    lines = [] if source.path or source.text is None else source.text.splitlines()
    return line <= len(lines) and RESTORED in lines[line - 1]


def _now(then: Source, python_path: Sequence[Path]) -> Source:
    """Return the current version of a recorded source, searched in `python_path`."""
    if not then.path:
        return source_without_file(then.file)
    places = [folder / then.file for folder in python_path]
    path = next((place for place in places if place.is_file()), Path(then.path))
    return read_source(then.file, str(path))


def _plain(code: Mapping[str, Source]) -> dict[str, dict[str, Any]]:
    return {name: asdict(source) for name, source in code.items()}
