"""Observers of a run: objects called on rank 0 at its start, after each round and at its end, without effect on it.

An observer is any object with one or more of these methods:

    start(run)      before the first round of this job; see `Started`
    round(row)      after each round: a copy of its row of ``metrics.jsonl``
    look(round)     after each round: a `hpcfed.loop.Round`, as `hpcfed.rounds` yields it: copies of the parameters, and
                    of the clients' updates where the observer has an attribute ``wants_updates = True``
    end(status)     ``finished``, ``stopped``, ``diverged`` or ``failed``

An observer that raises is logged once, and not called again.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.config import registry
from hpcfed.config.factory import imported, made
from hpcfed.config.load import to_plain
from hpcfed.config.observer import Observer
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.blame import place_of
from hpcfed.config.user_code.settings import settings_kept
from hpcfed.errors import RAISED, InputError
from hpcfed.ranks.world import World
from hpcfed.run_folder.outcome import status_of

log = logging.getLogger("hpcfed")
METHODS = ("start", "round", "look", "end")


@dataclass(frozen=True)
class Started:
    """The argument of ``start``: the resolved recipe and the environment as plain data (copies), and the number of
    rounds done before, more than 0 if the run goes on from a checkpoint.
    """

    name: str
    folder: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    done: int


def check_observers(sections: Sequence[Observer], python_path: Sequence[Path]) -> None:
    """Check that the recipe's observers can be imported, without making any.

    Raises:
        InputError: a library is not installed, or a factory cannot be imported.
    """
    for section in sections:
        if section.factory is not None:
            imported(section.factory, python_path, "observers.factory")
        elif importlib.util.find_spec(str(section.name)) is None:
            remedy = f"pip install {section.name}"
            raise InputError(f"observers: {section.name}, which is not installed", remedy=remedy)


class Observers:
    """The observers of one job; on ranks other than 0 there are none. One that raises is not called again, which `say`
    is called with a line on.

    Attributes:
        want_updates: whether one of them looks at the clients' updates; the same on every rank.

    Raises:
        InputError: one of them cannot be made. The same on every rank.
    """

    def __init__(self, recipe: Recipe, world: World, say: Callable[[str], None]):
        self._recipe, self._say = recipe, say
        self._observers: list[tuple[str, Any]] = []
        self.want_updates: bool = world.on_root(self._make)

    @contextmanager
    def watching(self, environment: Mapping[str, Any], done: int) -> Iterator[None]:
        """Call each observer's ``start``, and its ``end`` however the block ends."""
        for name, observer in [*self._observers]:
            recipe, facts = to_plain(self._recipe), copy.deepcopy(dict(environment))
            self._call(name, observer, "start", Started(self._recipe.name, self._recipe.output, recipe, facts, done))
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            for name, observer in [*self._observers]:
                self._call(name, observer, "end", status_of(error))

    def round(self, row: Mapping[str, Any]) -> None:
        """Call each observer's ``round``."""
        for name, observer in [*self._observers]:
            self._call(name, observer, "round", copy.deepcopy(dict(row)))

    def look(self, seen: Callable[[bool], Any]) -> None:
        """Call each observer's ``look`` with what `seen` returns, a new copy for each, with updates or without."""
        for name, observer in [*self._observers]:
            if callable(getattr(observer, "look", None)):
                self._call(name, observer, "look", seen(_wants_updates(observer)))

    def _make(self) -> bool:
        for section in self._recipe.observers:
            with settings_kept():
                self._observers.append((str(section.name or section.factory), _made(section, self._recipe.python_path)))
        return any(_wants_updates(observer) for _, observer in self._observers)

    def _call(self, name: str, observer: Any, method: str, argument: Any) -> None:
        function = getattr(observer, method, None)
        if function is None:
            return
        try:
            with settings_kept():
                function(argument)
        except RAISED as error:  # an observer's error of any kind must not end the run
            place = place_of(error)
            words = f"{method} raised" + (f" at {place}" if place else "")
            log.warning("observer %s: %s; it is not called again", name, words, exc_info=error)
            self._say(f"{self._recipe.name}: observer {name}: {words}; it is not called again (logs/rank-0.log)")
            self._observers.remove((name, observer))


def _wants_updates(observer: Any) -> bool:
    return getattr(observer, "wants_updates", False) is True and callable(getattr(observer, "look", None))


def _made(section: Observer, python_path: Sequence[Path]) -> Any:
    if section.factory is None:
        return registry.entry(__name__, str(section.name)).observer(section.args)
    observer = made(section.factory, section.args, python_path, "observers.factory", "check its args")
    if not any(callable(getattr(observer, method, None)) for method in METHODS):
        expected = f"an object with {', '.join(METHODS)}, or one of them"
        raise InputError(
            f"observers.factory {section.factory!r}", expected=expected, got=f"one of {type(observer).__name__}"
        )
    return observer
