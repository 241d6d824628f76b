"""Sign: the signs of each vector, and one number, its mean magnitude.

    C(p) = (‖p‖₁ / n) sign(p);      sign(0) = 1                      error feedback: ``feedback``

Behind top-k or random-k n counts what is sent. Packed: a bit for each number, and the mean magnitude. State: e_i of
each vector, with feedback.

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes",
ICML 2019, Algorithm 1; here with one scale for the vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcfed.arithmetic.elementary import quotient
from hpcfed.arithmetic.sums import sum_over_first
from hpcfed.updates._base import PartContext, Vectors
from hpcfed.updates._coding import Coding, on_sent
from hpcfed.updates._feedback import WithFeedback
from hpcfed.updates._tile import places_of

if TYPE_CHECKING:
    from torch import Tensor


class Sign(WithFeedback):
    """Signs with their mean magnitude."""

    def compressed(self, vectors: Vectors, contexts: Sequence[PartContext]) -> tuple[Vectors, Vectors]:
        return {name: on_sent(stack, places_of(contexts, name), signs) for name, stack in vectors.items()}, {}

    def coded(self, coding: Coding) -> Coding:
        return coding.coded(1, scales=1)


def signs(values: Tensor) -> Tensor:
    """Return ± each row's mean magnitude, (R, n)."""
    total = sum_over_first(values.abs().double().T.contiguous())
    scale = quotient(total, values.shape[1]).to(values.dtype).unsqueeze(1)
    return scale.where(values >= 0, -scale)


UPDATE = Sign
TITLE, REFERENCES = "sign with error feedback", ("karimireddy2019error",)
EXAMPLE = {"feedback": True}
