"""Attributes of a federation file as other programs write them: text in any form, integers of any width."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from hpcfed.errors import InputError, visible
from hpcfed.io.text import Malformed, parse_json

READABLE = (h5py.h5t.STRING, h5py.h5t.INTEGER, h5py.h5t.FLOAT)
LARGEST = 1 << 26
"""Bytes of a text of fixed length."""


class Attributes:
    """Typed access to a file's attributes.

    `wrong` makes the error, from what is wrong, what was expected and what was found.
    """

    def __init__(self, file: h5py.File, wrong: Callable[..., InputError]):
        self._attrs = file.attrs
        self._wrong = wrong

    def text(self, name: str) -> str:
        """Return an attribute as text; "" where absent.

        Raises:
            InputError: it is neither text nor a number.
        """
        return text(self._value(name)) if name in self._attrs else ""

    def integer(self, name: str) -> int | None:
        """Return one integer, or None where absent.

        Raises:
            InputError: it is no single integer.
        """
        if name not in self._attrs:
            return None
        value = np.asarray(self._value(name))
        if value.size != 1 or value.dtype.kind not in "iu":
            raise self._wrong(f"attribute {name!r}", expected="one integer", got=str(value.tolist())[:40])
        return int(value.item())

    def json(self, name: str) -> Any:
        """Return what a JSON text stands for, or None where absent.

        Raises:
            InputError: it is no JSON.
        """
        if name not in self._attrs:
            return None
        written = self.text(name)
        try:
            return parse_json(written)
        except Malformed:
            raise self._wrong(f"attribute {name!r}", expected="JSON", got=repr(written[:40])) from None

    def json_object(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object, or None where absent.

        Raises:
            InputError: it is something else.
        """
        value = self.json(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(f"attribute {name!r}", expected="a JSON object", got=json.dumps(value)[:40])
        return _made_visible(value)

    def _value(self, name: str) -> Any:
        """Read a single text or number; nothing else is read, as HDF5 does not survive damaged types of other kinds."""
        stored = self._attrs.get_id(name)
        kind = stored.get_type()
        count = math.prod(stored.shape) if stored.shape is not None else 0
        if kind.get_class() not in READABLE or count != 1 or kind.get_size() > LARGEST:
            raise self._wrong(f"attribute {name!r}", expected="one text or number", got=f"{count} of {kind.dtype}")
        return self._attrs[name]


def text(value: Any) -> str:
    """Return an attribute or a name as text; bytes that are no UTF-8 show as replacement characters.

    Control characters show as their escapes: what a stranger's file says steers no terminal.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    found = value.decode("utf-8", "replace").rstrip("\0") if isinstance(value, bytes) else str(value)
    return visible(found)


def _made_visible(value: Any) -> Any:
    """Return what JSON holds, with `visible` texts: escapes may also be written by JSON's own."""
    if isinstance(value, dict):
        return {visible(key): _made_visible(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_made_visible(inner) for inner in value]
    return visible(value) if isinstance(value, str) else value
