"""Safe reader of CIFAR's pickles: dicts, lists, numbers, text and arrays of uint8; nothing that they name is run.

CIFAR's "python version" consists of pickles, and loading a pickle imports and calls all that it names. Here the
standard library's Unpickler finds four names alone (`find_class`), and for these stand-ins:

    numpy.core.multiarray._reconstruct, numpy.ndarray, numpy.dtype     an array: its shape, its type, its bytes
    _codecs.encode                                                     how Python 3 writes bytes in protocol 2

Any other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.files import damaged, reading
from hpcfed.errors import InputError

# Errors of the Unpickler on a damaged program, and of the stand-ins.
BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)
DEEPEST = 64
"""Tuples in tuples; an array's state has two levels."""


class _Array:
    """Stand-in for a numpy array: its state in the pickle, (version, shape, type, Fortran order, bytes)."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Dtype:
    """Stand-in for a numpy dtype: its code."""

    def __init__(self, code: object):
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order and alignment: uint8 has none."""


def _reconstruct(*arguments: object) -> _Array:
    return _Array()


def _dtype(code: object, *flags: object) -> _Dtype:
    return _Dtype(code)


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): "numpy.ndarray",  # an argument of _reconstruct, never called
    ("numpy", "dtype"): _dtype,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content), encoding="latin-1")
        self._left = len(content)

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in.

        Raises:
            InputError: there is none for this name.
        """
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in STAND_INS:
            raise InputError(f"a pickle that would run {str(module)[:40]}.{str(name)[:40]}; it was not run")
        return STAND_INS[module, name]

    def _encode(self, text: str, encoding: str) -> bytes:
        """Return bytes, all together at most as many as the pickle: it may name one long text many times."""
        if encoding != "latin1":
            raise ValueError(f"bytes encoded as {str(encoding)[:40]}")
        self._left -= len(text)
        if self._left < 0:
            raise ValueError("more bytes than the file has")
        return text.encode("latin-1")


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dict that a pickle of CIFAR holds; arrays are (…) uint8.

    Raises:
        InputError: it is damaged, has other contents, or requires code to be run.
    """
    with reading(path):
        content = path.read_bytes()
    try:
        _check(content)
        value = _Unpickler(content).load()
    except InputError as error:
        raise InputError(str(error), where=str(path), remedy="don't trust this file") from error
    except BROKEN as error:
        raise damaged(path, "not a pickle, or damaged", error) from error
    if not isinstance(value, dict) or not all(isinstance(key, str | bytes) for key in value):
        raise damaged(path, "not a pickle of CIFAR: it holds no dict of texts")
    return {_text(key): _array(path, item) if isinstance(item, _Array) else item for key, item in value.items()}


def _check(content: bytes) -> None:
    """Refuse what would exhaust memory or crash Python.

    The Unpickler allocates its memo, and buffers, by the numbers in the file. Tuples in tuples in tuples … would be
    hashed, as a dict's key, by C code that crashes at a million levels.

    Raises:
        ValueError: a number is larger than the file, or tuples are deeper than `DEEPEST`.
        IndexError, KeyError: the program takes from an empty stack, or from nothing in the memo.
    """
    stack, memo = list[int | None](), dict[int, int | None]()  # depth of each value, None for a mark
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if name.endswith("PUT") or name == "MEMOIZE":
            place = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if place > len(content):
                raise ValueError(f"a memo of {place} entries")
            memo[place] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            stack.append(None)
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            taken = list[int | None]()
            if pickletools.stackslice in operation.stack_before:
                while (depth := stack.pop()) is not None:
                    taken.append(depth)
            for kind in operation.stack_before:
                if kind not in (pickletools.stackslice, pickletools.markobject):
                    taken.append(stack.pop())
            is_nested = name.startswith("TUPLE") or name == "FROZENSET"
            found = 1 + max((depth or 0 for depth in taken), default=0) if is_nested else 0
            if found > DEEPEST:
                raise ValueError(f"tuples more than {DEEPEST} deep")
            stack.extend([found] * len(operation.stack_after))


def _array(path: Path, stored: _Array) -> np.ndarray:
    """Return the array of uint8 that a state describes."""
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


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
