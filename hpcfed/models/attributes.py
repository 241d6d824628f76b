"""Plain attributes of a user's module, such as a counter or the hidden state of an LSTM: they are neither parameters
nor buffers, and training may change them.

Each client, and each unit of an evaluation, begins with the initial ones, so that nothing passes from one to the next.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

log = logging.getLogger("hpcfed")

FEW, SMALL = 64, 1 << 20
"""Entries of a container, and bytes of an array, up to which a change in them is noticed."""
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class _Attribute(NamedTuple):
    """An initial value, the object that stands for it now, and the mark of that one unchanged."""

    initial: Any
    now: Any
    mark: Any


class Attributes:
    """The initial attributes of a module and of those in it: numbers, text, tensors and arrays, containers of a few.

    Others, such as functions, are left as they are.
    """

    def __init__(self, module: nn.Module):
        self._parts = {part: _plain(part) for part in module.modules()}
        self._names = {part: {*vars(part)} for part in self._parts}
        self._said: set[tuple[str, str]] = set()

    def reset(self) -> None:
        """Set the attributes to the initial ones, and remove those that have been added."""
        for part, attributes in self._parts.items():
            for name in vars(part).keys() - self._names[part]:
                delattr(part, name)
            for name, known in attributes.items():
                now = vars(part).get(name)
                if now is known.now and _mark(now) == known.mark:
                    continue
                if isinstance(now, int | float) and not isinstance(now, bool):
                    self._say(type(part).__name__, name)
                value = copy.deepcopy(known.initial)
                setattr(part, name, value)
                attributes[name] = _Attribute(known.initial, value, _mark(value))

    def _say(self, part: str, name: str) -> None:
        if (part, name) not in self._said:
            self._said.add((part, name))
            log.warning("model: training changes %s.%s; every client begins with its initial value", part, name)


def _plain(part: nn.Module) -> dict[str, _Attribute]:
    """Return the plain attributes of a module alone."""
    found = {}
    for name, value in vars(part).items():
        mark = _mark(value)
        if name not in OF_TORCH and mark is not None:
            with suppress(RuntimeError):  # a tensor that belongs to a graph, such as a view of a parameter
                found[name] = _Attribute(copy.deepcopy(value), value, mark)
    return found


def _mark(value: object) -> Any:
    """Return what changes with a plain value, in place, too; None for other objects and large containers."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= SMALL and not value.dtype.hasobject else b""
    if isinstance(value, list | tuple | set | deque | dict) and len(value) <= FEW:
        marks = [_mark(one) for one in (value.items() if isinstance(value, dict) else value)]
        return None if None in marks else (id(value), marks)
    return None
