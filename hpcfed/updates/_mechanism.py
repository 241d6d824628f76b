"""The mechanism of a run whose means are noised, and what a simulation needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import nan, sqrt
from typing import Any

from hpcfed.updates._layout import Layout

SLACK = 1 + 2.0**-20
"""Factor of C for the rounding of clipped vectors, in float32, and of their sum."""
WITHHELD = ("cohort", "local_loss", "mean_delta_sq", "skipped", "gradients", "imbalance", "seconds of the phases")
"""Columns of the record that are empty."""


@dataclass(frozen=True)
class Mechanism:
    """The noise of a round, and how its cohort is drawn.

    Attributes:
        clip, scales: C and s_v.
        multiplier: z; 0 where it is to be solved for.
        delta: δ.
        rounds: T.
        num_clients: N, those that can be drawn.
        expected: q N, the expected size of a cohort.
        sampling: ``bernoulli`` or ``size``.
        is_secret: whether cohorts are drawn from a secret seed.
        at_clients: whether each client adds the noise.
        quantile: γ, which C follows; None where it is fixed.
        survivors: least number of clients of whom a masked sum is opened; None without masks.
    """

    clip: float
    scales: Mapping[str, float]
    multiplier: float
    delta: float
    rounds: int
    num_clients: int
    expected: float
    sampling: str
    is_secret: bool
    at_clients: bool = False
    quantile: float | None = None
    survivors: int | None = None

    @property
    def bit_deviation(self) -> float:
        """σ_b, of the noise on the sum of b_i − ½; 0 without a quantile."""
        return 0.0 if self.quantile is None else self.expected / 20

    @property
    def vector_multiplier(self) -> float:
        """z_Δ = (z⁻² − (2σ_b)⁻²)^-½, with which vectors and bits together cost what z does; nan where nothing does."""
        if self.quantile is None:
            return self.multiplier
        left = self.multiplier**-2 - (2 * self.bit_deviation) ** -2
        return left**-0.5 if left > 0 else nan

    @property
    def fraction(self) -> float:
        """q."""
        return self.expected / self.num_clients

    @property
    def is_all(self) -> bool:
        """Whether each round has all clients."""
        return self.expected == self.num_clients

    @property
    def replaces(self) -> bool:
        """Whether neighbours differ in what one client has, not in whether there is one."""
        return self.are_known or (self.sampling == "size" and not self.is_all)

    @property
    def are_known(self) -> bool:
        """Whether those from whom a client is hidden know who takes part: the server, or others by whom it masks."""
        return self.at_clients or self.survivors is not None

    @property
    def seen_multiplier(self) -> float:
        """z of the least noise in what is seen: behind masks, of a sum of the noise of all who are left."""
        return self.multiplier * sqrt(self.survivors) if self.at_clients and self.survivors else self.multiplier

    @property
    def is_amplified(self) -> bool:
        """Whether it helps that nobody knows who is drawn."""
        return self.is_secret and not self.is_all and not self.are_known

    @property
    def counts_draws(self) -> bool:
        """Whether the rounds count in which a client was drawn, which are known."""
        return not self.is_secret and not self.is_all

    @property
    def neighbours(self) -> str:
        """The neighbouring relation in words."""
        if self.at_clients and self.survivors is not None:
            return f"replace what one client has, seen by the server in sums of {self.survivors} or more"
        if self.are_known:
            return f"replace what one client has{', seen by the server' if self.at_clients else ''}"
        return "replace one client" if self.replaces else "add or remove one client"

    @property
    def drawn(self) -> str:
        """The sampling in words."""
        if self.is_all:
            return f"all {self.num_clients:,} clients in each round"
        how = "without replacement" if self.sampling == "size" else "each with the same probability"
        if self.are_known:
            who = "as if one were drawn in each round" if self.is_secret else "by the one drawn most often"
        else:
            who = "secretly" if self.is_secret else "from a public seed, so without amplification"
        return f"{self.expected:,.6g} of {self.num_clients:,} clients, {how}, {who}"

    def with_multiplier(self, multiplier: float) -> Mechanism:
        """Return the mechanism with another z."""
        return replace(self, multiplier=multiplier)

    def facts(self) -> dict[str, Any]:
        """Return what ``environment.json``, the certificate, the report and the card say of it."""
        return {
            "level": "client",
            "noise_by": "each client" if self.at_clients else "the server",
            "neighbours": self.neighbours,
            "delta": self.delta,
            "noise_multiplier": self.multiplier,
            "clip": self.clip,
            **({} if self.quantile is None else {"clip_follows_quantile": self.quantile}),
            **({"scales": dict(self.scales)} if self.scales else {}),
            "cohorts": self.drawn,
            "accountant": "RDP, by dp-accounting",
            "noise": generator_of_noise(self.is_secret),
            "withheld": [*WITHHELD],
        }


def generator_of_noise(is_secret: bool) -> str:
    """Return the generator in words, and who can repeat its draws."""
    public = "Philox of the recipe's seed: who has the recipe can take the noise away again"
    return "SHAKE-256 of a secret seed" if is_secret else public


@dataclass(frozen=True)
class Privacy:
    """Client-level privacy of a simulation.

    Attributes:
        mechanism: of the rounds.
        layout: where the model's parameters lie.
        key: with which clients' states are written to checkpoints; None without a secret seed.
    """

    mechanism: Mechanism
    layout: Layout
    key: bytes | None = None

    @property
    def expected(self) -> float:
        """q N."""
        return self.mechanism.expected

    @property
    def fraction(self) -> float:
        """q."""
        return self.mechanism.fraction

    @property
    def is_central(self) -> bool:
        """Whether sums are of clipped vectors without noise, which comes behind them."""
        return not self.mechanism.at_clients

    def bound(self, name: str, clip: float | None = None) -> float:
        """Return the largest norm of a client's vector; `clip` is C where a quantile moves it."""
        return (clip or self.mechanism.clip) * self.mechanism.scales.get(name, 1.0) * SLACK

    def size(self, name: str, clip: float | None = None) -> float:
        """Return the standard deviation of the noise in each entry of a sum, or of a client's vector."""
        return self.mechanism.vector_multiplier * self.bound(name, clip)

    def deviation(self, name: str, clip: float | None = None) -> float:
        """Return the standard deviation of the noise in each entry of a vector's mean."""
        return self.size(name, clip) / self.expected
