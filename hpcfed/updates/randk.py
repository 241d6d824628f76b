"""Random-k: k entries of each vector, drawn for each client and round, are sent; the server knows their places.

    with feedback:        C(p)_j = p_j where j is drawn, else 0
    without:              C(v)_j = (n/k) v_j where j is drawn, else 0;      unbiased
    v is carried:         C(v)_j = v_j where j is drawn, else 0;      scaled it would grow without bound

    k     ``fraction`` of n, at least 1            error feedback: ``feedback``

Packed: k numbers; places follow from the round's and the client's stream. State: e_i of each vector, with feedback.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcfed.updates._base import PartContext, Vectors
from hpcfed.updates._choosing import Choosing, only
from hpcfed.updates._coding import Coding


class RandomK(Choosing):
    """Entries drawn anew in each round."""

    def compressed(self, vectors: Vectors, contexts: Sequence[PartContext]) -> tuple[Vectors, Vectors]:
        import numpy as np
        import torch

        size = next(iter(vectors.values())).shape[1]
        count, streams = self.count_of(size), [context.stream() for context in contexts]
        if count == size:
            return vectors, {}
        places = {}
        for name, stack in vectors.items():
            drawn = [random.choice(size, count, replace=False, shuffle=False) for random in streams]
            places[name] = torch.from_numpy(np.sort(drawn)).to(stack.device)
        sent = {name: only(stack, places[name]) for name, stack in vectors.items()}
        unbiased = () if self.feedback else (name for name in sent if name not in contexts[0].carried)
        return {**sent, **{name: sent[name] * (size / count) for name in unbiased}}, places

    @property
    def treats_alike(self) -> bool:
        return self.fraction == 1

    def coded(self, coding: Coding) -> Coding:
        return coding.chosen(self.count_of(coding.entries), 0)


UPDATE = RandomK
TITLE, REFERENCES = "random-k with error feedback", ("stich2018sparsified", "karimireddy2019error")
EXAMPLE = {"fraction": 0.25}
