"""FedNova: FedAvg on updates normalised by each client's effective number of local steps.

    client i:   as FedAvg, with ``mu`` as FedProx, with ``local.momentum`` as FedAvgCM
    server:     v ← β v + τ_eff Σ_{i∈S} p_i Δ_i / ‖a_i‖₁;      w ← w − η_g v

    ‖a_i‖₁     effective steps: how far client i moves, over −η, if all its gradients are 1:  τ_i for SGD,
               Σ_k (1 − ρ^(τ_i−k)) / (1 − ρ) with momentum ρ,  Σ_k (1 − ημ)^k with a proximal term
    τ_eff      ``tau_eff``: "norm" Σ p_i ‖a_i‖₁,  "steps" Σ p_i τ_i,  "auto" steps with a proximal term, else norm
    β          ``beta``, momentum at the server             η_g   ``server_lr``             μ   ``mu``

Every rank knows all ‖a_i‖₁ beforehand, so p_i τ_eff / ‖a_i‖₁ is client i's weight in the one sum, and FedExP's norms
are those of τ_eff Δ_i / ‖a_i‖₁.

Reduced: d (Δ). State: v at the server (d,). Equal ‖a_i‖₁ and β = 0 are FedAvg, bit for bit.

Reference: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous federated
optimization", NeurIPS 2020, eqs. (3)-(6) and Section 4.2; τ_eff with a proximal term as in its code.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfed.algorithms.fedavgm import Momentum
from hpcfed.algorithms.fedprox import Prox
from hpcfed.types import Part


class OptionalProx(Prox):
    """FedProx's clients; μ is 0 by default."""

    choice: ClassVar[str | None] = None

    mu: float = Field(0.0, ge=0)


class PerStep(Part):
    """Δ_i enters the averages as τ_eff Δ_i / ‖a_i‖₁."""

    choice: ClassVar[str | None] = "steps"

    tau_eff: Literal["auto", "norm", "steps"] = "auto"

    def factors(self, effective_steps: np.ndarray, steps: np.ndarray, shares: np.ndarray, prox_mu: float) -> np.ndarray:
        by_steps = self.tau_eff == "steps" or (self.tau_eff == "auto" and prox_mu > 0)
        if not by_steps and effective_steps.min() == effective_steps.max():
            return np.ones_like(effective_steps)
        tau_eff = (shares * (steps if by_steps else effective_steps)).sum()  # a dot product's last bits are BLAS's
        moved = effective_steps > 0  # a client that took no step: Δ_i = 0, and 1 for what a part makes of it
        return np.divide(tau_eff, effective_steps, out=np.ones_like(effective_steps), where=moved)


class NovaMomentum(Momentum):
    """FedAvg-M's server; β is 0 by default."""

    choice: ClassVar[str | None] = None

    beta: float = Field(0.0, ge=0, lt=1)


LOCAL, NORMALIZE, SERVER = OptionalProx, PerStep, NovaMomentum
TITLE, REFERENCES = "FedNova", ("wang2020tackling",)
EXAMPLE = {"mu": 0.2, "beta": 0.3}
