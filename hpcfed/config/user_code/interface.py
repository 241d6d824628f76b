"""Checks of the functions of user-defined classes: their names and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches

from hpcfed.config.user_code.blame import defined_at
from hpcfed.errors import InputError

SPELLING_CUTOFF = 0.85
"""Likeness of two names from which one is taken for the other, mistyped."""


def check_names(what: str, part: object, called: Iterable[str]) -> None:
    """Refuse a function whose name resembles one of those that are `called`: the inherited one would run instead.

    Args:
        what: the part, for messages.

    Raises:
        InputError: naming both.
    """
    own = [kind for kind in type(part).__mro__ if kind.__module__.partition(".")[0] not in ("hpcfed", "pydantic")]
    names = {name for kind in own for name, found in vars(kind).items() if inspect.isfunction(found)}
    for name in sorted(names - {*called}):
        for near in get_close_matches(name, {*called} - names, 1, SPELLING_CUTOFF) if name[0] != "_" else []:
            raise InputError(
                f"{what}, has {name!r}, which hpcfed does not call",
                where=defined_at(part, name),
                remedy=f"did you mean {near!r}? Else give it another name",
            )


def check_arguments(what: str, part: object, name: str, wanted: object) -> None:
    """Refuse a function whose arguments differ from those of `wanted`, the protocol's, in number or in order.

    Arguments are passed by position, so they may have other names, but none of the protocol's in another place.

    Args:
        what: the function, for messages.

    Raises:
        InputError: naming the function and its arguments.
    """
    function = getattr(part, name)
    if not inspect.isfunction(wanted) or not callable(function):
        return
    expected = [key for key in inspect.signature(wanted).parameters if key != "self"]
    found = inspect.signature(function)
    moved = [key for k, key in enumerate(found.parameters) if key in expected and expected[k : k + 1] != [key]]
    if moved or not _can_be_called(found, len(expected)):
        raise InputError(
            what,
            where=defined_at(part, name),
            expected=f"the arguments {', '.join(expected)}",
            got=", ".join(found.parameters),
        )


def _can_be_called(signature: inspect.Signature, count: int) -> bool:
    """Return whether a function takes `count` positional arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
