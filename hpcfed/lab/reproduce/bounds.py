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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.config.recipe import Recipe
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.dynamics import Problem, at_most
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw_lines
from hpcfed.lab.reproduce.plan import ExperimentLayout
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
            w = parts.model.named(simulation.w)["weight"].numpy().reshape(-1).astype(np.float64)
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


def compare_bounds(experiment: Experiment, layout: ExperimentLayout, folder: Path) -> tuple[Table, list[Path]]:
    """Train each setting of `layout`; return a table, and the PNG files of a figure per case, drawn into `folder`.

    ``18 of 20`` in the table: the bound holds for 18 of the numbers of rounds T = 1, …, 20.

    Raises:
        InputError: the federation's task is not regression.
        EnvironmentFailure: the disk refuses.
    """
    rows: list[tuple[str, ...]] = []
    pictures = []
    for name, case in experiment.cases.items():
        lines: dict[str, tuple[Sequence[float], np.ndarray]] = {}
        for number, setting in enumerate(layout.settings):
            if setting.case != name:
                continue
            recipe, title = layout.recipe_of(number), experiment.methods[setting.method].title
            problem = Problem.read(recipe.data)
            one = measure_bounds(recipe, problem)
            product = recipe.local.lr * int(recipe.local.steps or 1) * problem.smoothness
            cells = [held(one.loss, one.loss_bound), held(one.slope, one.slope_bound)]
            steps = f"{one.server_lr.min():.3g} to {one.server_lr.max():.3g}"
            rows.append((case.title, title, f"{product:.3f}", *cells, steps))
            lines[title] = range(1, len(one.loss) + 1), one.loss / one.loss_bound
        if lines:
            labels = "round", "left side over right side of eq. (55)"
            pictures.append(draw_lines(folder, f"{name}-bounds", lines, labels, level=1))
    header = ("Case", "Method", "η_l τ L", "Theorem 1, eq. (55)", "Theorem 2, eq. (76)", "η_g")
    note = (
        "Numbers T of rounds for which each bound holds, and the left side's share of the right one after the last. "
        f"Both theorems need η_l τ L ≤ 1/6. {experiment.note}"
    )
    return Table(experiment.title, header, tuple(rows), note.strip()), pictures


def held(left: np.ndarray, right: np.ndarray) -> str:
    """Return text such as ``18 of 20, 0.93``: how many of T entries have left ≤ right, and the last left / right.

    `left` and `right` are (T,) each.
    """
    return f"{int(at_most(left, right).sum())} of {len(left)}, {left[-1] / right[-1]:.2g}"
