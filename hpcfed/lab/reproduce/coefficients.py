"""GeL's figure 3 (the weights of a client's gradients), and the constants of GeL's convergence bound for drawn cohorts.

    a_i = (1 − ρ^(τ'_i+τ_i), …, 1 − ρ^(τ'_i+1)) / (1 − ρ)        eq. (6)
    w_i = p_i ‖a_i‖₁ / τ_eff,      τ_eff = Σ p_i ‖a_i‖₁
    A = m τ_eff Σ w_i² ‖a_i‖₂² / ‖a_i‖₁²,
    B = Σ w_i (‖a_i‖₂² − a²_i,−1),   C = max_i {‖a_i‖₁² − ‖a_i‖₁ a_i,−1}         eq. (12)

with τ_i the steps, τ'_i the guessed steps and p_i the weight of client i, a_i,−1 the last entry of a_i, m the number of
the cohort's clients that take steps, and ρ the momentum. Nothing is trained.

Reference: Boukhari et al., GeL, section 3.3, appendix C.4; after Wang et al., "FedNova", NeurIPS 2020, Theorem 1.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hpcfed.cohort import Cohort, Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw_lines
from hpcfed.lab.reproduce.plan import ExperimentLayout


def coefficients(steps: int, guessed: float, momentum: float) -> np.ndarray:
    """Return a_i, (steps,), the weights of client i's gradients in Δ_i / η_l; `steps`: τ_i; `guessed`: τ'_i, or inf."""
    left = guessed + steps - np.arange(steps)
    powers = np.zeros(steps) if math.isinf(guessed) else momentum**left
    return (1 - powers) / (1 - momentum)


def constants(cohort: Cohort, momentum: float) -> tuple[float, float, float, float]:
    """Return (τ_eff, A, B, C), the effective steps and the constants of GeL's eq. (12), for a round's cohort."""
    kept = cohort.steps > 0
    vectors = _vectors(cohort, momentum)
    norms = np.array([a.sum() for a in vectors])
    squares, last = np.array([a @ a for a in vectors]), np.array([a[-1] for a in vectors])
    effective = float(cohort.shares[kept] @ norms)
    w = weights(cohort, momentum)
    first = len(norms) * effective * float((w**2 * squares / norms**2).sum())
    return effective, first, float(w @ (squares - last**2)), float((norms**2 - norms * last).max())


def weights(cohort: Cohort, momentum: float) -> np.ndarray:
    """Return each client's weight in GeL's surrogate objective, (m,), for the m cohort members that take steps."""
    products = cohort.shares[cohort.steps > 0] * [a.sum() for a in _vectors(cohort, momentum)]
    normalised: np.ndarray = products / products.sum()
    return normalised


def _vectors(cohort: Cohort, momentum: float) -> list[np.ndarray]:
    kept = cohort.steps > 0
    pairs = zip(cohort.steps[kept].tolist(), cohort.guessed[kept].tolist(), strict=True)
    return [coefficients(steps, guessed, momentum) for steps, guessed in pairs]


def compare_coefficients(experiment: Experiment, layout: ExperimentLayout, folder: Path) -> tuple[Table, list[Path]]:
    """Return a table of each setting's constants, averaged over rounds, and the PNG files in `folder`, one per case.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    rows: list[tuple[str, ...]] = []
    first: dict[str, Recipe] = {}
    for number, setting in enumerate(layout.settings):
        recipe = layout.recipe_of(number)
        first.setdefault(setting.case, recipe)
        with Federation.open(recipe.data) as federation:
            cohorts = Cohorts(recipe, federation.sizes)
        rounds = [constants(cohorts.round(t), recipe.local.momentum) for t in range(1, recipe.rounds + 1)]
        means = [f"{value:,.1f}" for value in np.mean(rounds, axis=0)]
        rows.append((experiment.cases[setting.case].title, experiment.methods[setting.method].title, *means))
    header = ("Case", "Method", "τ_eff", "A", "B", "C")
    note = f"Means over the cohorts of all rounds. {experiment.note}".strip()
    pictures = [_draw(f"{case}-coefficients", recipe, folder) for case, recipe in first.items()]
    return Table(experiment.title, header, tuple(rows), note), pictures


def _draw(name: str, recipe: Recipe, folder: Path) -> Path:
    """Draw (1 − ρ) a_i of a client: with half the largest budget, without and with guessed steps; with all steps."""
    assert recipe.budget is not None and recipe.budget.high is not None  # noqa: PT018 `checks.NEEDS` of the kind
    assert recipe.local.steps is not None
    momentum, asked, steps = recipe.local.momentum, recipe.local.steps, recipe.budget.high // 2
    vectors = {
        f"FedAvgCM, {steps} steps": coefficients(steps, 0, momentum),
        f"GeL, {steps} steps and {asked - steps} guesses": coefficients(steps, asked - steps, momentum),
        f"FedAvgCM, {asked} steps": coefficients(asked, 0, momentum),
    }
    lines = {title: (range(len(vector)), vector * (1 - momentum)) for title, vector in vectors.items()}
    return draw_lines(folder, name, lines, ("gradient k", "coefficient, numerator"), marker="o")
