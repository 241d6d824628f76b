"""Effective steps of a cohort's members and the factors of their Δ_i, known to every rank before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcfed.client.solver import Stepping
from hpcfed.cohort import Cohort, members
from hpcfed.types import Method

ROUNDING = 1e-12
"""Relative; two quotients of the same four numbers differ by a few units in the last place of float64, 2e-16."""


def effective_steps_and_factors(
    method: Method, stepping: Stepping, cohort: Cohort, round: int
) -> tuple[list[float | None], np.ndarray]:
    """Return ‖a_i‖₁ of each member, (S,), and the factor of its Δ_i, (S,), 1 without a normalisation.

    ‖a_i‖₁ is None where the method does not ask for it, and for client optimizers that have none.
    """
    size = len(cohort.clients)
    if not (size and method.uses_effective_steps):
        return [None] * size, np.ones(size)
    prox_mu = method.local.prox_mu
    effective_steps = [
        stepping.effective_steps(steps, guessed, round=round, mu=prox_mu)
        for steps, guessed in zip(cohort.steps.tolist(), cohort.guessed.tolist(), strict=True)
    ]
    if method.normalize is None:
        return effective_steps, np.ones(size)
    known = np.array(effective_steps, dtype=np.float64)
    return effective_steps, method.normalize.factors(known, cohort.steps, cohort.shares, prox_mu)


def skip_correction(
    method: Method, stepping: Stepping, cohort: Cohort, round: int, factors: np.ndarray, kept: np.ndarray
) -> float | None:
    """Return the number that makes the kept members' factors those of a cohort of them alone; None if no number does.

    `factors` are those of the whole cohort, (S,); `kept` is (S,) bool.
    """
    if method.normalize is None or kept.all() or not kept.any():
        return 1.0
    alone = members(cohort, kept)
    total = alone.shares.sum()
    _, own = effective_steps_and_factors(method, stepping, replace(alone, shares=alone.shares / (total or 1.0)), round)
    before, moved = factors[kept], alone.steps > 0
    if ((own != 0) != (before != 0))[moved].any():
        return None
    moved &= before != 0
    changes = own[moved] / before[moved]
    if not len(changes):
        return 1.0
    return float(changes[0]) if np.allclose(changes, changes[0], rtol=ROUNDING, atol=0.0) else None


def are_ones(factors: np.ndarray) -> bool:
    """Whether all factors, (S,), are 1, but for rounding: then Δ̄ is the mean of the Δ_i."""
    return bool(np.allclose(factors, 1.0, rtol=ROUNDING, atol=0.0))


def same_factors(these: np.ndarray, others: np.ndarray) -> bool:
    """Whether two cohorts' factors, (S,), are the same but for rounding."""
    return bool(np.allclose(these, others, rtol=ROUNDING, atol=0.0))


def common_to_all(effective_steps: list[float | None]) -> float | None:
    """Return the ‖a‖₁ that all members share; None if they differ or have none."""
    return effective_steps[0] if len(set(effective_steps)) == 1 else None
