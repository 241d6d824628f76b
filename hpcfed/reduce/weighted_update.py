"""A client's update on its way into the round's sums, and what takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from hpcfed.errors import HpcfedError
from hpcfed.reduce.rows import Number
from hpcfed.types import State


class WeightedUpdate(NamedTuple):
    """What a client sends, and how much it counts.

    Attributes:
        place: the client's, in the cohort.
        weight: |S| p_i, by which each vector counts.
        vectors: what it reports, by name, averaged buffers among them.
        loss_sum: of its steps.
        steps: how many it took.
        scalars: what it reports besides, averaged buffers' counts among them.
        factor: multiple of Δ_i, named "delta", and of its norm, besides `weight`.
    """

    place: int
    weight: float
    vectors: Mapping[str, Tensor]
    loss_sum: Number
    steps: int
    scalars: Mapping[str, float] = MappingProxyType({})
    factor: float = 1.0

    def without_vectors(self) -> WeightedUpdate:
        """Return the same without the memory of its vectors."""
        return WeightedUpdate(self.place, self.weight, {}, self.loss_sum, self.steps, self.scalars, self.factor)


class Updates(Protocol):
    """What takes the updates of the clients that a rank trains: a round's buffer, or a keeper of them."""

    @property
    def is_torn(self) -> bool:
        """Whether an update was added in part: the round cannot go on."""
        ...

    def add(self, update: WeightedUpdate, *, skips: bool = False) -> bool:
        """Add a client's update; with `skips`, one that is not finite is left out. Return whether it was added."""
        ...

    def add_tile(self, updates: Sequence[WeightedUpdate]) -> None:
        """Add the updates of a tile, of Δ alone each, as `add` does one by one."""
        ...

    def check_own(self, place: int, own: State, where: Callable[[], str], *, at_once: bool = False) -> None:
        """Refuse a client's private part that is not finite.

        Args:
            place: the client's, in the cohort.
            own: its private part.
            where: returns the words for the client.
            at_once: whether another client may be trained in its place; else a device's may be read later.

        Raises:
            Diverged: naming what is not finite.
        """
        ...

    def is_filled(self, place: int) -> bool:
        """Whether the client at this place has been added, skipped or failed."""
        ...

    def skip(self, place: int) -> None:
        """Leave the client at this place out of the round."""
        ...

    def fail(self, place: int) -> None:
        """Mark the client at this place as one that could not be trained, which ends the run."""
        ...

    def abandon(self, failure: HpcfedError) -> None:
        """Go on without this rank's device, which can do nothing more."""
        ...
