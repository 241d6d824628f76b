"""Attributes of a user's module, neither parameters nor buffers, which its calls may change.

Tensors, such as the hidden state of an LSTM, are the initial ones again for each client and each unit of an evaluation:
nothing of one client's data passes to the next; so are tuples, lists and mappings of them. Numbers, such as a counter
of calls, and other lists, mappings and sets that grow or are replaced, are left alone and named. The modules of torch
itself are not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
PLAIN = (type(None), bool, int, float, complex, str)
CONTAINERS = (list, dict, set, deque)


class _Attribute(NamedTuple):
    """An initial value, the object that stands for it now, what that one holds, and the version of it unchanged."""

    initial: Any
    now: Any
    held: list[Any]
    version: Any


class Attributes:
    """The attributes of the user's own classes in a module: numbers, text, None, tensors, and containers."""

    def __init__(self, module: nn.Module):
        own = [part for part in module.modules() if not type(part).__module__.startswith("torch.")]
        self._parts = {part: _watched(part) for part in own}
        self._names = {part: {*vars(part)} for part in own}
        self._said: set[tuple[str, str]] = set()
        self._news: list[str] = []

    def reset(self) -> None:
        """Set tensors to the initial ones, remove those that have been added, and note numbers that have changed."""
        for part, attributes in self._parts.items():
            for name in vars(part).keys() - self._names[part]:
                if _holds_tensors(vars(part)[name]):
                    del vars(part)[name]
                else:
                    self._names[part].add(name)
                    if _is_container(vars(part)[name]):
                        self._note(part, name)
            for name, known in attributes.items():
                now = vars(part).get(name)
                if now is known.now and _version(now) == known.version:
                    continue
                if _holds_tensors(now) or _holds_tensors(known.initial):
                    vars(part)[name] = now = _copy(known.initial)
                elif _is_container(now):
                    self._note(part, name)
                elif isinstance(now, PLAIN) and not (isinstance(known.now, PLAIN) and now == known.now):
                    self._note(part, name)  # others, such as arrays, may not be comparable
                attributes[name] = _attribute(known.initial, now)

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


def _watched(part: nn.Module) -> dict[str, _Attribute]:
    """Return the watched attributes of a module alone; a tensor that belongs to a graph is none of them."""
    found = {}
    for name, value in vars(part).items():
        is_watched = isinstance(value, PLAIN) or _is_container(value) or _holds_tensors(value)
        if is_watched and name not in OF_TORCH and not _follows_gradients(value):
            found[name] = _attribute(_copy(value), value)
    return found


def _attribute(initial: Any, now: Any) -> _Attribute:
    return _Attribute(initial, now, _tensors(now), _version(now))


def _is_container(value: object) -> bool:
    """Whether a value holds others, none of them the module's own, as a recurrent layer's list of its weights does."""
    return isinstance(value, CONTAINERS) and not any(isinstance(one, (nn.Parameter, nn.Module)) for one in _held(value))


def _held(value: object) -> Collection[object]:
    """Return what a container holds; else the value alone."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (tuple, *CONTAINERS)) else (value,)


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors of a value that is one, or holds nothing else; none are of a value that holds other things."""
    return list(_held(value)) if _holds_tensors(value) else []  # type: ignore[arg-type]


def _holds_tensors(value: object) -> bool:
    held = _held(value)
    return bool(held) and all(isinstance(one, Tensor) and not isinstance(one, nn.Parameter) for one in held)


def _follows_gradients(value: object) -> bool:
    return any(one.requires_grad for one in _tensors(value))


def _copy(value: Any) -> Any:
    """Return a copy of a value that later changes of it, or of its tensors, do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not _holds_tensors(value):
        return copy(value) if isinstance(value, CONTAINERS) else value
    if isinstance(value, (tuple, set)):
        return getattr(value, "_make", type(value))(map(_copy, value))
    copied = copy(value)
    for place, one in value.items() if isinstance(value, dict) else enumerate(value):
        copied[place] = _copy(one)
    return copied


def _version(value: object) -> Any:
    """Return what changes where a container grows, or a tensor is written to in place or replaced."""
    tensors = _tensors(value)
    if not tensors:
        return len(value) if isinstance(value, CONTAINERS) else None
    return [(id(one), None if one.is_inference() else one._version) for one in tensors]
