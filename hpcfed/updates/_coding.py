"""Packed form of a client's vector: its numbers, their bits, and the entries that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcfed.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Coding:
    """A packed vector: `values` numbers of `bits`, for each its place if that has to be said, and `scales`.

    Attributes:
        sizes: parameters of each of the model's tensors, in their order; n in all.
        number_bits: of the run's dtype, which unpacked numbers and scales have.
        values: numbers sent.
        bits: of each.
        place_bits: of each number's place; 0 where all are sent, or the places follow from a seed.
        scales: numbers of the run's dtype sent besides.
    """

    sizes: tuple[int, ...]
    number_bits: int
    values: int
    bits: int
    place_bits: int = 0
    scales: int = 0

    @property
    def entries(self) -> int:
        """n."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed form."""
        return (self.values * (self.bits + self.place_bits) + self.scales * self.number_bits + 7) // 8

    def chosen(self, values: int, place_bits: int) -> Coding:
        """Return the coding where some entries alone are sent.

        Raises:
            InputError: entries were chosen or coded before.
        """
        if values == self.entries:
            return self
        if self.values < self.entries or self.bits < self.number_bits:
            what = "updates: topk and randk behind a part that chooses or codes entries"
            raise InputError(what, remedy="put the one of them that is to be used first")
        return replace(self, values=values, place_bits=place_bits)

    def coded(self, bits: int, scales: int = 0) -> Coding:
        """Return the coding where each number that is sent has fewer bits.

        Raises:
            InputError: numbers were coded before.
        """
        if bits >= self.number_bits:
            return self
        if self.bits < self.number_bits:
            raise InputError("updates: numbers are coded twice", remedy="use one of cast, quantize and sign")
        return replace(self, bits=bits, scales=scales)


def plain(sizes: tuple[int, ...], number_bits: int) -> Coding:
    """Return the coding of whole vectors."""
    return Coding(sizes, number_bits, sum(sizes), number_bits)


def on_sent(stack: Tensor, places: Sequence[Tensor] | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return vectors (R, n) whose sent entries, those at each one's `places` (k,) or all, are changed together."""
    if places is None:
        return change(stack)
    import torch

    of_rows = torch.stack([*places])
    return stack.new_zeros(stack.shape).scatter_(1, of_rows, change(stack.gather(1, of_rows)))
