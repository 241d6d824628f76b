"""The user's own code, written in a recipe as ``package.module:name`` and found from the recipe's folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError, nearest


def named_code(recipe: Recipe) -> list[str]:
    """Return what a recipe names of the user's own code, ``package.module:name`` each."""
    sections: tuple[Any, ...] = (recipe.model, recipe.loss, recipe.algorithm, *recipe.observers)
    factories = [section.factory for section in sections if section.factory is not None]
    return [*factories, *recipe.evaluate.metrics.values()]


def imported(reference: str, python_path: Sequence[Path], key: str) -> Callable[..., Any]:
    """Return what ``package.module:name`` names.

    Args:
        reference: the recipe's text.
        python_path: folders to look in, first one first, before what is installed.
        key: the recipe's key, for messages.

    Raises:
        InputError: no such module or name, or the module raises while it is imported.
    """
    module_name, _, function_name = reference.partition(":")
    for folder in reversed(python_path):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise InputError(
            f"{key} {reference!r} cannot be imported",
            got=f"{type(error).__name__}: {error}",
            remedy=f"looked in {', '.join(map(str, python_path)) or 'the installed packages'}",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(
            f"{key}: no function {function_name!r} in {module_name}", remedy=nearest(function_name, public)
        )
    return function
