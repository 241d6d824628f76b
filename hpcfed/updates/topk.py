"""Top-k: of each vector the k entries of largest magnitude are sent, with their places.

    C(p)_j = p_j where |p_j| is among the k largest, else 0;      of equal ones the first

    k     ``fraction`` of n, at least 1            error feedback: ``feedback``

Packed: k numbers, each with its place in ⌈log2 n⌉ bits. State: e_i of each vector, with feedback.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018, Algorithm 1; error feedback as in
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hpcfed.types import State
from hpcfed.updates._base import NORMS, PartContext, Sent, UpdatePart, Vectors
from hpcfed.updates._coding import Coding
from hpcfed.updates._feedback import next_errors, no_errors, with_errors

if TYPE_CHECKING:
    from torch import Tensor


class TopK(UpdatePart):
    """The largest entries."""

    fraction: float = Field(gt=0, le=1)
    feedback: bool = True

    @property
    def keeps(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({NORMS} if self.fraction == 1 else ())

    @property
    def stateful(self) -> bool:
        return self.feedback

    def begin(self, vectors: Vectors) -> State:
        return no_errors(vectors) if self.feedback else {}

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        owed = with_errors(vectors, state)
        places = {name: largest(vector, count_of(self.fraction, len(vector))) for name, vector in owed.items()}
        sent = {name: only(owed[name], chosen) for name, chosen in places.items()}
        chosen = {name: each for name, each in places.items() if each is not None}
        return Sent(sent, next_errors(owed, sent, state), chosen)

    def coded(self, coding: Coding) -> Coding:
        count = count_of(self.fraction, coding.entries)
        return coding.chosen(count, (coding.entries - 1).bit_length())


def count_of(fraction: float, entries: int) -> int:
    """Return k."""
    return max(1, round(fraction * entries))


def largest(vector: Tensor, count: int) -> Tensor | None:
    """Return the places, in order, of the entries of largest magnitude, (k,) int64; None for all."""
    if count >= len(vector):
        return None
    sizes = vector.abs()
    least = _least_of(sizes, count)
    above, equal = sizes > least, sizes == least
    room = count - above.sum()
    return (above | (equal & (equal.cumsum(0) <= room))).nonzero().squeeze(1)


def _least_of(sizes: Tensor, count: int) -> Tensor:
    """Return the least of the k largest numbers; on a CPU NumPy's selection takes a sixth of torch's time."""
    if sizes.device.type != "cpu":
        return sizes.topk(count, sorted=False).values.min()
    import numpy as np

    place = len(sizes) - count
    return sizes.new_tensor(np.partition(sizes.numpy(), place)[place])


def only(vector: Tensor, places: Tensor | None) -> Tensor:
    """Return a vector with the entries at some places, and 0 at all others."""
    if places is None:
        return vector
    return vector.new_zeros(vector.shape).index_put((places,), vector[places])


UPDATE = TopK
TITLE, REFERENCES = "top-k with error feedback", ("stich2018sparsified", "karimireddy2019error")
EXAMPLE = {"fraction": 0.1}
