"""What every rank knows of a cohort's work before it is done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfed.client.solver import Stepping
from hpcfed.cohort import Cohort
from hpcfed.types import Method


@dataclass(frozen=True)
class Work:
    """A round's work.

    Attributes:
        effective_steps: ‖a_i‖₁ of each member, (S,); None where not asked for, or where the client optimizer has none.
        factors: by what factor each Δ_i counts, (S,); 1 without a normalisation.
        common: the ‖a‖₁ that all members have in common, if they do and it is asked for.
    """

    effective_steps: list[float | None]
    factors: np.ndarray
    common: float | None


def known_work(method: Method, stepping: Stepping, cohort: Cohort, round: int) -> Work:
    """Return the work of a round's cohort."""
    size = len(cohort.clients)
    if not method.uses_effective_steps:
        return Work([None] * size, np.ones(size), None)
    prox_mu = method.local.prox_mu
    effective_steps = [
        stepping.effective_steps(steps, guessed, round=round, mu=prox_mu)
        for steps, guessed in zip(cohort.steps.tolist(), cohort.guessed.tolist(), strict=True)
    ]
    known = np.array(effective_steps, dtype=np.float64)
    factors = np.ones(size)
    if method.normalize is not None:
        factors = method.normalize.factors(known, cohort.steps, cohort.shares, prox_mu)
    return Work(effective_steps, factors, effective_steps[0] if len(set(effective_steps)) == 1 else None)
