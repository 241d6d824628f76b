"""Clipping: a client's vectors together have at most a given norm; a mean of them is the norm-bounded mean.

    updates:   v ← v min(1, C / √Σ_v ‖v/s_v‖²)                 over all vectors that the client reports
    means:     Δ̄ ← Δ̄ min(1, C / ‖Δ̄‖)

    C     ``norm``                 s_v   ``scales``, by a vector's name, 1 by default

SCAFFOLD's Ψ is of a gradient's size and Δ is not, so each vector may have a scale: ``scales: {psi: 10}``. After the sum
Δ̄ alone is bounded. Packed: as before, for the bound is the server's. State: none.

Reference: Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?", 2019, Section 4 (norm bound).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from hpcfed.errors import InputError
from hpcfed.types import DELTA, Means, State
from hpcfed.updates._base import LESSENS, NORMS, MeansPart, PartContext, Sent, UpdatePart, Vectors
from hpcfed.updates._clipping import clip_factor


class Clip(UpdatePart):
    """A bound on the norm of each client's vectors."""

    keeps: ClassVar[frozenset[str]] = LESSENS | {NORMS}

    norm: float = Field(gt=0)
    scales: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        factor = clip_factor(vectors, self.norm, self.scales)
        return Sent({name: vector * factor for name, vector in vectors.items()} if factor != 1.0 else vectors)


class ClipMean(MeansPart):
    """A bound on ‖Δ̄‖."""

    norm: float = Field(gt=0)

    def after(self, means: Means, context: PartContext) -> Means:
        if DELTA not in means.vectors:
            raise InputError("means: clip bounds Δ̄, and this method's clients report no Δ_i", remedy="leave it out")
        factor = clip_factor({DELTA: means.delta}, self.norm, {})
        return replace(means, vectors={**means.vectors, DELTA: means.delta * factor})


UPDATE, MEANS = Clip, ClipMean
TITLE, REFERENCES = "norm-bounded mean", ("sun2019can",)
EXAMPLE = {"norm": 0.5}
