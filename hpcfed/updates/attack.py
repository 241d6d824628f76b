"""Attackers: some clients send a multiple of their vectors, or of the last round's mean, or train on wrong labels.

    what: own       v ← ``factor`` · v                        −1 flips signs, 100 is one client's voice of a hundred
    what: mean      v ← ``factor`` · (last round's mean)      −1 points against it (inner-product manipulation)
    what: labels    y ← C − 1 − y of each sample that the client trains on (label flipping); v as it is then

    attackers: ``clients`` by number, and each other one with probability ``fraction``, the same ones in all rounds

A part for experiments: it comes first in the list, and what follows is the defence. Packed: as before. State: with
``what: mean`` the mean of each vector, at the server.

Reference: Xie, Koyejo, Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI
2019, with the mean of the round itself; Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust
federated learning", USENIX Security 2020, Section 5.1 (labels).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.types import State
from hpcfed.updates._base import LESSENS, NORMS, PartContext, Sent, UpdatePart, Vectors, zeros

if TYPE_CHECKING:
    from torch import Tensor


class Attack(UpdatePart):
    """Clients that send something else."""

    keeps: ClassVar[frozenset[str]] = LESSENS | {NORMS}

    clients: list[int] = Field(default_factory=list)
    fraction: float = Field(0.0, ge=0, le=1)
    factor: float = -1.0
    what: Literal["own", "mean", "labels"] = "own"

    def begin_shared(self, vectors: Vectors) -> State:
        return zeros(vectors) if self.what == "mean" else {}

    def samples(self, x: Tensor, y: Tensor, context: PartContext) -> tuple[Tensor, Tensor]:
        if self.what != "labels" or not self._attacks(context):
            return x, y
        assert context.num_classes is not None
        return x, context.num_classes - 1 - y

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        if self.what == "labels" or not self._attacks(context):
            return Sent(vectors)
        from_what = vectors if self.what == "own" else {name: shared[name] for name in vectors}
        return Sent({name: vector * self.factor for name, vector in from_what.items()})

    def share(self, shared: State, means: Vectors) -> State:
        return {**shared, **means} if self.what == "mean" else shared

    def _attacks(self, context: PartContext) -> bool:
        assert context.client is not None
        return context.client.client in self.clients or context.stream(each_round=False).random() < self.fraction


UPDATE = Attack
TITLE, REFERENCES = "attackers", ("xie2020fall", "fang2020local")
EXAMPLE = {"fraction": 0.3, "factor": -2.0}
