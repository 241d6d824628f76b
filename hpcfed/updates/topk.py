"""Top-k: of each vector the k entries of largest magnitude are sent, with their places.

    C(p)_j = p_j where |p_j| is among the k largest, else 0;      of equal ones the first

    k     ``fraction`` of n, at least 1            error feedback: ``feedback``

Packed: k numbers, each with its place in ⌈log2 n⌉ bits. State: e_i of each vector, with feedback.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018, Algorithm 1; error feedback as in
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfed.updates._base import PartContext, Vectors
from hpcfed.updates._choosing import Choosing, only
from hpcfed.updates._coding import Coding

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Choosing):
    """The largest entries."""

    def compressed(self, vectors: Vectors, context: PartContext) -> tuple[Vectors, Vectors]:
        counts = {name: self.count_of(len(vector)) for name, vector in vectors.items()}
        places = {name: largest(vectors[name], k) for name, k in counts.items() if k < len(vectors[name])}
        sent = {name: only(vector, places[name]) if name in places else vector for name, vector in vectors.items()}
        return sent, places

    def coded(self, coding: Coding) -> Coding:
        return coding.chosen(self.count_of(coding.entries), (coding.entries - 1).bit_length())


def largest(vector: Tensor, count: int) -> Tensor:
    """Return the places, in order, of the entries of largest magnitude, (k,) int64."""
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


UPDATE = TopK
TITLE, REFERENCES = "top-k with error feedback", ("stich2018sparsified", "karimireddy2019error")
EXAMPLE = {"fraction": 0.1}
