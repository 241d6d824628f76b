"""Cast: numbers of fewer bits, each rounded to the nearest.

    ``to``: float16 (10 bits after the point, to 65,504) or bfloat16 (7 bits, float32's range); float32 in runs of
    float64

A float16 beyond its range is infinite, and ends the run as any update that is not finite does. Packed: 2 bytes a
number, 4 for float32. State: none.

Reference: IEEE 754-2019, binary16; Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from hpcfed.types import State
from hpcfed.updates._base import LESSENS, NORMS, PartContext, Vectors
from hpcfed.updates._coding import Coding
from hpcfed.updates._tile import SentTile, TilePart


class Cast(TilePart):
    """Rounding to another type of numbers."""

    keeps: ClassVar[frozenset[str]] = LESSENS | {NORMS}

    to: Literal["float16", "bfloat16", "float32"]

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        import torch

        kind = getattr(torch, self.to)
        return SentTile({name: stack.to(kind).to(stack.dtype) for name, stack in vectors.items()}, [{}] * len(states))

    def coded(self, coding: Coding) -> Coding:
        return coding.coded(32 if self.to == "float32" else 16)


UPDATE = DOWN = Cast
TITLE, REFERENCES = "numbers of 16 bits", ("kalamkar2019study",)
EXAMPLE = {"to": "bfloat16"}
