"""The methods, one file each: its parts `LOCAL`, `SERVER` and perhaps `NORMALIZE`; `TITLE`, `REFERENCES`, `EXAMPLE`.

    algorithm: {name: fedexp, eps: 1e-3}                                     fedexp.py
    algorithm: {local: prox, normalize: steps, server: yogi, mu: 0.1}        any parts that have a `choice` name
    algorithm: {local: fedprox, server: fedyogi, mu: 0.1}                    or by the methods that they are parts of
    algorithm: {factory: "my.module:my_method", gain: 2}                     the user's function, called with gain=2

Each part gets the parameters it declares; the rest is refused. A new method is a new file here; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcfed.config import registry
from hpcfed.config.factory import made
from hpcfed.config.hints import for_method, for_parameter, for_slip
from hpcfed.config.load import validated
from hpcfed.config.recipe import Algorithm
from hpcfed.errors import InputError, nearest
from hpcfed.types import Method, Part

DEFAULT_PARTS = {"local": "plain", "normalize": "none", "server": "step"}
"""What a combination is made of where it names nothing: FedAvg."""


def names() -> list[str]:
    """All methods by their recipe names."""
    return registry.names(__name__)


@cache
def choices(role: str) -> Mapping[str, type[Part]]:
    """The parts that a combination may name for ``LOCAL``, ``NORMALIZE`` or ``SERVER``, by their names."""
    kinds = [getattr(_module(name), role, None) for name in names()]
    return {kind.choice: kind for kind in kinds if kind is not None and kind.choice is not None}


def trains_personal(section: Algorithm, python_path: Sequence[Path] = ()) -> bool:
    """Return whether each client trains a model of its own beside the common one, by a rule's `trains_personal`.

    Raises:
        InputError: as `build` does.
    """
    return bool(getattr(build(section, python_path).local, "trains_personal", False))


def build(section: Algorithm, python_path: Sequence[Path] = ()) -> Method:
    """Build the method that the recipe's ``algorithm`` section asks for.

    Args:
        section: the recipe's ``algorithm``.
        python_path: where a factory's module may lie.

    Raises:
        InputError: unknown method, part or parameter, a missing one, value out of range, a factory that fails.
    """
    if section.factory is not None:
        return _from_factory(section, python_path)
    if section.name is None:
        picked = combined(section)
        kinds = [_choice(role, name) for role, name in picked.items()]
        title = "-".join(picked.values())
    else:
        if section.name not in names():
            remedy = for_method(section.name, names())
            raise InputError(f"unknown algorithm.name {section.name!r}", remedy=remedy)
        kinds, title = parts_of(section.name), section.name
    local, normalize, server = _parts(kinds, section.parameters, title)
    return Method(title, local, server, normalize)


def combined(section: Algorithm) -> dict[str, str]:
    """Return the parts of a combination by their own names, defaults filled in; a method's name stands for its part.

    Raises:
        InputError: the part of a named method has no meaning outside it.
    """
    return {role: _own_name(role, getattr(section, role) or default) for role, default in DEFAULT_PARTS.items()}


def parts_of(name: str) -> list[type[Part] | None]:
    """The local part, the normalisation and the server part of a method."""
    module = _module(name)
    return [module.LOCAL, getattr(module, "NORMALIZE", None), module.SERVER]


@cache
def titles() -> Mapping[str, str]:
    """Methods' names as their papers write them, by recipe name: each file's ``TITLE``."""
    return {name: _module(name).TITLE for name in names()}


@cache
def references() -> Mapping[str, tuple[str, ...]]:
    """Keys of methods' papers in ``hpcfed/lab/cite/references.bib``: each file's ``REFERENCES``."""
    return {name: _module(name).REFERENCES for name in names()}


@cache
def references_of_parts() -> Mapping[str, tuple[str, ...]]:
    """Keys of parts' papers by their names in a combination: `REFERENCES` of the file that defines a part."""
    kinds = [kind for role in DEFAULT_PARTS for kind in choices(role.upper()).values()]
    return {str(kind.choice): import_module(kind.__module__).REFERENCES for kind in kinds}


@cache
def examples() -> Mapping[str, Mapping[str, Any]]:
    """Parameters of each method away from those at which it is another method: each file's ``EXAMPLE``."""
    return {name: _module(name).EXAMPLE for name in names()}


def _module(name: str) -> Any:
    return registry.entry(__name__, name)


def _own_name(role: str, name: str) -> str:
    """Return ``yogi`` for ``fedyogi`` as the server of a combination; what is no method's name is returned as it is."""
    if name in choices(role.upper()) or name not in names():
        return name
    parts = dict(zip(DEFAULT_PARTS, parts_of(name), strict=True))
    part, normalization = parts[role], parts["normalize"]
    if part is None or part.choice is None:
        known = f"known: {', '.join(sorted(choices(role.upper())))}"
        instead = f"; normalize: {normalization.choice} is what {name} adds" if normalization is not None else ""
        raise InputError(f"algorithm.{role} {name!r} has no meaning outside {name}", remedy=known + instead)
    return part.choice


def _choice(role: str, name: str) -> type[Part] | None:
    if role == "normalize" and name == "none":
        return None
    known = choices(role.upper())
    if name not in known:
        raise InputError(f"unknown algorithm.{role} {name!r}", remedy=nearest(name, known))
    return known[name]


def _parts(kinds: Sequence[type[Part] | None], parameters: Mapping[str, Any], title: str) -> list[Any]:
    """Build the parts, each from the parameters that it declares; all of `parameters` must belong to one."""
    known = {key for kind in kinds if kind is not None for key in kind.model_fields}
    for key in parameters:
        if key not in known:
            remedy = for_parameter(key, known) if known else for_slip(key) or "it has no parameters"
            raise InputError(f"unknown key 'algorithm.{key}' for {title}", remedy=remedy)
    return [
        kind
        and validated(
            kind, {key: value for key, value in parameters.items() if key in kind.model_fields}, "", "algorithm"
        )
        for kind in kinds
    ]


def _from_factory(section: Algorithm, python_path: Sequence[Path]) -> Method:
    """Call the user's function with the section's parameters as keywords."""
    reference = str(section.factory)
    method = made(reference, section.parameters, python_path, "algorithm.factory", "check the keys of algorithm")
    if not isinstance(method, Method):
        raise InputError(
            f"algorithm.factory {reference!r}", expected="a hpcfed.types.Method", got=type(method).__name__
        )
    return method
