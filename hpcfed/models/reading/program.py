"""A forward pass as a list of calls of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor


class Unreadable(Exception):
    """A module is no program.

    Attributes:
        place: file and line of the operation, or the module's part; "" where it is not known.
    """

    def __init__(self, why: str, place: str = ""):
        super().__init__(f"{why}, {place}" if place else why)
        self.why, self.place = why, place


class Value(NamedTuple):
    """In an argument: the value of this number; 0 is the minibatch."""

    number: int


class Named(NamedTuple):
    """In an argument: the module's parameter or buffer of this name."""

    name: str


class Precision(NamedTuple):
    """In an argument: the dtype of the parameters."""


class Samples(NamedTuple):
    """In an argument or a shape: so many times the number of samples."""

    times: int


MARKS = Value, Named, Samples, Precision


@dataclass(frozen=True)
class Call:
    """A call of a torch function.

    Attributes:
        function, args, kwargs: what is called with what; tensors of the program are `Value` and `Named`.
        outputs: numbers of the values that it returns; None for a member of a sequence that is no tensor.
        is_sequence: whether it returns a sequence of tensors, else one.
        written: number of the argument that it writes to, whose new value is the output; None in a pure call.
        with_gradient: whether gradients pass it.
        place: file and line.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    is_sequence: bool
    written: int | None
    with_gradient: bool
    place: str

    @property
    def name(self) -> str:
        """The function's name; without the underscore of one that writes."""
        name = getattr(self.function, "__name__", "")
        return name if name.startswith("__") else name.rstrip("_")

    @cached_property
    def values(self) -> list[int]:
        """Numbers of the values among the arguments, each once."""
        return list(dict.fromkeys(leaf.number for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Value)))

    @cached_property
    def names(self) -> list[str]:
        """Names of the parameters and buffers among the arguments, each once."""
        return list(dict.fromkeys(leaf.name for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Named)))


@dataclass(frozen=True)
class Program:
    """The calls of a forward pass.

    Attributes:
        calls: in their order.
        output: number of the value that is the module's output.
        shapes: of each value; `Samples` where a length counts samples.
        floats: whether each value is of floating-point numbers.
    """

    calls: tuple[Call, ...]
    output: int
    shapes: tuple[tuple[int | Samples, ...], ...]
    floats: tuple[bool, ...]


def leaves(argument: Any) -> Iterator[Any]:
    """Yield what an argument holds, in sequences, mappings and slices."""
    if isinstance(argument, MARKS):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for one in argument:
            yield from leaves(one)
    elif isinstance(argument, dict):
        for one in argument.values():
            yield from leaves(one)
    elif isinstance(argument, slice):
        yield from leaves((argument.start, argument.stop, argument.step))
    else:
        yield argument


def mapped(argument: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument with each leaf changed."""
    if isinstance(argument, (*MARKS, Tensor)):
        return change(argument)
    if isinstance(argument, tuple):
        return tuple(mapped(one, change) for one in argument)
    if isinstance(argument, list):
        return [mapped(one, change) for one in argument]
    if isinstance(argument, dict):
        return {key: mapped(one, change) for key, one in argument.items()}
    if isinstance(argument, slice):
        return slice(*(mapped(one, change) for one in (argument.start, argument.stop, argument.step)))
    return change(argument)
