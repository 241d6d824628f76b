"""Error feedback: what was not sent is added to the next round's vector.

    p_i = v_i + e_i;      sent: C(p_i);      e_i ← p_i − C(p_i),  0 at the client's first participation

Vectors that a client's own state carries on have no e_i: SCAFFOLD's c_i ← c_i − C(Ψ_i) has what was not sent in its
next Ψ_i = c_i − g_i, and an e_i would add it once more.

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes",
ICML 2019, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hpcfed.types import State
from hpcfed.updates._base import LESSENS, PartContext, Vectors, zeros
from hpcfed.updates._tile import SentTile, TilePart


class WithFeedback(TilePart):
    """A part that says what C is; with ``feedback`` the state is e_i of each vector that is not carried."""

    keeps: ClassVar[frozenset[str]] = LESSENS

    feedback: bool = True

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.feedback

    def begin(self, vectors: Vectors) -> State:
        return zeros(vectors) if self.feedback else {}

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        import torch

        carried_on = [name for name in vectors if name in states[0]]
        errors = {name: torch.stack([state[name] for state in states]) for name in carried_on}
        owed = {name: stack + errors[name] if name in errors else stack for name, stack in vectors.items()}
        sent, places = self.compressed(owed, contexts)
        after = {name: (owed[name] - sent[name]).unbind() for name in carried_on}
        # e_i of vectors that this round does not report stay
        next_states = [{**state, **{name: after[name][row] for name in after}} for row, state in enumerate(states)]
        return SentTile(sent, next_states, places)

    def compressed(self, vectors: Vectors, contexts: Sequence[PartContext]) -> tuple[Vectors, Vectors]:
        """Return C of R clients' vectors, (R, n), and the places of the entries that it has chosen, (R, k) int64."""
        raise NotImplementedError
