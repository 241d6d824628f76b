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
        displacements: ‖a_i‖₁ of each member, (S,); None where not asked for, or where the client optimizer has none.
        factors: by what factor each Δ_i counts, (S,); 1 without a normalisation.
        common: the ‖a‖₁ that all members have in common, if they do and it is asked for.
    """

    displacements: list[float | None]
    factors: np.ndarray
    common: float | None


def known_work(method: Method, stepping: Stepping, cohort: Cohort, round: int) -> Work:
    """Return the work of a round's cohort."""
    size = len(cohort.clients)
    if not method.uses_displacement:
        return Work([None] * size, np.ones(size), None)
    strength = method.local.strength
    displacements = [
        stepping.displacement(steps, guessed, round=round, mu=strength)
        for steps, guessed in zip(cohort.steps.tolist(), cohort.guessed.tolist(), strict=True)
    ]
    known = np.array(displacements, dtype=np.float64)
    factors = np.ones(size)
    if method.normalize is not None:
        factors = method.normalize.factors(known, cohort.steps, cohort.shares, strength)
    return Work(displacements, factors, displacements[0] if len(set(displacements)) == 1 else None)
