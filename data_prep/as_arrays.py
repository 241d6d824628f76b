"""Samples in the forms that users hold, torch tensors, masked arrays and data frames among them, as plain arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcfed.errors import InputError


def as_array(what: str, part: Any, *, can_lack: bool) -> np.ndarray:
    """Return samples as an array; masked numbers are NaN, and floating point of fewer than 32 bits in torch is float32.
    SciPy's sparse matrices of x are made dense.

    Raises:
        InputError: entries are masked, and they are not floating point, or `can_lack` is False; or it is a sparse
            matrix, or lists of different lengths.
    """
    if hasattr(part, "toarray") and can_lack:  # SciPy's
        return np.asarray(part.toarray())
    if hasattr(part, "toarray") or str(getattr(part, "layout", "torch.strided")) != "torch.strided":
        remedy = "give part.toarray(), or of torch part.to_dense()"
        raise InputError(what, expected="an array", got=f"a sparse {type(part).__name__}", remedy=remedy)
    if hasattr(part, "detach"):  # a torch tensor
        part = part.detach().cpu()
        if part.is_floating_point() and part.element_size() < np.dtype(np.float32).itemsize:
            part = part.float()
    if not np.ma.is_masked(part):
        try:
            array = np.asarray(part)
        except ValueError as error:
            raise InputError(what, expected="rows of one length", got=_lengths(part) or str(error)[:120]) from None
        return _without_objects(what, array, can_lack=can_lack)
    if part.dtype.kind != "f" or not can_lack:
        expected = "no masked entry" + (" but in floating point" if can_lack else "")
        raise InputError(
            what, expected=expected, got=f"{int(np.ma.count_masked(part)):,}", remedy="leave such samples out"
        )
    return part.filled(np.nan)


def _lengths(rows: Any) -> str:
    """Return the length of the first of these rows, and that of the first that has another; "" if there is none."""
    lengths = [len(row) for row in rows if hasattr(row, "__len__")]
    other = next((row for row, length in enumerate(lengths) if length != lengths[0]), None)
    return "" if other is None else f"{lengths[0]} numbers in row 0 and {lengths[other]} in row {other}"


def _without_objects(what: str, array: np.ndarray, *, can_lack: bool) -> np.ndarray:
    """Return an array of Python's or pandas' objects as booleans, numbers or words, whichever they are; any other one,
    and one of objects that are several of these, as it is.

    Raises:
        InputError: an entry is missing where none can be.
    """
    if array.dtype.kind != "O" or not array.size:
        return array
    flat = array.ravel()
    absent = np.array([is_absent(one) for one in flat])
    present = flat[~absent]
    if not len(present):
        return array
    kinds = {_kind_of(one) for one in present}
    if absent.any() and not (can_lack and kinds <= {"boolean", "number"}):
        if kinds <= {"boolean", "number", "word"}:
            raise InputError(
                what, expected="no missing entry", got=f"{int(absent.sum()):,}", remedy="leave such samples out"
            )
        return array
    if kinds == {"boolean"} and not absent.any():
        return flat.astype(bool).reshape(array.shape)
    if kinds <= {"boolean", "number"}:
        whole = not absent.any() and all(isinstance(one, int | np.integer | bool | np.bool_) for one in present)
        numbers = np.array([np.nan if gone else one for one, gone in zip(flat, absent, strict=True)], float)
        return (flat.astype(np.int64) if whole else numbers).reshape(array.shape)
    if kinds <= {"boolean", "word"}:
        return np.array([str(one) for one in flat]).reshape(array.shape)
    return array


def is_absent(one: Any) -> bool:
    """Whether an object is None, nan, or pandas' ``NA``."""
    return one is None or type(one).__name__ in ("NAType", "NaTType") or (isinstance(one, float) and math.isnan(one))


def _kind_of(one: Any) -> str:
    if isinstance(one, bool | np.bool_):
        return "boolean"
    if isinstance(one, int | float | np.number):
        return "number"
    return "word" if isinstance(one, str) else "other"


def column_names(part: Any) -> list[Any] | None:
    """Return the names of a data frame's columns; None for their numbers, 0, 1 …, and without columns."""
    names = getattr(part, "column_names", getattr(part, "columns", None))
    found = None if names is None else list(names)
    return None if found == list(range(len(found or ()))) else found


def in_order(what: str, array: np.ndarray, names: list[Any], wanted: list[Any]) -> np.ndarray:
    """Return an array (n, p) whose columns have these names with its columns in the order of `wanted`.

    Raises:
        InputError: these are other names, or one is there twice.
    """
    if names == wanted:
        return array
    if set(names) != set(wanted) or not len(set(names)) == len(names) == len(wanted):
        expected, got = (", ".join(map(str, some))[:200] for some in (wanted, names))
        remedy = "give all the same columns, in any order"
        raise InputError(f"{what}: columns", expected=f"{expected}, as before", got=got, remedy=remedy)
    return array[:, [names.index(name) for name in wanted]]


def is_dataset(content: Any) -> bool:
    """Whether this is a torch ``Dataset`` or ``DataLoader``, and no array, sequence or table."""
    plain = isinstance(content, str | tuple | list | Mapping) or hasattr(content, "shape")
    indexed = hasattr(content, "__getitem__") and hasattr(content, "__len__") and not hasattr(content, "to_pandas")
    return not plain and (indexed or hasattr(content, "dataset"))
