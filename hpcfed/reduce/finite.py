"""Private parts of clients must be finite: they would be kept, though an update may be finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import Diverged
from hpcfed.types import State

LOWER = "lower local.lr, or set local.clip_norm"


class Unread(NamedTuple):
    """A client's private part on a device, of which nothing has been read yet.

    Attributes:
        place: the client's, in the cohort.
        names: of its tensors.
        sums: of each, (n,) float64, on the device.
        where: returns the words for the client.
    """

    place: int
    names: tuple[str, ...]
    sums: Tensor
    where: Callable[[], str]


def check_own(own: State) -> None:
    """Refuse a client's private part that is not finite.

    Raises:
        Diverged: naming what is not finite.
    """
    for name, tensor in own.items():
        if not math.isfinite(float(tensor.double().sum())):
            raise _not_finite(name)


def unread(place: int, own: State, where: Callable[[], str]) -> Unread:
    """Return what `failures` looks at later, in place of `check_own` at once."""
    return Unread(place, tuple(own), torch.stack([tensor.double().sum() for tensor in own.values()]), where)


def failures(kept: Iterable[Unread], read: Iterator[np.ndarray]) -> Iterator[tuple[int, Diverged]]:
    """Yield the places of clients whose private part is not finite, and why, from the sums that were read."""
    for (place, names, _, where), sums in zip(kept, read, strict=False):
        for name, total in zip(names, sums.tolist(), strict=True):
            if not math.isfinite(total):
                yield place, Diverged(f"{where()}: {_not_finite(name)}")
                break


def _not_finite(name: str) -> Diverged:
    return Diverged(f"its {name.replace('.', ' ')} are not finite", remedy=LOWER)
