"""User code named in a recipe, ``package.module:name``: its import from the recipe's folder, and calls of factories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcfed.config.metrics import references
from hpcfed.config.recipe import Local, Recipe
from hpcfed.config.user_code.blame import defined_at, described, place_of, refusal
from hpcfed.config.user_code.finder import GIVEN, import_named
from hpcfed.errors import RAISED, InputError, did_you_mean, nearest, shown

STEP = ("parameters", "batch", "context")
"""Arguments of a local step, by position."""


def named_code(recipe: Recipe) -> list[str]:
    """Return the recipe's references to user code, ``package.module:name`` each, once."""
    sections: tuple[Any, ...] = (
        recipe.model,
        recipe.loss,
        recipe.algorithm,
        *recipe.chain_parts,
        *recipe.observers,
    )
    factories = [section.factory for section in sections if section.factory is not None]
    steps = [recipe.local.step] if recipe.local.step is not None else []
    return list(dict.fromkeys([*factories, *steps, *references(recipe.evaluate.metrics)]))


def imported(reference: str, python_path: Sequence[Path], key: str) -> Callable[..., Any]:
    """Return the callable that ``package.module:name`` refers to.

    Args:
        reference: the recipe's text.
        python_path: folders to search, in this order, before the installed packages.
        key: the recipe's key, for messages.

    Raises:
        InputError: no such module or name, or the module raises while it is imported.
    """
    module_name, _, function_name = reference.partition(":")
    try:
        module = import_named(module_name, python_path, key)
    except InputError:
        raise
    except RAISED as error:  # the user's module may raise anything
        place = place_of(error)
        looked = f"looked in {', '.join(map(str, python_path)) or 'the installed packages'}"
        if module_name == GIVEN:
            looked = "it was an object of Python: give it again, or let --run-code of verify and replay take its text"
        is_absent = isinstance(error, ModuleNotFoundError) and not place
        likely = _likely_module(module_name, python_path) if is_absent else ""
        raise InputError(
            f"{key} {reference!r} cannot be imported",
            got=described(error) + (f" ({place})" if place else ""),
            remedy=f"{likely} {looked}".strip(),
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function) and hasattr(module, function_name):
        got = f"{shown(function)}, of type {type(function).__name__}"
        raise InputError(f"{key} {reference!r}", expected="a function or a class", got=got)
    if not callable(function):
        public = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
        defined = [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]
        raise InputError(
            f"{key}: no function {function_name!r} in {module_name}",
            remedy=did_you_mean(function_name, public) or nearest(function_name, defined or public),
        )
    return function


def _likely_module(name: str, python_path: Sequence[Path]) -> str:
    """Return ``did you mean 'x'?`` for the module of the user's closest to one that does not exist, "" for none."""
    there: set[str] = set()
    for folder in python_path:
        with suppress(OSError):
            there.update(file.stem for file in folder.glob("*.py"))
    return did_you_mean(name.removesuffix(".py"), there)


def own_step(section: Local, python_path: Sequence[Path]) -> Callable[..., Any] | None:
    """Return the function that ``local.step`` names; None if the recipe has none.

    Raises:
        InputError: it cannot be imported, or takes other arguments than (parameters, batch, context, **step_args).
    """
    if section.step is None:
        return None
    function = imported(section.step, python_path, "local.step")
    try:
        signature(function).bind(*STEP, **section.step_args)
    except TypeError:
        where, takes = defined_at(function), [*signature(function).parameters]
        known = takes[len(STEP) :]
        unknown = [name for name in section.step_args if name not in known]
        raise InputError(
            f"local.step {section.step!r}",
            where=where,
            expected=f"a function of {', '.join((*STEP, *section.step_args))}",
            got=f"one of {', '.join(takes) or 'nothing'}",
            remedy=nearest(unknown[0], known) if unknown and known else "correct it, or local.step_args",
        ) from None
    except ValueError:  # a callable that has no signature is tried by the first client
        pass
    return function


def made(reference: str, args: Mapping[str, Any], python_path: Sequence[Path], key: str, remedy: str) -> Any:
    """Return the result of the user's factory, called with `args`.

    Args:
        reference, python_path, key: see `imported`.
        args: its keyword arguments.
        remedy: of the error, if the factory raises that has arguments, or lacks some.

    Raises:
        InputError: it cannot be imported, takes other arguments, or raises.
    """
    factory = imported(reference, python_path, key)
    try:
        return factory(**args)
    except RAISED as error:  # the user's function may raise anything
        place = place_of(error)
        at = f" ({place})" if place else ""
        if isinstance(error, ValidationError) and (name := _refused(error)) in args:
            expected, got = refusal(error)
            whose = f"{error.title} refuses it, in {key} {reference!r}{at}"
            raise InputError(f"{_prefix(key)}{name}", expected=expected, got=got, remedy=whose) from error
        what = f"{key} {reference!r} raised {described(error)}{at}"
        misfit = isinstance(error, TypeError) and not place  # raised by the call, not in the factory
        remedy = (misfit and _remedy_of_call(factory, args, key)) or (remedy if args or misfit else "")
        raise InputError(
            what, got=f"the keys {', '.join(args) or '(none)'}" if misfit else "", remedy=remedy
        ) from error


def _refused(error: ValidationError) -> str:
    """Return the name of the parameter that a part refuses."""
    return ".".join(map(str, error.errors(include_url=False)[0]["loc"]))


def _prefix(key: str) -> str:
    """Return the place of a factory's arguments in the recipe: a method's stand beside ``factory``."""
    section = key.rpartition(".")[0]
    return f"{section}." if section == "algorithm" else f"{section}.args."


def _remedy_of_call(factory: Callable[..., Any], args: Mapping[str, Any], key: str) -> str:
    """Return a remedy for arguments that a factory does not have; "" if it has them all, or nothing is known of it."""
    try:
        taken = signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    known = [one.name for one in taken if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    unknown = [name for name in args if name not in known]
    if not unknown or any(one.kind is Parameter.VAR_KEYWORD for one in taken):
        return ""
    if key == "algorithm.factory" and "args" in unknown:
        return "a method's parameters stand beside 'factory': {factory: …, " + f"{(known or ['gain'])[0]}: …" + "}"
    return nearest(unknown[0], known) if known else "it takes no parameters"
