"""Secure aggregation, simulated: words of the exact sums are masked, pair by pair, and only their sum can be read.

    client i sends   q_i + b_i + Σ_{j>i} m_ij − Σ_{j<i} m_ji   mod 2^64;      m_ij of (pair, round), b_i of (i, round)

q_i are its weighted vectors, and its squared norm, loss and steps, as integers in units that follow from the clip, the
weights and the cohort alone. In the sum over the cohort the masks of pairs cancel. The clients that are left then send
their shares of one secret of each client: of b_i if its words have come, of its pairs' key if it dropped out, never of
both. The masks that are left over are subtracted. Words that come late, of a client that was taken for dropped out,
stay hidden by its b_i.

Masks of two clients that one rank has trained, and that both send, cancel in the rank's own sum and are not drawn. Not
simulated is the agreement on keys, which are draws of the seed here; its bytes are counted.

Reference: Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, Section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.reduce.units import ROUNDABLE, SUMMABLE, Units, exponent
from hpcfed.rng import Purpose, stream
from hpcfed.types import DELTA

NUMBERS = 3
"""Masked numbers beside the vectors: weighted squared norms, losses and steps."""
LOSS_UNIT, LARGEST_LOSS = 2.0**-20, 2.0**30
"""Of a client's sum of losses, which is cut there."""
MARGIN = 1 + 2.0**-10
"""Of a bound, for the rounding of a clipped vector."""
KEY, SHARE, TAG = 32, 32, 16
"""Bytes of a public key, of a share of a secret, and what encryption adds to a message."""


@dataclass(frozen=True)
class Masks:
    """Masks of a run.

    Attributes:
        bound: of a vector's norm, by its name; of its largest entry where it is noised.
        dropout: probability with which a client of a cohort drops out before it sends.
        survivors: least number of clients of whom a sum is opened.
        seed: of masks and dropouts.
        has_numbers: whether norms, losses and steps are sent; else they are 0, as where noise hides clients.
    """

    bound: Callable[[str], float]
    dropout: float
    survivors: int
    seed: int
    has_numbers: bool = True

    def dropped(self, round: int, size: int) -> np.ndarray:
        """Return which members of a round's cohort drop out, (S,) bool; the same on every rank."""
        return dropouts(self.seed, self.dropout, round, size)

    def units(self, counts: Mapping[str, np.ndarray]) -> dict[str, Units]:
        """Return the unit of each vector's sum, one word, from what each member, (S,), counts in it."""
        return {name: (_unit(np.abs(own) * (self.bound(name) * MARGIN)),) for name, own in counts.items()}

    def of_round(self, round: int, clients: Sequence[int], counts: np.ndarray, factors: np.ndarray) -> RoundMasks:
        """Return the masks of a round with these clients, by what each counts, and the factor of its Δ_i, (S,)."""
        squares = np.abs(counts) * factors**2 * (self.bound(DELTA) * MARGIN) ** 2
        return RoundMasks(self, round, tuple(clients), _unit(squares))

    def bytes_up(self, size: int, left: int, words: int, *, is_opened: bool) -> int:
        """Return what all clients of a cohort of `size` send, of which `left` get as far as their words.

        Two keys each; both secrets' shares for each other client, encrypted; words; and, if the sum is opened, a share
        of one secret of each.
        """
        shares = size * (size - 1) * (2 * SHARE + TAG) + is_opened * left * size * SHARE
        return left * 8 * (words + (NUMBERS if self.has_numbers else 0)) + size * 2 * KEY + shares

    def bytes_down(self, size: int) -> int:
        """Return what they receive beside the model: the others' keys and shares."""
        return size * (size - 1) * (2 * KEY + 2 * SHARE + TAG)


def dropouts(seed: int, dropout: float, round: int, size: int) -> np.ndarray:
    """Return which members of a round's cohort drop out with a probability, (S,) bool."""
    return stream(seed, Purpose.DROPOUTS, round).random(size) < dropout


def _unit(largest: np.ndarray) -> float:
    """Return the unit of a word that holds a sum of numbers of these magnitudes, (n,)."""
    total, one = float(largest.sum()), float(largest.max(initial=0.0))
    return 2.0 ** max(exponent(total) - SUMMABLE, exponent(one) - ROUNDABLE) if total > 0 else 1.0


@dataclass(frozen=True)
class RoundMasks:
    """Masks of a round, and the units of its numbers."""

    run: Masks
    round: int
    clients: tuple[int, ...]
    square_unit: float

    def numbers(self, weight: float, square: float, loss: float, steps: int) -> np.ndarray:
        """Return the words of a client's weighted squared norm, loss and steps, (3,) int64."""
        if not self.run.has_numbers:
            return np.zeros(NUMBERS, np.int64)
        loss = max(-LARGEST_LOSS, min(LARGEST_LOSS, loss))
        return np.array([round(weight * square / self.square_unit), round(loss / LOSS_UNIT), steps], np.int64)

    def read(self, words: np.ndarray) -> tuple[float, float, int]:
        """Return the sums of the weighted squared norms, of the losses and of the steps."""
        square, loss, steps = words.tolist()
        return square * self.square_unit, loss * LOSS_UNIT, steps

    def of(self, some: Iterable[int], size: int) -> np.ndarray:
        """Return the masks in the sum of what the clients at some places send, (size,) uint64.

        A rank adds those of its own clients to their words; of all that have sent they are left over, since what they
        share with the others did not come.
        """
        places = frozenset(some)
        return self.singles(places, size) + self.pairs(places, size)

    def singles(self, places: frozenset[int], size: int) -> np.ndarray:
        """Return the sum of the b_i of some places, (size,) uint64."""
        total = np.zeros(size, np.uint64)
        for place in sorted(places):
            total += self.drawn(Purpose.SELF_MASKS, self.clients[place], size)
        return total

    def pairs(self, places: frozenset[int], size: int) -> np.ndarray:
        """Return the sum of the masks that some places have with all others, (size,) uint64."""
        total = np.zeros(size, np.uint64)
        others = [place for place in range(len(self.clients)) if place not in places]
        for place in sorted(places):
            for other in others:
                first, second = min(place, other), max(place, other)
                words = self.drawn(Purpose.MASKS, self.clients[first] << 32 | self.clients[second], size)
                total = total + words if place == first else total - words
        return total

    def drawn(self, purpose: Purpose, address: int, size: int) -> np.ndarray:
        """Return the mask of a client, or of a pair, (size,) uint64."""
        return stream(self.run.seed, purpose, self.round, address).bit_generator.random_raw(size).astype(np.uint64)


def wrong_with(name: str, largest: float, bound: float) -> str:
    """Return what is wrong with a vector's largest entry; empty if nothing is."""
    if not math.isfinite(largest):
        return "its update is not finite"
    return "" if largest <= bound * MARGIN else f"its {name!r} is beyond its clip"
