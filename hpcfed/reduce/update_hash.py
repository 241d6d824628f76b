"""The hash of a client's update: 64 bits by which two machines, or two runs, compare what a client sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xxhash
from torch import Tensor

from hpcfed.errors import HpcfedError
from hpcfed.reduce.finite import check_own
from hpcfed.reduce.weighted_update import WeightedUpdate
from hpcfed.types import State


def hash_of_update(vectors: Mapping[str, Tensor], names: Sequence[str], scalars: Sequence[float] = ()) -> int:
    """Return XXH3-64 of the reported vectors, (d,) each, in the order of `names`, and of the scalars, in theirs.

    A GPU's vectors are copied to the host for it.
    """
    digest = xxhash.xxh3_64()
    for name in names:
        digest.update(vectors[name].detach().cpu().contiguous().numpy().data)
    digest.update(np.array(scalars, dtype="<f8").tobytes())
    return digest.intdigest()


class HashKeeper:
    """Takes updates in the place of a round's buffer, and keeps their hashes alone; see `Updates`.

    Args:
        names, scalars: of the vectors and scalars that clients report, in the order in which they are hashed.

    Attributes:
        hashes: each client's place in the cohort and hash, as they came.
    """

    is_torn = False

    def __init__(self, names: Sequence[str], scalars: Sequence[str]):
        self.names, self.scalars = tuple(names), tuple(scalars)
        self.hashes: list[tuple[int, int]] = []

    def add(self, update: WeightedUpdate, *, skips: bool = False) -> bool:
        scalars = [float(update.scalars[name]) for name in self.scalars]
        self.hashes.append((update.place, hash_of_update(update.vectors, self.names, scalars)))
        return True

    def add_tile(self, updates: Sequence[WeightedUpdate]) -> None:
        for update in updates:
            self.add(update)

    def check_own(self, place: int, own: State, where: Callable[[], str], *, at_once: bool = False) -> None:
        check_own(own)

    def is_filled(self, place: int) -> bool:
        return any(place == filled for filled, _ in self.hashes)

    def skip(self, place: int) -> None:
        """Do nothing: nothing is kept of a client that is left out."""

    def fail(self, place: int) -> None:
        """Do nothing: `Training` returns the failure."""

    def abandon(self, failure: HpcfedError) -> None:
        """Do nothing: likewise."""
