"""Base of the parts that send k of the n entries of each vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hpcfed.updates._base import LESSENS, NORMS
from hpcfed.updates._feedback import WithFeedback

if TYPE_CHECKING:
    from torch import Tensor


class Choosing(WithFeedback):
    """A part that sends k = ``fraction`` · n entries, at least 1."""

    fraction: float = Field(gt=0, le=1)

    @property
    def keeps(self) -> frozenset[str]:  # type: ignore[override]
        return LESSENS | ({NORMS} if self.fraction == 1 else frozenset())

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.feedback and self.fraction < 1

    def count_of(self, entries: int) -> int:
        """Return k."""
        return max(1, round(self.fraction * entries))


def only(stack: Tensor, places: Tensor) -> Tensor:
    """Return vectors (R, n) with the entries at some places, (R, k) int64, and 0 at all others."""
    return stack.new_zeros(stack.shape).scatter_(1, places, stack.gather(1, places))
