"""Gaussian noise on clipped updates: differential privacy of each client.

    means:     v̄ ← (Σ_S v_i + N(0, (z C s_v)² I)) / (q N)     by a server that is trusted, of each vector of the method
    updates:   v ← v + N(0, (z C s_v)² I)                     by each client, of each vector that it reports

    z     ``multiplier``, or the least that keeps ε ≤ ``epsilon`` at ``delta`` after all rounds
    C     ``norm`` of the part ``clip``, the last of ``updates`` or before the noise;      s_v   its ``scales``
    q N   the expected size of a cohort, a number of the recipe: the drawn |S| would tell who takes part

δ is N^-1.1 by default. Of the input of a server's step nothing but noised means is left: q(S) and |S| are the expected
ones, and norms and scalars of clients are not known. Where C follows a quantile, vectors have z_Δ in the place of z and
the bits σ_b = q N / 20, z⁻² = z_Δ⁻² + (2σ_b)⁻², which together cost what z does. With z = 0 nothing is changed.
Packed: as before. State: none.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from hpcfed.rng import Purpose, normals
from hpcfed.types import Means, Part, State
from hpcfed.updates._base import (
    DELTA_ITSELF,
    LESSENS,
    NORMS,
    SUM,
    MeansPart,
    PartContext,
    Sent,
    UpdatePart,
    Vectors,
)

if TYPE_CHECKING:
    from torch import Tensor


class Amount(Part):
    """How much noise."""

    multiplier: float | None = Field(None, ge=0)
    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _some_noise(self) -> Amount:
        if self.multiplier is None and self.epsilon is None:
            raise ValueError("'multiplier' or 'epsilon'")
        if self.multiplier == 0 and self.epsilon is not None:
            raise ValueError("'multiplier' above 0 beside 'epsilon'")
        return self


class LocalNoise(Amount, UpdatePart):
    """Noise on a client's vectors, which nobody else ever sees without it."""

    @property
    def keeps(self) -> frozenset[str]:  # type: ignore[override]
        return LESSENS | {NORMS, DELTA_ITSELF} if self.multiplier == 0 else frozenset()

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        if self.multiplier == 0:
            return Sent(vectors)
        assert context.privacy is not None
        assert context.client is not None
        noised = {}
        for number, (name, vector) in enumerate(vectors.items()):
            place = context.place + (number << 32)
            about = context.seed, Purpose.UPDATES, context.round, context.client.client, place
            noised[name] = vector + _drawn(about, len(vector), context.privacy.size(name)).to(vector)
        return Sent(noised)


class Noise(Amount, MeansPart):
    """Noise on the means."""

    @property
    def keeps(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({NORMS, SUM, DELTA_ITSELF} if self.multiplier == 0 else ())

    def after(self, means: Means, context: PartContext) -> Means:
        if self.multiplier == 0:
            return means
        assert context.privacy is not None
        privacy, vectors = context.privacy, {}
        share = means.cohort_size / privacy.expected
        for number, (name, vector) in enumerate(means.vectors.items()):
            about = context.seed, Purpose.MEANS, context.round, number, context.place
            noise = _drawn(about, privacy.layout.size, privacy.deviation(name, context.clip)).to(vector.device)
            vectors[name] = (vector if share == 1 else vector * share) + privacy.layout.opened(noise, vector)
        bits = {}
        for number, (name, mean) in enumerate(means.scalars.items(), start=len(vectors)):
            about = context.seed, Purpose.MEANS, context.round, number, context.place
            bits[name] = mean * share + float(_drawn(about, 1, privacy.mechanism.bit_deviation)) / privacy.expected
        return replace(
            means,
            vectors=vectors,
            mean_delta_sq=nan,
            fraction=privacy.fraction,
            cohort_size=round(privacy.expected),
            effective_steps=None,
            scalars=bits,
            client_scalars={},
        )


Address = tuple[int, Purpose, int, int, int]


def _drawn(about: Address, size: int, deviation: float) -> Tensor:
    """Return noise, (n,) float64 on the host."""
    import torch

    return torch.from_numpy(normals(*about, size)) * deviation


UPDATE, MEANS = LocalNoise, Noise
TITLE, REFERENCES = "Gaussian noise for client-level privacy", ("mcmahan2018learning",)
EXAMPLE = {"multiplier": 1.0}
