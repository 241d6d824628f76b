"""The methods, one file each. A file names its two parts, `LOCAL` and `SERVER`; a method is the pair.

``algorithm: {name: fedexp, eps: 1e-3}`` finds ``fedexp.py``, gives each part the parameters it declares, and refuses
the rest. A new method is a new file here; nothing else changes.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from hpcfed.config.load import validated
from hpcfed.config.recipe import Algorithm
from hpcfed.errors import InputError, nearest
from hpcfed.types import Method


def names() -> list[str]:
    """All methods by their recipe names."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def build(section: Algorithm, where: str = "recipe") -> Method:
    """Build the method that the recipe's ``algorithm`` section asks for.

    Raises:
        InputError: unknown method, unknown or missing parameter, value out of range.
    """
    name = section.name
    if name not in names():
        raise InputError(f"unknown algorithm.name {name!r}", where=where, remedy=nearest(str(name), names()))
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    kinds = (module.LOCAL, module.SERVER)
    given = section.parameters
    known = {key for kind in kinds for key in kind.model_fields}
    for key in given:
        if key not in known:
            raise InputError(f"unknown key 'algorithm.{key}' for {name}", where=where, remedy=nearest(key, known))
    local, server = (
        validated(kind, {key: value for key, value in given.items() if key in kind.model_fields}, f"{where}: algorithm")
        for kind in kinds
    )
    return Method(name, local, server)
