"""Centred clipping: what a client sends is at most a given distance from the last round's mean.

    v ← m + (v − m) min(1, τ / √Σ_v ‖v − m‖²);      m ← the round's mean, 0 at first

    τ     ``norm``

A client moves the mean by its weight times τ at most, in the one sum of a round; with FedNova, whose factor multiplies
what was decoded, by τ_eff/‖a_i‖₁ times as much. Of the paper's iterations this is one. Packed: as before, for m and τ
are the server's. State: m of each vector, at the server.

Reference: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from hpcfed.types import State
from hpcfed.updates._base import LESSENS, NORMS, PartContext, Vectors, zeros
from hpcfed.updates._clipping import clip_factors, factors_like
from hpcfed.updates._tile import SentTile, TilePart


class CentredClip(TilePart):
    """A bound on the distance from the last mean."""

    keeps: ClassVar[frozenset[str]] = LESSENS | {NORMS}

    norm: float = Field(gt=0)

    def begin_shared(self, vectors: Vectors) -> State:
        return zeros(vectors)

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        apart = {name: stack - shared[name] for name, stack in vectors.items()}
        factors = clip_factors(apart, self.norm, {})
        sent = {}
        for name, stack in vectors.items():
            of_rows = factors_like(stack, factors)
            sent[name] = stack.where(of_rows == 1, shared[name] + apart[name] * of_rows)
        return SentTile(sent, [{}] * len(states))

    def share(self, shared: State, means: Vectors) -> State:
        return {**shared, **means}


UPDATE = CentredClip
TITLE, REFERENCES = "centred clipping", ("karimireddy2021learning",)
EXAMPLE = {"norm": 0.5}
