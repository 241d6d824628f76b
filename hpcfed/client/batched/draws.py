"""What is drawn for the steps of a tile's clients: their minibatches' samples, and the keys of dropout's masks.

A client's draws depend on its seed, round, samples and steps alone, so those of the next round's first tile can be made
while a device works on the round before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hpcfed.client.batched.operators.dropping import drawn_keys
from hpcfed.client.solver import Expected, Task
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.data.batches import visits
from hpcfed.rng import Purpose, Streams


class Drawn(NamedTuple):
    """A client's draws.

    Attributes:
        order: its minibatches' samples, (steps, width) int64.
        sizes: how many of them are no fillers, (steps,) int64.
        keys: of dropout's masks, (steps, keys) int32.
    """

    order: np.ndarray
    sizes: np.ndarray
    keys: np.ndarray


class TileDraws(NamedTuple):
    """The draws of a tile's clients.

    Attributes:
        orders: by slot, each client's `Drawn.order`.
        sizes: (R, most steps); where a slot has no client, or its client takes no step, minibatches count as full.
        keys: (R, most steps, keys); None without dropout.
    """

    orders: Mapping[int, np.ndarray]
    sizes: np.ndarray
    keys: np.ndarray | None


class Draws:
    """Draws for clients of a round.

    Args:
        section: the recipe's ``local``.
        seed: the recipe's ``seed.batches``.
        tile: R. Minibatches of a tile of one have the client's own sizes.
        width: samples of a minibatch that is not short.
        num_keys: keys of dropout's masks in a step.
    """

    def __init__(self, section: LocalSection, seed: int, tile: int, width: int, num_keys: int):
        self._batch_size, self._tile, self._width, self._num_keys = section.batch_size, tile, width, num_keys
        self._of_batches, self._of_masks = Streams(seed, Purpose.BATCHES), Streams(seed, Purpose.DROPOUT)
        self._ahead = dict[Expected, Drawn]()

    def of_tile(self, of_slot: Mapping[int, Task], round: int) -> TileDraws:
        """Return the draws of clients by slot."""
        most = max(task.steps for task in of_slot.values())
        orders, sizes = {}, np.full((self._tile, most), self._width, np.int64)
        keys = np.zeros((self._tile, most, self._num_keys), np.int32) if self._num_keys else None
        for slot, task in of_slot.items():
            member = Expected(round, task.client, len(task.samples[1]), task.steps)
            drawn = self._ahead.pop(member, None) or self._drawn(member)
            orders[slot], sizes[slot, : task.steps] = drawn.order, drawn.sizes
            if keys is not None:
                keys[slot, : task.steps] = drawn.keys
        return TileDraws(orders, sizes, keys)

    def make_ahead(self, members: Iterable[Expected]) -> None:
        """Make the draws of clients that are likely to be asked for; drop those that were made ahead before."""
        self._ahead = {member: self._drawn(member) for member in members}

    def keys(self, round: int, client: int, steps: int) -> np.ndarray:
        """Return the keys of dropout's masks of a client's steps, (steps, keys) int32."""
        if not self._num_keys:
            return np.empty((steps, 0), np.int32)
        return drawn_keys(self._num_keys, steps, self._of_masks.at(round, client))

    def _drawn(self, member: Expected) -> Drawn:
        round, client, num_samples, steps = member
        width = self._width if self._tile > 1 else min(self._width, num_samples)
        order, sizes = visits(num_samples, self._batch_size, steps, self._of_batches.at(round, client), width)
        return Drawn(order, sizes, self.keys(round, client, steps))
