"""Error feedback: what was not sent is added to the next round's vector.

    p_i = v_i + e_i;      sent: C(p_i);      e_i ← p_i − C(p_i),  0 at the client's first participation

Vectors that a client's own state carries on have no e_i: SCAFFOLD's c_i ← c_i − C(Ψ_i) has what was not sent in its
next Ψ_i = c_i − g_i, and an e_i would add it once more.

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes",
ICML 2019, Algorithm 2.
"""

from __future__ import annotations

from typing import ClassVar

from hpcfed.types import State
from hpcfed.updates._base import LESSENS, PartContext, Sent, UpdatePart, Vectors, zeros


class WithFeedback(UpdatePart):
    """A part that says what C is; with ``feedback`` the state is e_i of each vector that is not carried."""

    keeps: ClassVar[frozenset[str]] = LESSENS

    feedback: bool = True

    @property
    def stateful(self) -> bool:
        return self.feedback

    def begin(self, vectors: Vectors) -> State:
        return zeros(vectors) if self.feedback else {}

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        owed = {name: vector + state[name] if name in state else vector for name, vector in vectors.items()}
        sent, places = self.compressed(owed, context)
        errors = {name: owed[name] - sent[name] for name in owed if name in state}
        return Sent(sent, {**state, **errors}, places)  # e_i of vectors that this round does not report stay

    def compressed(self, vectors: Vectors, context: PartContext) -> tuple[Vectors, Vectors]:
        """Return C of each vector, (n,), and the places of the entries that it has chosen, (k,) int64, if any."""
        raise NotImplementedError
