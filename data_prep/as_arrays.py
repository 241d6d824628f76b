"""Samples in the forms that users hold, torch tensors, masked arrays and data frames among them, as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcfed.errors import InputError


def as_array(what: str, part: Any, *, can_lack: bool) -> np.ndarray:
    """Return samples as an array; masked numbers are NaN, and floating point of fewer than 32 bits in torch is float32.

    Raises:
        InputError: entries are masked, and they are not floating point, or `can_lack` is False.
    """
    if hasattr(part, "detach"):  # a torch tensor
        part = part.detach().cpu()
        if part.is_floating_point() and part.element_size() < np.dtype(np.float32).itemsize:
            part = part.float()
    if not np.ma.is_masked(part):
        return np.asarray(part)
    if part.dtype.kind != "f" or not can_lack:
        expected = "no masked entry" + (" but in floating point" if can_lack else "")
        raise InputError(
            what, expected=expected, got=f"{int(np.ma.count_masked(part)):,}", remedy="leave such samples out"
        )
    return part.filled(np.nan)


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
