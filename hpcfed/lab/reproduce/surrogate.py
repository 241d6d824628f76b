"""GeL's Theorem 2, measured: both sides of its bound on a least-squares problem, with the constants of its proof.

    F_i(x) = ½‖A_i x − b_i‖²,    F̃ = Σ w_i F_i, the surrogate objective, minimum F̃_inf;  full batches, so σ = 0
    κ² = the largest Σ w_i ‖∇F_i(x_t)‖² − β² ‖∇F̃(x_t)‖² so far, with β = 1;    Σ over t = 0 … T−1

    Σ ‖∇F̃(x_t)‖² / T ≤ 4 (F̃(x_0) − F̃_inf) / (η_l τ_eff T) + 12 η_l² L² κ² C

for η_l τ_eff L ≤ 1/2 and 12 η_l² L² C ≤ 1, with w_i, τ_eff and C of `coefficients` and L the largest smoothness of an
F_i. Theorem 2 bounds the least ‖∇F̃(x_t)‖², which is at most this mean. It assumes that a client's budget τ_i is the
same in all rounds; here all rounds use the budgets drawn for the first. A run's record has no gradients, so the rounds
are trained here, in one process.

Reference: Boukhari et al., GeL, appendix C.4, eq. (11); constants: Wang et al., "FedNova", NeurIPS 2020, appendix C.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Budget, Recipe
from hpcfed.io.atomic import write_whole, writing
from hpcfed.lab.reproduce.coefficients import constants, weights
from hpcfed.lab.reproduce.theorems import Problem, TheoremTable, held, weights_of
from hpcfed.ranks.world import World


@dataclass(frozen=True)
class SurrogateBound:
    """Both sides of the bound of GeL's Theorem 2 after T = 1, 2, … rounds, one entry per T, and its two conditions.

    Attributes:
        slope: left side, the mean of ‖∇F̃(x_t)‖² over the rounds, F̃ = Σ w_i F_i the surrogate objective.
        bound, start: right side, and its first term.
        step: η_l τ_eff L, with τ_eff effective steps and smoothness L; the theorem applies up to 1/2.
        drift: 12 η_l² L² C, with GeL's constant C; the theorem applies up to 1.
        unevenness: the largest client weight w_i divided by the least.
    """

    slope: np.ndarray
    bound: np.ndarray
    start: np.ndarray
    step: float
    drift: float
    unevenness: float


def with_fixed_budgets(recipe: Recipe, num_clients: int, folder: Path) -> Recipe:
    """Return the recipe with the first round's step budgets in all rounds; write them to ``folder/budgets.json``.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    path = folder / "budgets.json"
    steps = Cohorts(recipe, np.ones(num_clients, np.int64)).round(1).steps.tolist()
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([steps] * recipe.rounds))
    return recipe.model_copy(update={"budget": Budget(schedule=path)})


def measure_surrogate(recipe: Recipe, problem: Problem) -> SurrogateBound:
    """Train a resolved recipe (linear, full batches, uniform weights, fixed budgets); return the bound's two sides.

    `problem` is read from the recipe's federation.
    """
    from hpcfed.simulation import Simulation

    parts, _ = assemble(recipe, World())
    simulation, lr, smoothness = Simulation(parts), recipe.local.lr, problem.smoothness
    cohort = Cohorts(recipe, np.ones(len(problem.linear), np.int64)).round(1)
    effective, *_, largest = constants(cohort, recipe.local.momentum)
    w = weights(cohort, recipe.local.momentum)
    curvature = np.tensordot(w, problem.squares, axes=1)
    optimum = np.linalg.lstsq(curvature, w @ problem.linear)[0]
    points = []
    with parts.clients:
        for number in range(1, recipe.rounds + 1):
            x = weights_of(parts.model, simulation.w).astype(np.float64)
            gradients = problem.gradients(x)
            slope = w @ gradients
            points.append((slope @ slope, w @ (gradients**2).sum(axis=1)))
            if number == 1:
                excess = (x - optimum) @ curvature @ (x - optimum) / 2
            simulation.round(number)
    slopes, squares = np.array(points).T
    rounds = np.arange(1, len(slopes) + 1)
    drift = 12 * lr**2 * smoothness**2 * largest
    start = 4 * excess / (lr * effective * rounds)
    bound = start + drift * np.maximum.accumulate(squares - slopes)
    return SurrogateBound(slopes.cumsum() / rounds, bound, start, lr * effective * smoothness, drift, w.max() / w.min())


def _measured(recipe: Recipe, folder: Path) -> tuple[Sequence[str], Mapping[str, np.ndarray]]:
    problem = Problem.read(recipe.data)
    one = measure_surrogate(with_fixed_budgets(recipe, len(problem.linear), folder), problem)
    share = f"{one.start[-1] / one.bound[-1]:.2g}"
    cells = f"{one.step:.3f}", f"{one.drift:.3f}", held(one.slope, one.bound), share, f"{one.unevenness:.2f}"
    return cells, {"surrogate": one.slope / one.bound}


SURROGATE = TheoremTable(
    columns=("η_l τ_eff L", "12 η_l² L² C", "Theorem 2", "First term", "w_i"),
    note="Numbers T of rounds for which the bound holds, and the left side's share of the right one after the last; "
    "the first term's share of the right side there; the largest w_i over the least. The theorem needs at most 1/2 and "
    "1 in the third and fourth column.",
    labels={"surrogate": "left side over right side of Theorem 2"},
    measure=_measured,
    level=1,
)
