"""Stochastic quantisation: each number becomes one of 2^b levels between its block's least and largest, unbiased.

    l, h   least and largest of the block;      s = (h − l) / (2^b − 1);      j = ⌊(v − l)/s + u⌋,  u uniform in [0, 1)
    C(v) = l + j s;      E C(v) = v,  |C(v) − v| < s

    b     ``bits``, 1 to 8          block: ``block``, ``tensor`` (each of the model's) or a number of entries

Behind top-k or random-k it is what is sent that is cut into blocks, and ``tensor`` is all of it. Packed: b bits for
each number, l and s for each block. State: none.

Reference: Suresh, Yu, Kumar, McMahan, "Distributed mean estimation with limited communication", ICML 2017, Section 2.2;
Alistarh et al., "QSGD", NeurIPS 2017, on blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hpcfed.arithmetic.elementary import quotient
from hpcfed.types import State
from hpcfed.updates._base import CARRIED, TWICE, PartContext, Vectors
from hpcfed.updates._coding import Coding, on_sent
from hpcfed.updates._tile import SentTile, TilePart, places_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Quantize(TilePart):
    """Random rounding to levels that are evenly spaced."""

    bits: int = Field(ge=1, le=8)
    block: Literal["tensor"] | Annotated[int, Field(ge=2)] = "tensor"

    @property
    def keeps(self) -> frozenset[str]:  # type: ignore[override]
        """|C(v) − v| < s ≤ 2 max|v| / (2^b − 1), and half of that is what FedSplit is stable with."""
        return frozenset({CARRIED} if self.bits > 1 else ()) | ({TWICE} if self.bits > 3 else frozenset())

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        coding, streams = contexts[0].coding, [context.stream() for context in contexts]
        assert coding is not None
        change = partial(_rounded, lengths=self._blocks(coding), levels=2**self.bits - 1, streams=streams)
        sent = {name: on_sent(stack, places_of(contexts, name), change) for name, stack in vectors.items()}
        return SentTile(sent, [{}] * len(states))

    def coded(self, coding: Coding) -> Coding:
        return coding.coded(self.bits, scales=2 * len(self._blocks(coding)))

    def _blocks(self, coding: Coding) -> list[int]:
        """Return the numbers in each block."""
        if self.block == "tensor":
            return [*coding.sizes] if coding.values == coding.entries else [coding.values]
        whole, rest = divmod(coding.values, self.block)
        return [self.block] * whole + [rest] * (rest > 0)


def _rounded(stack: Tensor, lengths: list[int], levels: int, streams: Sequence[np.random.Generator]) -> Tensor:
    """Return C(v) of numbers (R, n), each row in blocks of these lengths."""
    import numpy as np
    import torch

    rows, size = stack.shape
    values, sizes = stack.flatten(), torch.tensor(lengths * rows, device=stack.device)
    low, high = (torch.segment_reduce(values, side, lengths=sizes, unsafe=True) for side in ("min", "max"))
    step = quotient(high - low, levels)
    low, step = (each.repeat_interleave(sizes, output_size=len(values)) for each in (low, step))
    kind: Any = "float32" if stack.element_size() == 4 else "float64"
    draws = torch.from_numpy(np.concatenate([random.random(size, dtype=kind) for random in streams]))
    level = ((values - low) / step + draws.to(stack.device)).floor().clamp(max=levels)
    return (low + level.where(step > 0, 0) * step).view(rows, size)


UPDATE = DOWN = Quantize
TITLE, REFERENCES = "stochastic quantisation", ("suresh2017distributed", "alistarh2017qsgd")
EXAMPLE = {"bits": 4}
