"""Attributes of a user's module, neither parameters nor buffers, which its calls may change.

Tensors, such as the hidden state of an LSTM, are the initial ones again for each client and each unit of an evaluation:
nothing of one client's data passes to the next. Numbers, such as a counter of calls, are left alone and named.
Containers but tuples of tensors, and the modules of torch itself, are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
PLAIN = (type(None), bool, int, float, complex, str)


class _Attribute(NamedTuple):
    """An initial value, the object that stands for it now, and the version of that one unchanged."""

    initial: Any
    now: Any
    version: Any


class Attributes:
    """The attributes of the user's own classes in a module: numbers, text, None, tensors and tuples of tensors."""

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
            for name, known in attributes.items():
                now = vars(part).get(name)
                if now is known.now and _version(now) == known.version:
                    continue
                if _holds_tensors(now) or _holds_tensors(known.initial):
                    vars(part)[name] = now = _copy(known.initial)
                elif isinstance(now, PLAIN) and not (isinstance(known.now, PLAIN) and now == known.now):
                    self._note(part, name)  # others, such as a list of tensors, may not be comparable
                attributes[name] = _Attribute(known.initial, now, _version(now))

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
        is_watched = isinstance(value, PLAIN) or (_holds_tensors(value) and not _follows_gradients(value))
        if is_watched and name not in OF_TORCH:
            found[name] = _Attribute(_copy(value), value, _version(value))
    return found


def _holds_tensors(value: object) -> bool:
    tensors = value if isinstance(value, tuple) else (value,)
    return bool(tensors) and all(isinstance(one, Tensor) and not isinstance(one, nn.Parameter) for one in tensors)


def _follows_gradients(value: object) -> bool:
    return any(
        isinstance(one, Tensor) and one.requires_grad for one in (value if isinstance(value, tuple) else (value,))
    )


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def _version(value: object) -> Any:
    """Return what changes where a tensor is written to in place."""
    if isinstance(value, tuple):
        return [_version(one) for one in value]
    return None if not isinstance(value, Tensor) or value.is_inference() else value._version
