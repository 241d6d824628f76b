"""The part of a round's sums that secure aggregation hides: words and numbers of this rank's clients, under masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import Diverged
from hpcfed.reduce.finite import LOWER
from hpcfed.reduce.masks import NUMBERS, RoundMasks, wrong_with
from hpcfed.reduce.rows import Number


class MaskedSum:
    """A rank's clients of a round with masks: what they send is masked at once, and opened once all ranks have sent.

    Args:
        masks: of the round.
        entries: of each vector that is summed, in one word an entry, by its name and in the buffer's order.
    """

    def __init__(self, masks: RoundMasks, entries: Mapping[str, int]):
        self._masks, self._entries = masks, entries
        self._size = sum(entries.values()) + NUMBERS
        self._numbers = np.zeros(NUMBERS, np.int64)
        self._own: tuple[list[int], np.ndarray] = [], np.empty(0, np.uint64)
        self._left_over: np.ndarray | None = None

    def check(self, vectors: Mapping[str, Tensor], loss_sum: Number) -> None:
        """Refuse an update that the masked words have no room for.

        Raises:
            Diverged: saying what is not finite, or beyond its clip.
        """
        for name in self._entries:
            if what := wrong_with(name, float(vectors[name].abs().max()), self._masks.run.bound(name)):
                raise Diverged(what, remedy=LOWER)
        if not math.isfinite(float(loss_sum)):
            raise Diverged("its loss is not finite", remedy=LOWER)

    def add(self, weight: float, squared: float, loss_sum: float, steps: int) -> None:
        """Add a client's squared norm, which counts `weight` times, its sum of losses and its steps."""
        self._numbers += self._masks.numbers(weight, squared, loss_sum, steps)

    def mask(self, places: list[int], sums: Sequence[Tensor]) -> np.ndarray:
        """Mask the sums, int64, of the clients at these places, in place; return their masked numbers, (3,) int64."""
        words = self._masks.of(places, self._size)
        self._own = places, words
        first = 0
        for total in sums:
            total.add_(_signed(words[first : first + len(total)]))
            first += len(total)
        return self._numbers + words[-NUMBERS:].view(np.int64)

    @property
    def is_open(self) -> bool:
        """Whether the clients that are left have sent their shares."""
        return self._left_over is not None

    def open(self, places: list[int]) -> None:
        """Learn the masks left over in the sum over all ranks, to which the clients at these places have sent."""
        own_places, own = self._own
        self._left_over = own if places == own_places else self._masks.of(places, self._size)

    def unmask(self, name: str, words: Tensor) -> None:
        """Subtract what is left over in a vector's sum over all ranks, (n,) int64, in place."""
        assert self._left_over is not None
        names = list(self._entries)
        first = sum(self._entries[other] for other in names[: names.index(name)])
        words.sub_(_signed(self._left_over[first : first + self._entries[name]]))

    def numbers(self, masked: np.ndarray) -> tuple[float, float, int]:
        """Return the sums over all clients of weighted squared norms, losses and steps, from the masked ones, (3,)."""
        assert self._left_over is not None
        return self._masks.read(masked - self._left_over[-NUMBERS:].view(np.int64))


def _signed(words: np.ndarray) -> Tensor:
    """Return words, (n,) uint64, as int64: sums wrap around alike."""
    return torch.from_numpy(words.view(np.int64))
