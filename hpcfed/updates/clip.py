"""Clipping: a client's vectors together have at most a given norm; a mean of them is the norm-bounded mean.

    updates:   v ← v min(1, C / √Σ_v ‖v/s_v‖²)                 over all vectors that the client reports
    means:     Δ̄ ← Δ̄ min(1, C / ‖Δ̄‖)

    C     ``norm``                 s_v   ``scales``, by a vector's name, 1 by default

    with γ     C ← C exp(−η (b̄ − γ)),      b_i = 1 where √Σ_v ‖v/s_v‖² ≤ C;  γ  ``quantile``, η  ``rate``, C_1  ``norm``

SCAFFOLD's Ψ is of a gradient's size and Δ is not, so each vector may have a scale: ``scales: {psi: 10}``. After the sum
Δ̄ alone is bounded. With a quantile the norm goes to where a share γ of the clients is below it: each sends b_i − ½,
which `noise` hides, too, with σ_b = q N / 20. Packed: as before, for the bound is the server's, and 8 bytes for b_i.
State: C at the server, with a quantile.

Reference: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021,
Algorithm 1; Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?", 2019, Section 4 (norm bound).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from hpcfed.arithmetic.elementary import exp
from hpcfed.errors import InputError
from hpcfed.types import DELTA, Means, State
from hpcfed.updates._base import LESSENS, MOVED_NORM, NORMS, MeansPart, PartContext, Vectors
from hpcfed.updates._clipping import clip_factors, factors_like
from hpcfed.updates._tile import SentTile, TilePart

BELOW = "below"
"""Name of b_i − ½."""


class Clip(TilePart):
    """A bound on the norm of each client's vectors."""

    keeps: ClassVar[frozenset[str]] = LESSENS | {NORMS}

    norm: float = Field(gt=0)
    scales: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    quantile: float | None = Field(None, gt=0, lt=1)
    rate: float = Field(0.2, gt=0)
    later: ClassVar[frozenset[str]] = frozenset({"quantile", "rate"})

    @property
    def scalars(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.quantile is None else (BELOW,)

    def begin_shared(self, vectors: Vectors) -> State:
        if self.quantile is None:
            return {}
        return {MOVED_NORM: next(iter(vectors.values())).new_tensor(self.norm)}

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        norm = self.norm if self.quantile is None else float(shared[MOVED_NORM])
        factors = clip_factors(vectors, norm, self.scales)
        below = [{} if self.quantile is None else {BELOW: 0.5 if factor == 1.0 else -0.5} for factor in factors]
        if any(factor != 1.0 for factor in factors):
            vectors = {name: stack * factors_like(stack, factors) for name, stack in vectors.items()}
        return SentTile(vectors, [{}] * len(states), scalars=below)

    def share(self, shared: State, means: Vectors) -> State:
        if self.quantile is None:
            return shared
        return {MOVED_NORM: shared[MOVED_NORM] * exp((self.quantile - 0.5 - means[BELOW]) * self.rate)}


class ClipMean(MeansPart):
    """A bound on ‖Δ̄‖."""

    norm: float = Field(gt=0)

    def after(self, means: Means, context: PartContext) -> Means:
        if DELTA not in means.vectors:
            raise InputError("means: clip bounds Δ̄, and this method's clients report no Δ_i", remedy="leave it out")
        (factor,) = clip_factors({DELTA: means.delta.unsqueeze(0)}, self.norm, {})
        return replace(means, vectors={**means.vectors, DELTA: means.delta * factor})


UPDATE, MEANS = Clip, ClipMean
TITLE, REFERENCES = "norm-bounded mean", ("sun2019can", "andrew2021differentially")
EXAMPLE = {"norm": 0.5}
