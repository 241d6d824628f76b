"""Effective steps: ‖a_i‖₁, the weight that a client's gradients have in Δ_i = η Σ_k a_k g_k.

It is what the local solver does to a single number x = (y − w)/(−η) whose gradients are all 1:

    τ times:   v ← ρ v + 1 − ημ x;   x ← x + v          then a guess of τ' steps:   x ← x + ρ (1 − ρ^τ')/(1 − ρ) v

so that x = τ for plain SGD, Σ_k (1 − ρ^(τ−k))/(1 − ρ) with momentum ρ, Σ_k (1 − ημ)^k with a proximal term, and
GeL's eq. (6) with a guess. Weight decay is part of the client's loss and does not enter.

Reference: Wang et al., "FedNova", NeurIPS 2020, Section 4; Boukhari et al., GeL, eq. (6).
"""

from __future__ import annotations

import math
from functools import lru_cache

from hpcfed.arithmetic.elementary import power


@lru_cache(maxsize=1 << 14)
def effective_steps(steps: int, guessed: float, *, lr: float, momentum: float, mu: float) -> float:
    """Return ‖a_i‖₁ of a client that takes `steps` steps and then guesses `guessed` more (``inf`` for the limit)."""
    x = v = 0.0
    for _ in range(steps):
        v = momentum * v + (1.0 - lr * mu * x)
        x += v
    return x + guess_factor(momentum, guessed) * v


def guess_factor(decay: float, guessed: float) -> float:
    """Return ρ + ρ² + … + ρ^τ' = ρ (1 − ρ^τ') / (1 − ρ): how often a guess repeats the last step."""
    return decay / (1 - decay) * (1.0 if math.isinf(guessed) else 1 - power(decay, guessed))
