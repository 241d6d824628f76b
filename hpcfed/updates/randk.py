"""Random-k: k entries of each vector, drawn for each client and round, are sent; the server knows their places.

    with feedback:        C(p)_j = p_j where j is drawn, else 0
    without:              C(v)_j = (n/k) v_j where j is drawn, else 0;      unbiased

    k     ``fraction`` of n, at least 1            error feedback: ``feedback``

Packed: k numbers; places follow from the round's and the client's stream. State: e_i of each vector, with feedback.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

from pydantic import Field

from hpcfed.types import State
from hpcfed.updates._base import NORMS, PartContext, Sent, UpdatePart, Vectors
from hpcfed.updates._coding import Coding
from hpcfed.updates._feedback import next_errors, no_errors, with_errors
from hpcfed.updates.topk import count_of, only


class RandomK(UpdatePart):
    """Entries drawn anew in each round."""

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
        import torch

        size = len(next(iter(vectors.values())))
        count, owed, random = count_of(self.fraction, size), with_errors(vectors, state), context.stream()
        if count == size:
            return Sent(owed, next_errors(owed, owed, state))
        drawn = {name: torch.from_numpy(random.choice(size, count, replace=False, shuffle=False)) for name in owed}
        places = {name: each.sort().values.to(owed[name].device) for name, each in drawn.items()}
        sent = {name: only(vector, places[name]) for name, vector in owed.items()}
        if not self.feedback:
            sent = {name: vector * (size / count) for name, vector in sent.items()}
        return Sent(sent, next_errors(owed, sent, state), places)

    def coded(self, coding: Coding) -> Coding:
        return coding.chosen(count_of(self.fraction, coding.entries), 0)


UPDATE = RandomK
TITLE, REFERENCES = "random-k with error feedback", ("stich2018sparsified", "karimireddy2019error")
EXAMPLE = {"fraction": 0.25}
