"""Checks of what a method, perhaps the user's own, hands over, and of what the ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hpcfed.errors import InputError
from hpcfed.types import Report, Stepped


def check_report(method: str, told: Report, names: Sequence[str], like: Tensor) -> None:
    """Refuse a report that the buffer would take for something else: each name must be a vector like Δ_i.

    Raises:
        InputError: a vector is missing, or of another shape, type or device.
    """
    for name in names:
        vector = told.vectors.get(name)
        if vector is None or (vector.shape, vector.dtype, vector.device) != (like.shape, like.dtype, like.device):
            raise InputError(
                f"{method}, report of {name!r}",
                expected=f"a vector of shape {tuple(like.shape)} in {like.dtype}",
                got="nothing" if vector is None else f"shape {tuple(vector.shape)} in {vector.dtype}",
            )


def check_step(method: str, stepped: Stepped, w: Tensor) -> None:
    """Refuse a server step whose model does not fit the one before.

    Raises:
        InputError: it has another shape.
    """
    if stepped.w.shape != w.shape:
        expected, got = f"a model of shape {tuple(w.shape)}", f"shape {tuple(stepped.w.shape)}"
        raise InputError(f"{method}, server step", expected=expected, got=got)


def differing(hashes: np.ndarray, hosts: tuple[str, ...]) -> str:
    """Name the ranks whose hash is not the most frequent one; all of them where none is."""
    values, counts = np.unique(hashes, return_counts=True)
    tied = (counts == counts.max()).sum() > 1
    ranks = range(len(hashes)) if tied else np.flatnonzero(hashes != values[counts.argmax()]).tolist()
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks) + " differing"
