"""Plain attributes of a user's module, neither parameters nor buffers, which training may change.

Tensors, such as the hidden state of an LSTM, are the initial ones again for each client and each unit of an evaluation:
nothing of one client's data passes to the next. Numbers, such as a counter of calls, are left alone and named.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

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
    """The attributes of a module and of those in it: numbers, text, tensors and arrays, containers of a few.

    Others, such as functions, are left as they are.
    """

    def __init__(self, module: nn.Module):
        self._parts = {part: _plain(part) for part in module.modules()}
        self._names = {part: {*vars(part)} for part in self._parts}
        self._said: set[tuple[str, str]] = set()
        self._news: list[str] = []

    def reset(self) -> None:
        """Set tensors to the initial ones, remove those that have been added, and note what else has changed."""
        for part, attributes in self._parts.items():
            for name in vars(part).keys() - self._names[part]:
                if _holds_tensors(vars(part)[name]):
                    delattr(part, name)
                else:
                    self._names[part].add(name)
                    self._note(part, name)
            for name, known in attributes.items():
                now = vars(part).get(name)
                if now is known.now and _mark(now) == known.mark:
                    continue
                if _holds_tensors(now) or _holds_tensors(known.initial):
                    now = copy.deepcopy(known.initial)
                    setattr(part, name, now)
                else:
                    self._note(part, name)
                attributes[name] = _Attribute(known.initial, now, _mark(now))

    def news(self) -> Iterator[str]:
        """Yield, once, a line on each attribute that passes from client to client."""
        while self._news:
            yield self._news.pop(0)

    def _note(self, part: nn.Module, name: str) -> None:
        what = type(part).__name__, name
        if what not in self._said:
            self._said.add(what)
            place = ".".join(what)
            self._news.append(
                f"the model's calls change {place}, which passes from client to client, on other numbers of ranks in "
                "another order"
            )


def _plain(part: nn.Module) -> dict[str, _Attribute]:
    """Return the plain attributes of a module alone."""
    found = {}
    for name, value in vars(part).items():
        mark = _mark(value)
        if name not in OF_TORCH and mark is not None:
            with suppress(RuntimeError):  # a tensor that belongs to a graph, such as a view of a parameter
                found[name] = _Attribute(copy.deepcopy(value), value, mark)
    return found


def _holds_tensors(value: object) -> bool:
    if isinstance(value, list | tuple | set | deque | dict):
        return any(map(_holds_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | np.ndarray)


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
