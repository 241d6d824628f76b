"""Objects given from Python, as a module `GIVEN` that recipes name: ``from_python:net``.

The module is its recorded text: what a run trains with is what ``code.json`` has. Where no text can stand for an
object, the module has the objects themselves, and the run says that nobody can verify it.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from hpcfed.config.user_code.capture import Capture, Statement, joined
from hpcfed.config.user_code.finder import GIVEN
from hpcfed.config.user_code.modules import Source
from hpcfed.config.user_code.recorded import PLACE
from hpcfed.config.user_code.values import NotStorable
from hpcfed.errors import RAISED
from hpcfed.ranks.world import World

WATCHING = "watching_from_python"
"""Module of the observers, which decide no result and are not recorded."""


@dataclass(frozen=True)
class GivenCode:
    """Objects by the names under which a recipe has them.

    Attributes:
        statements: of the module's text.
        hindrance: why the text does not stand for them; "" if it does.
        live: the objects, which take the text's place then.
        folders: of the user's files that the text imports.
        observers: which are never part of the text.
    """

    statements: tuple[Statement, ...] = ()
    hindrance: str = ""
    live: Mapping[str, Any] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    observers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The module's source; "" where no object was given."""
        return joined(self.statements) if self.statements else ""

    def install(self) -> None:
        """Make the modules importable, in place of those of an earlier call."""
        if self.text:
            module, source = _module(GIVEN), self.source
            if self.hindrance:
                vars(module).update(self.live)
            else:
                place = f"{PLACE}/{source.file}"
                linecache.cache[place] = len(self.text), None, self.text.splitlines(keepends=True), place
                line = 1
                for statement in self.statements:
                    exec(statement.compiled(place, line), vars(module))
                    line += statement.text.count("\n") + 2
            vars(module)["__source__"] = source
        if self.observers:
            vars(_module(WATCHING)).update({name: _returns(value) for name, value in self.observers.items()})

    @property
    def source(self) -> Source:
        """The module's source; without a text if that does not stand for the objects."""
        digest = xxhash.xxh3_128_hexdigest(self.text.encode())
        return Source(f"{GIVEN}.py", "", digest, None if self.hindrance else self.text)

    def on_all_ranks(self, world: World) -> GivenCode:
        """Return the objects installed on every rank: rank 0's text, or each rank's own where that cannot be run."""
        own = self._tried()
        text, hindrance = world.broadcast((own.text, own.hindrance))
        statements = own.statements if text == own.text else (Statement(text.removesuffix("\n")),)
        found = replace(own, statements=statements, hindrance=hindrance)
        found.install()
        return found

    def _tried(self) -> GivenCode:
        """Return the same, with a hindrance where the text cannot be run."""
        try:
            self.install()
        except RAISED as error:  # definitions of the user's may raise anything
            return replace(self, hindrance=f"{type(error).__name__}: {error}")
        return self


def is_given(reference: str) -> bool:
    """Whether a recipe's ``module:name`` is an object that was given from Python."""
    return reference.partition(":")[0] in (GIVEN, WATCHING)


class Collector:
    """Gathers the objects of one call, in the order in which recipes have them."""

    def __init__(self) -> None:
        self._capture = Capture()
        self._live: dict[str, Any] = {}
        self._observers: dict[str, Any] = {}
        self._hindrance = ""

    def name(self, value: Any, key: str) -> str:
        """Add an object, and return the reference ``module:name`` to it."""
        return self._added(self._capture.add, value, key, value)

    def maker(self, value: Any, key: str) -> str:
        """Add a function that returns the object, and return the reference to it."""
        return self._added(self._capture.add_maker, value, key, _returns(value))

    def note(self, module: str) -> None:
        """Note the folder of a module of the user's that the recipe names."""
        self._capture.note(module)

    def observer(self, value: Any) -> str:
        """Add an observer, as it is, and return the reference to a function that returns it."""
        name = f"observer_{len(self._observers) + 1}"
        self._observers[name] = value
        return f"{WATCHING}:{name}"

    def _added(self, add: Any, value: Any, key: str, live: Any) -> str:
        try:
            name = add(value, key)
        except NotStorable as error:
            self._hindrance = self._hindrance or f"{key} uses {error}"
            name = key if key not in self._live else f"{key}_{len(self._live) + 1}"
        self._live[name] = live
        return f"{GIVEN}:{name}"

    def result(self) -> GivenCode:
        """Return what was added."""
        statements = tuple(self._capture.statements) if self._live else ()
        return GivenCode(statements, self._hindrance, self._live, tuple(self._capture.folders), self._observers)


def _module(name: str) -> ModuleType:
    """Make an empty module in place of one of an earlier call."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def _returns(value: Any) -> Any:
    return lambda: value
