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
MAX_TEXT_BYTES = 1 << 26
"""Most bytes of a fixed-length text."""


class FileAttributes:
    """Typed access to a file's attributes.

    `wrong` builds the error from a message, ``expected`` and ``got``.
    """

    def __init__(self, file: h5py.File, wrong: Callable[..., InputError]):
        self._attrs = file.attrs
        self._wrong = wrong

    def text(self, name: str) -> str:
        """Return an attribute as text, "" if absent.

        Raises:
            InputError: it is neither text nor a number.
        """
        return text(self._value(name)) if name in self._attrs else ""

    def integer(self, name: str) -> int | None:
        """Return one integer, None if absent.

        Raises:
            InputError: it is not a single integer.
        """
        if name not in self._attrs:
            return None
        value = np.asarray(self._value(name))
        if value.size != 1 or value.dtype.kind not in "iu":
            raise self._wrong(f"attribute {name!r}", expected="one integer", got=repr(value.tolist())[:40])
        return int(value.item())

    def json(self, name: str) -> Any:
        """Return the value of a JSON text, None if absent.

        Raises:
            InputError: it is not JSON.
        """
        if name not in self._attrs:
            return None
        written = self.text(name)
        try:
            return parse_json(written)
        except Malformed:
            raise self._wrong(f"attribute {name!r}", expected="JSON", got=repr(written[:40])) from None

    def json_object(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object, None if absent.

        Raises:
            InputError: it is something else.
        """
        value = self.json(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(f"attribute {name!r}", expected="a JSON object", got=json.dumps(value)[:40])
        return _made_visible(value)

    def _value(self, name: str) -> Any:
        """Read a single text or number; other kinds are not read, because damaged types of theirs crash HDF5."""
        stored = self._attrs.get_id(name)
        kind = stored.get_type()
        count = math.prod(stored.shape) if stored.shape is not None else 0
        if kind.get_class() not in READABLE or count != 1 or kind.get_size() > MAX_TEXT_BYTES:
            raise self._wrong(f"attribute {name!r}", expected="one text or number", got=f"{count} of {kind.dtype}")
        return self._attrs[name]


def text(value: Any) -> str:
    """Return an attribute or a name as text, with replacement characters for invalid UTF-8.

    Control characters are escaped, so that an untrusted file cannot control the terminal.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    found = value.decode("utf-8", "replace").rstrip("\0") if isinstance(value, bytes) else str(value)
    return visible(found)


def _made_visible(value: Any) -> Any:
    """Return a JSON value with `visible` texts: JSON's own escapes may also encode control characters."""
    if isinstance(value, dict):
        return {visible(key): _made_visible(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_made_visible(inner) for inner in value]
    return visible(value) if isinstance(value, str) else value
