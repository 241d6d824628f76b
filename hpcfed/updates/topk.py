"""Top-k: of each vector the k entries of largest magnitude are sent, with their places.

    C(p)_j = p_j where |p_j| is among the k largest, else 0;      of equal ones the first

    k     ``fraction`` of n, at least 1            error feedback: ``feedback``

Packed: k numbers, each with its place in ⌈log2 n⌉ bits. State: e_i of each vector, with feedback.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018, Algorithm 1; error feedback as in
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from hpcfed.updates._base import PartContext, Vectors
from hpcfed.updates._choosing import Choosing, only
from hpcfed.updates._coding import Coding

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Choosing):
    """The largest entries."""

    def compressed(self, vectors: Vectors, contexts: Sequence[PartContext]) -> tuple[Vectors, Vectors]:
        counts = {name: self.count_of(stack.shape[1]) for name, stack in vectors.items()}
        places = {name: largest(vectors[name], k) for name, k in counts.items() if k < vectors[name].shape[1]}
        sent = {name: only(stack, places[name]) if name in places else stack for name, stack in vectors.items()}
        return sent, places

    def coded(self, coding: Coding) -> Coding:
        return coding.chosen(self.count_of(coding.entries), (coding.entries - 1).bit_length())


def largest(stack: Tensor, count: int) -> Tensor:
    """Return the places, in order, of each row's largest entries, (R, n) → (R, k) int64; NaN is the largest of all."""
    sizes = stack.abs().nan_to_num_(nan=inf, posinf=inf)
    least = _least_of(sizes, count)
    above, equal = sizes > least, sizes == least
    room = count - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1].view(len(stack), count)


def _least_of(sizes: Tensor, count: int) -> Tensor:
    """Return the least of each row's k largest numbers, (R, 1); NumPy's selection takes a sixth of torch's time."""
    if sizes.device.type != "cpu":
        return sizes.topk(count, sorted=False).values.amin(1, keepdim=True)
    import numpy as np

    place = sizes.shape[1] - count
    return sizes.new_tensor(np.partition(sizes.numpy(), place)[:, place : place + 1])


UPDATE = TopK
TITLE, REFERENCES = "top-k with error feedback", ("stich2018sparsified", "karimireddy2019error")
EXAMPLE = {"fraction": 0.1}
