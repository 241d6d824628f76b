"""Which modules a piece of user code may use, read off the imports in its text and in theirs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

FINDS_BY_NAME = ("importlib", "pkgutil", "runpy", "pickle", "dill", "cloudpickle", "joblib")
"""Modules by which code reaches others whose names do not stand in import statements."""
RUNS_TEXT = ("__import__", "exec", "eval")
"""Functions by which it does."""


def reached(
    modules: Iterable[str], texts: Iterable[str | None], text_of: Callable[[str], str | None]
) -> frozenset[str] | None:
    """Return the names of all modules that some modules and texts may import, with those in between.

    None if that cannot be read off: a module has no text, or finds others by names that it computes.

    Args:
        modules: their names.
        texts: of code without a module.
        text_of: returns the text of a module by name: None if there is none, "" if it imports nothing of the user's.
    """
    found, left = set[str](), [*modules]
    for text in texts:
        if (names := _imported(text, "")) is None:
            return None
        left += names
    while left:
        for name in _with_parents(left.pop()):
            if name in found:
                continue
            found.add(name)
            if (names := _imported(text_of(name), name)) is None:
                return None
            left += names
    return frozenset(found)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: number + 1]) for number in range(len(parts)))


@lru_cache(maxsize=256)
def _imported(text: str | None, name: str) -> frozenset[str] | None:
    """Return the names that a module's text may import; None if they cannot be read off.

    Those of relative imports are from the module's own name and from its package, whichever it is.
    """
    try:
        nodes = [*ast.walk(ast.parse(text))] if text is not None else None
    except (SyntaxError, ValueError):
        return None
    if nodes is None or any(isinstance(node, ast.Name) and node.id in RUNS_TEXT for node in nodes):
        return None
    if any(isinstance(node, ast.Attribute) and node.attr == "modules" and _is_sys(node.value) for node in nodes):
        return None
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for origin in _origins(node, name):
                found.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)} - {""})
    return None if any(one.partition(".")[0] in FINDS_BY_NAME for one in found) else frozenset(found)


def _origins(node: ast.ImportFrom, name: str) -> list[str]:
    """Return the modules from which a statement may import, in a module of that name or a package's ``__init__``."""
    own = node.module or ""
    if not node.level:
        return [own]
    parts = name.split(".")
    packages = [".".join(parts[: len(parts) - up]) for up in (node.level - 1, node.level)]
    return [f"{package}.{own}".strip(".") for package in packages if package]


def _is_sys(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "sys"
