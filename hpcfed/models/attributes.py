"""Attributes of a user's module, neither parameters nor buffers, which its calls may change.

Tensors, such as the hidden state of an LSTM, are the initial ones again for each client and each unit of an evaluation:
nothing of one client's data passes to the next; so are tuples, lists and mappings that hold tensors, however deep, and
all else in them. Random generators begin anew likewise, and in training from the client's stream. Numbers, such as a
counter of calls, and containers without tensors are left alone, and named where they change. Arrays, objects of other
classes and containers of more than `MAX_MEMBERS` are not looked into, nor the modules of torch itself.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor, nn

from hpcfed.config.user_code.generators import Own, seed_own, set_state, state_of

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
PLAIN = (type(None), bool, int, float, complex, str)
LISTS, MAPPINGS = (list, deque), (dict, OrderedDict, defaultdict)
MAX_MEMBERS = 1000
"""Members of a container that is looked into, at most; of a larger one its length counts."""
MAX_DEPTH = 8


class _Token(NamedTuple):
    """A part of a value in the order of its members, by which it is compared: what it is, and a number.

    The number is a tensor's version, which changes where it is written to, or a container's length.
    """

    what: Any
    number: int | None = None


class _Attribute(NamedTuple):
    """An attribute: the object that it was at first, a copy of that one's content, and the tokens that are known."""

    first: Any
    initial: Any
    tokens: list[_Token]


class ModuleAttributes:
    """The attributes of the user's own classes in a module: numbers, text, None, tensors, and containers."""

    def __init__(self, module: nn.Module):
        own = [part for part in module.modules() if not type(part).__module__.startswith("torch.")]
        self._registered = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._parts = {part: dict(self._watched(part)) for part in own}
        self._names = {part: {*vars(part)} for part in own}
        held = (value for part in own for value in vars(part).values())
        self._generators = {id(one): (one, state_of(one)) for value in held for one in _generators_of(value)}
        self._said: set[tuple[str, str]] = set()
        self._news: list[str] = []

    def reset(self) -> None:
        """Set generators and what holds tensors to initial values, remove what was added, note what else changed."""
        for generator, state in self._generators.values():
            set_state(generator, state)
        for part, attributes in self._parts.items():
            for name in vars(part).keys() - self._names[part]:
                value = vars(part)[name]
                if self._holds_tensors(tokens := self._tokens(value)):
                    del vars(part)[name]
                    continue
                self._names[part].add(name)
                if _is_container(value):
                    attributes[name] = _Attribute(value, self._copy(value), tokens)
            for name, known in attributes.items():
                now = vars(part).get(name)
                tokens = self._tokens(now)
                if _are_same(tokens, known.tokens):
                    continue
                if self._holds_tensors(tokens) or self._holds_tensors(known.tokens):
                    vars(part)[name] = now = self._begun(known)
                    tokens = self._tokens(now)
                elif _is_container(now) or isinstance(now, PLAIN):
                    self._note(part, name)
                attributes[name] = known._replace(tokens=tokens)

    def seed(self, number: int) -> None:
        """Set the generators to seeds that follow from a number."""
        for place, (generator, _) in enumerate(self._generators.values()):
            seed_own(generator, number ^ place)

    def has_changed(self) -> bool:
        """Whether an attribute is another one than after the last `reset`, or has come or gone."""
        return any(
            vars(part).keys() != self._names[part]
            or any(not _are_same(self._tokens(vars(part).get(name)), known.tokens) for name, known in own.items())
            for part, own in self._parts.items()
        )

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

    def _watched(self, part: nn.Module) -> Iterator[tuple[str, _Attribute]]:
        """Yield the watched attributes of a module alone; a tensor that belongs to a graph is none of them."""
        for name, value in vars(part).items():
            tokens = self._tokens(value)
            follows = any(isinstance(one.what, Tensor) and one.what.requires_grad for one in self._free(tokens))
            is_kind = isinstance(value, (*PLAIN, Tensor)) or _is_container(value)
            if is_kind and not follows and name not in OF_TORCH and id(value) not in self._registered:
                yield name, _Attribute(value, self._copy(value), tokens)

    def _tokens(self, value: Any) -> list[_Token]:
        return list(_parts_of(value, self._registered, MAX_DEPTH))

    def _free(self, tokens: list[_Token]) -> list[_Token]:
        """Return the tokens of tensors that are neither parameters nor buffers of the module."""
        return [one for one in tokens if isinstance(one.what, Tensor) and id(one.what) not in self._registered]

    def _holds_tensors(self, tokens: list[_Token]) -> bool:
        return bool(self._free(tokens))

    def _begun(self, known: _Attribute) -> Any:
        """Return an attribute as it was at first: a list or a mapping the same object, which others may hold, too."""
        first, content = known.first, self._copy(known.initial)
        if type(first) in (*LISTS, set):
            first.clear()
            first.extend(content) if type(first) in LISTS else first.update(content)
        elif type(first) in MAPPINGS:
            first.clear()
            first.update(content)
        else:
            return content
        return first

    def _copy(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """Return a value that later changes do not reach; parameters, buffers and other objects are the same ones."""
        if isinstance(value, Tensor):
            return value if id(value) in self._registered else value.detach().clone()
        if not depth or not _is_container(value) or len(value) > MAX_MEMBERS:
            return value
        if type(value) in MAPPINGS:
            copied = copy(value)
            copied.update((key, self._copy(one, depth - 1)) for key, one in value.items())
            return copied
        members = [self._copy(one, depth - 1) for one in value]
        if type(value) is deque:
            return deque(members, value.maxlen)
        return value._make(members) if hasattr(value, "_make") else type(value)(members)


def _generators_of(value: Any) -> Iterator[Own]:
    """Yield the random generators that a value is, or has as members."""
    if isinstance(value, Own):
        yield value
    elif _is_container(value) and len(value) <= MAX_MEMBERS:
        members = value.values() if type(value) in MAPPINGS else value
        yield from (one for one in members if isinstance(one, Own))


def _is_container(value: object) -> bool:
    """Whether a value is a container of the language itself, or a named tuple; other classes may do as they like."""
    return type(value) in (*LISTS, *MAPPINGS, set, tuple) or (isinstance(value, tuple) and hasattr(value, "_make"))


def _parts_of(value: Any, registered: dict[int, Tensor], depth: int) -> Iterator[_Token]:
    """Yield the tokens of a value."""
    if isinstance(value, Tensor):
        fixed = id(value) in registered or value.is_inference()
        yield _Token(value, None if fixed else value._version)
    elif depth and _is_container(value):
        yield _Token(type(value), len(value))
        if len(value) <= MAX_MEMBERS:
            if type(value) in MAPPINGS:
                yield from map(_Token, value)
            for one in value.values() if type(value) in MAPPINGS else value:
                yield from _parts_of(one, registered, depth - 1)
    else:
        yield _Token(value)


def _are_same(some: list[_Token], others: list[_Token]) -> bool:
    return len(some) == len(others) and all(map(_is_same, some, others))


def _is_same(one: _Token, other: _Token) -> bool:
    if one.number != other.number:
        return False
    plain = isinstance(one.what, PLAIN) and isinstance(other.what, PLAIN)
    return one.what is other.what or (plain and one.what == other.what)
