"""Safe reader of pickles: it rebuilds dicts, lists, numbers, text and arrays of uint8, and runs nothing they name.

CIFAR's "python version" consists of pickles, and loading a pickle runs it. Here `pickletools` only disassembles it; a
small stack machine builds plain values and knows four names, for which it has stand-ins:

    numpy.core.multiarray._reconstruct, numpy.ndarray, numpy.dtype     an array: its shape, its type, its bytes
    _codecs.encode                                                     how Python 3 writes bytes in protocol 2

Any other name or operation is refused. Reference: the comments of `pickletools` in Python's standard library.
"""

from __future__ import annotations

import io
import math
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.sources.files import damaged, reading
from hpcfed.errors import InputError

GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
# fmt: off
PLAIN = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4",
    "NONE", "NEWTRUE", "NEWFALSE", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8",
}
# fmt: on
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
STORED = {"PUT", "BINPUT", "LONG_BINPUT"}
FETCHED = {"GET", "BINGET", "LONG_BINGET"}
IGNORED = {"PROTO", "FRAME"}
# Errors of a stack machine with a damaged program.
BROKEN = (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError)


class Named(NamedTuple):
    """A name that the pickle would import."""

    module: str
    name: str


class Typed:
    """Stand-in for a numpy dtype."""

    def __init__(self, code: object):
        self.code = code


class Stored:
    """Stand-in for a numpy array: its state in the pickle."""

    state: tuple[Any, ...] = ()


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dict that a pickle of CIFAR holds; arrays are (…) uint8.

    Raises:
        InputError: it is damaged, has other contents, or requires code to be run.
    """
    with reading(path):
        content = path.read_bytes()
    try:
        value = _run(content)
    except InputError as error:
        raise InputError(str(error), where=str(path), remedy="don't trust this file") from error
    except BROKEN as error:
        raise damaged(path, "not a pickle, or damaged", error) from error
    if not isinstance(value, dict):
        raise damaged(path, "not a pickle of CIFAR: it holds no dict")
    return {_text(key): _array(path, item) if isinstance(item, Stored) else item for key, item in value.items()}


def _run(content: bytes) -> Any:
    """Return the value that the pickle's operations build."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(io.BytesIO(content)):
        name = operation.name
        if name in PLAIN:
            stack.append(argument)
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in STORED:
            memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in FETCHED:
            stack.append(memo[int(argument)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in TUPLES:
            stack.append(tuple(_pop(stack, TUPLES[name])))
        elif name == "STOP":
            return stack.pop()
        elif name not in IGNORED:
            _combine(name, argument, stack, marks)
    raise ValueError("it has no end")


def _combine(name: str, argument: Any, stack: list[Any], marks: list[int]) -> None:
    """Carry out an operation on several values of the stack."""
    if name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"):
        items = _pop(stack, len(stack) - marks.pop())
        if name == "TUPLE":
            stack.append(tuple(items))
        elif name == "LIST":
            stack.append(items)
        elif name == "DICT":
            stack.append(dict(_pairs(items)))
        elif name == "APPENDS":
            _top(stack, list).extend(items)
        else:
            _top(stack, dict).update(_pairs(items))
    elif name == "APPEND":
        item = stack.pop()
        _top(stack, list).append(item)
    elif name == "SETITEM":
        pair = _pop(stack, 2)
        _top(stack, dict).update(_pairs(pair))
    elif name == "GLOBAL":
        stack.append(_named(*argument.split(" ", 1)))
    elif name == "STACK_GLOBAL":
        stack.append(_named(*_pop(stack, 2)))
    elif name == "REDUCE":
        called, arguments = _pop(stack, 2)
        stack.append(_made(called, arguments))
    elif name == "BUILD":
        state = stack.pop()
        if isinstance(stack[-1], Stored):
            stack[-1].state = state
        elif not isinstance(stack[-1], Typed):
            raise ValueError("a state for something that has none")
    else:
        raise InputError(f"a pickle with the operation {name}, which CIFAR's files do not have")


def _named(module: str, name: str) -> Named:
    if (module, name) not in GLOBALS:
        raise InputError(f"a pickle that would run {str(module)[:40]}.{str(name)[:40]}; it was not run")
    return Named(module, name)


def _made(called: Any, arguments: Any) -> Any:
    """Return the stand-in for the result of a call."""
    if not isinstance(called, Named):
        raise ValueError("a call of something that is no name")
    if called.name == "_reconstruct":
        return Stored()
    if called.name == "dtype":
        return Typed(arguments[0])
    if called.name == "encode" and arguments[1] == "latin1":
        return arguments[0].encode("latin-1")
    raise ValueError(f"a call of {called.name}")


def _array(path: Path, stored: Stored) -> np.ndarray:
    """Return the array of uint8 that a state (version, shape, type, Fortran order, bytes) describes."""
    try:
        _, shape, dtype, fortran, content = stored.state
        content = content.encode("latin-1") if isinstance(content, str) else content
        if _text(dtype.code) not in ("u1", "|u1", "uint8") or min(shape, default=0) < 0:
            raise ValueError("an array of another type than uint8")
        if math.prod(shape) != len(content):
            raise ValueError(f"{len(content)} bytes for an array of shape {shape}")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
    except BROKEN as error:
        raise damaged(path, "damaged array in a pickle", error) from error


def _pop(stack: list[Any], count: int) -> list[Any]:
    if not 0 <= count <= len(stack):
        raise IndexError("more is taken than there is")
    items = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return items


def _top(stack: list[Any], kind: type) -> Any:
    if not isinstance(stack[-1], kind):
        raise TypeError(f"no {kind.__name__} to add to")
    return stack[-1]


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
