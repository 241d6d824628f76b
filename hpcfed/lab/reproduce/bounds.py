"""FedExP's theorems, measured: both sides of their bounds on a least-squares problem, with the constants of the proofs.

    F_i(w) = ½‖A_i w − b_i‖²,    F = mean of all F_i, minimal at w*;    L = the largest smoothness of an F_i
    T rounds of τ local steps on full batches, of size η_l ≤ 1/(6τL);    η_g is each round's server step
    σ² = mean ‖∇F_i(w*)‖²,       σ_g² = the largest mean ‖∇F_i(w_t) − ∇F(w_t)‖² so far,    Σ over t = 0 … T−1

    Σ η_g (F(w_t) − F(w*)) / Σ η_g ≤ 3‖w_0 − w*‖² / (η_l τ Σ η_g) + 9 η_l τ σ² + 36 η_l² τ(τ−1) L σ²          eq. (55)
    Σ η_g ‖∇F(w_t)‖² / Σ η_g ≤ 8 (F(w_0) − F(w*)) / (η_l τ Σ η_g) + (40 η_l² L² τ(τ−1) + 24 η_l L τ) σ_g²   eq. (76)

from which Theorems 1 and 2 follow. A run's record has no gradients at w_t, so the rounds are trained here, in one
process. The paper's σ_g² bounds the variance of the clients' gradients on all of R^d. Least squares has no such bound,
but the proof needs it only at the points w_t.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, appendices C.2 and C.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.config.recipe import Recipe
from hpcfed.lab.reproduce.theorems import Problem, TheoremTable, held, weights_of
from hpcfed.ranks.world import World


@dataclass(frozen=True)
class Bounds:
    """Both sides of FedExP's two bounds for each number of rounds T = 1, 2, …; arrays have one entry per T.

    Attributes:
        loss, loss_bound: left and right side of eq. (55), on the weighted mean of F(w_t) − F(w*).
        slope, slope_bound: left and right side of eq. (76), on the weighted mean of ‖∇F(w_t)‖².
        server_lr: the server step size η_g of round T.
    """

    loss: np.ndarray
    loss_bound: np.ndarray
    slope: np.ndarray
    slope_bound: np.ndarray
    server_lr: np.ndarray


def measure_bounds(recipe: Recipe, problem: Problem) -> Bounds:
    """Train a resolved recipe (linear model, full batches, uniform weights); return both sides of the bounds.

    `problem` is read from the recipe's federation.
    """
    from hpcfed.simulation import Simulation

    parts, _ = assemble(recipe, World())
    simulation, rows = Simulation(parts), []
    optimum, smoothness = problem.minimum, problem.smoothness
    curvature = problem.squares.mean(axis=0)
    with parts.clients:
        for number in range(1, recipe.rounds + 1):
            w = weights_of(parts.model, simulation.w).astype(np.float64)
            gradients, away = problem.gradients(w), w - optimum
            slope = gradients.mean(axis=0)
            variance = ((gradients - slope) ** 2).sum(axis=1).mean()
            used = simulation.round(number).server_lr or 1.0
            rows.append((used, away @ away, away @ curvature @ away / 2, slope @ slope, variance))
    used, distance, excess, slopes, variances = np.array(rows).T
    local, steps = recipe.local, int(recipe.local.steps or 1)
    noise = (problem.gradients(optimum) ** 2).sum(axis=1).mean()
    total, spread = used.cumsum(), np.maximum.accumulate(variances)
    drift = local.lr**2 * steps * (steps - 1)
    return Bounds(
        (used * excess).cumsum() / total,
        3 * distance[0] / (local.lr * steps * total) + 9 * local.lr * steps * noise + 36 * drift * smoothness * noise,
        (used * slopes).cumsum() / total,
        8 * excess[0] / (local.lr * steps * total)
        + (40 * drift * smoothness**2 + 24 * local.lr * smoothness * steps) * spread,
        used,
    )


def _measured(recipe: Recipe, _: Path) -> tuple[Sequence[str], Mapping[str, np.ndarray]]:
    problem = Problem.read(recipe.data)
    one = measure_bounds(recipe, problem)
    product = recipe.local.lr * int(recipe.local.steps or 1) * problem.smoothness
    sides = held(one.loss, one.loss_bound), held(one.slope, one.slope_bound)
    steps = f"{one.server_lr.min():.3g} to {one.server_lr.max():.3g}"
    return (f"{product:.3f}", *sides, steps), {"bounds": one.loss / one.loss_bound}


BOUNDS = TheoremTable(
    columns=("η_l τ L", "Theorem 1, eq. (55)", "Theorem 2, eq. (76)", "η_g"),
    note="Numbers T of rounds for which each bound holds, and the left side's share of the right one after the last. "
    "Both theorems need η_l τ L ≤ 1/6.",
    labels={"bounds": "left side over right side of eq. (55)"},
    measure=_measured,
    level=1,
)
