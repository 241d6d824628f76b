"""The methods of a study, as ``--methods`` names them: ``fedavg,feddyn:alpha=0.1,fedexp:local.lr=0.05``.

A method is a value of ``algorithm.name``, or ``recipe`` for the recipe's method. Its settings follow after colons:
``key=value`` sets ``algorithm.key``; a key with a dot is a key of the whole recipe. If the recipe names the same
method, its parameters in the recipe are kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpcfed import algorithms
from hpcfed.config.recipe import Algorithm, Recipe
from hpcfed.errors import InputError, nearest
from hpcfed.lab.report.group import method_name

OPTION, OWN, REFERENCE = "--methods", "recipe", "fedavg"
OF_ALL = ("local.steps", "local.epochs", "cohort.", "evaluate.", "stop.")
"""Prefixes of recipe keys that must be the same for all methods."""


@dataclass(frozen=True)
class MethodChoice:
    """One method of a study.

    Attributes:
        key: the method's name in file names.
        title: the method's name in tables.
        overrides: overrides of the recipe that select the method, ``key=value``.
        name: value of ``algorithm.name``, or ``recipe`` for the recipe's method.
        examples: recipe keys of the required parameters that the user has not set; `overrides` sets example values,
            which tuning may replace.
        personal: whether each site trains a personal model beside the common one.
    """

    key: str
    title: str
    overrides: tuple[str, ...]
    name: str = ""
    examples: tuple[str, ...] = ()
    personal: bool = False


@dataclass(frozen=True)
class Methods:
    """The methods of a study, the key of the `reference` with which all are compared, and remarks for the user."""

    each: tuple[MethodChoice, ...]
    reference: str
    remarks: tuple[str, ...] = ()


def parse_methods(text: str, recipe: Recipe, tuned: Collection[str] = ()) -> Methods:
    """Return the methods of a comma-separated list; FedAvg, the reference, is put first if it is missing.

    `tuned` names the parameters that tuning will choose, such as ``feddyn:alpha``. Any other required parameter without
    a value in the list gets an example value, with a remark.

    Raises:
        InputError: a method is unknown or named twice; or a setting is not ``key=value``, or its key must have one
            value for all methods.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError(OPTION, expected="names with commas between, such as fedavg,fedexp", got=repr(text))
    remarks: list[str] = []
    names = [word.partition(":")[0] for word in words]
    own = recipe.algorithm.name == REFERENCE and OWN in names
    if REFERENCE not in names and not own:
        words.insert(0, REFERENCE)
        remarks.append("FedAvg is added: differences are from it")
    found = [_choice(word, recipe, remarks, tuned) for word in words]
    for number, one in enumerate(found):
        if one.key in [other.key for other in found[:number]]:
            raise InputError(f"the method {one.title!r} stands twice", where=OPTION, remedy="name it once")
    reference = next(
        one.key for one, word in zip(found, words, strict=True) if word.partition(":")[0] == (OWN if own else REFERENCE)
    )
    return Methods(tuple(found), reference, tuple(remarks))


def _choice(word: str, recipe: Recipe, remarks: list[str], tuned: Collection[str]) -> MethodChoice:
    name, *settings = word.split(":")
    known = [*algorithms.names(), OWN]
    if name not in known:
        remedy = nearest(name, known)
        if recipe.algorithm.factory is not None:
            remedy = f"{remedy}; the recipe's own method is {OWN!r}"
        raise InputError(f"no method {name!r}", where=OPTION, remedy=remedy)
    pairs = [_pair(word, setting) for setting in settings]
    own = [f"algorithm.{key}={value}" for key, value in pairs if "." not in key]
    others = [f"{key}={value}" for key, value in pairs if "." in key]
    shown = _shown(pairs)
    key = re.sub(r"[^\w.]+", "-", word)
    if name == OWN:
        if recipe.algorithm.factory is not None:
            title = algorithms.build(recipe.algorithm, recipe.python_path).name
        else:
            title = method_name(recipe.model_dump(mode="json"))
        personal = algorithms.trains_personal(recipe.algorithm, recipe.python_path)
        return MethodChoice(key, title + shown, (*own, *others), name, personal=personal)
    start = [] if recipe.algorithm.name == name else [f"algorithm={name}"]
    missing: dict[str, object] = {}
    if start:
        missing = _missing(name, [key for key, _ in pairs])
        start += [f"algorithm.{key}={value}" for key, value in missing.items()]
        untuned = {key: value for key, value in missing.items() if f"{name}:{key}" not in tuned}
        remarks += [
            f"{name}: {key}={value}, an example; name your own by {OPTION} {name}:{key}=…"
            for key, value in untuned.items()
        ]
        shown = shown or _shown(untuned.items())
    examples = tuple(f"algorithm.{parameter}" for parameter in missing)
    example = Algorithm.model_validate({"name": name, **algorithms.examples()[name]})
    personal = algorithms.trains_personal(example)
    return MethodChoice(key, algorithms.titles()[name] + shown, (*start, *own, *others), name, examples, personal)


def _pair(word: str, setting: str) -> tuple[str, str]:
    """Return key and value of a method's setting.

    Raises:
        InputError: it has no such form, or belongs to all methods.
    """
    key, equals, value = setting.partition("=")
    if not (key and equals and value):
        raise InputError(f"method {word!r}", where=OPTION, expected="name:key=value", got=repr(setting))
    if key.startswith(OF_ALL):
        raise InputError(f"method {word!r}", where=OPTION, expected=f"one {key} for all methods", got=repr(setting))
    return key, value


def _shown(settings: Collection[tuple[str, object]]) -> str:
    """Return settings in parentheses behind a title; "" for none."""
    return f" ({', '.join(f'{key} {value}' for key, value in settings)})" if settings else ""


def _missing(name: str, given: Sequence[str]) -> dict[str, object]:
    """Return example values of a method's required parameters that are not among the keys `given`."""
    parts = [part for part in algorithms.parts_of(name) if part is not None]
    needed = {key for part in parts for key, field in part.model_fields.items() if field.is_required()}
    return {key: value for key, value in algorithms.examples()[name].items() if key in needed and key not in given}
