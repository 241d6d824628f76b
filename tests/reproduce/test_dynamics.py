"""The papers' convergence analyses, measured on least squares, against their algorithms by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.lab.reproduce.bounds import measure_bounds
from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.lab.reproduce.dynamics import constants, measure_dynamics
from hpcfed.lab.reproduce.inputs import Places, prepare
from hpcfed.lab.reproduce.plan import lay_out
from hpcfed.lab.reproduce.session import ReproduceSession
from hpcfed.lab.reproduce.surrogate import measure_surrogate, with_fixed_budgets
from hpcfed.lab.reproduce.theorems import Problem
from hpcfed.ranks.world import World

ROUNDS = 4


def prepared(folder: Path, case: str, method: str) -> tuple[Recipe, Problem]:
    """A run's recipe, and its clients' problems."""
    experiment, places = experiments()["feddyn-dynamics"].limited([case]), Places(folder)
    list(prepare(experiment.cases[case].data, 0, places))
    (unit,) = lay_out(experiment, "full", places, ROUNDS, methods=[method]).plan.units
    return unit.recipe, Problem.read(unit.recipe.data)


@pytest.mark.parametrize(("case", "method", "alpha"), [("all", "a500", 500.0), ("some", "a20", 20.0)])
def test_the_terms_are_those_of_exact_minimization(case, method, alpha, tmp_path):
    recipe, problem = prepared(tmp_path, case, method)
    found = measure_dynamics(recipe, problem)
    cohorts = Cohorts(recipe, np.full(20, 30))
    gradients, w, gamma = np.zeros((20, 20)), np.zeros(20), np.zeros(20)
    best, wanted = np.linalg.solve(problem.squares.sum(axis=0), problem.linear.sum(axis=0)), []
    at_best = problem.squares @ best - problem.linear
    for number in range(1, ROUNDS + 1):
        cohort = cohorts.round(number).clients
        models = []
        for k in cohort:
            right = problem.linear[k] + gradients[k] + alpha * w
            models.append(np.linalg.solve(problem.squares[k] + alpha * np.eye(20), right))
            gradients[k] = problem.squares[k] @ models[-1] - problem.linear[k]
        drift = np.mean([((model - gamma) ** 2).sum() for model in models])
        last, gamma, h = gamma, np.mean(models, axis=0), gradients.mean(axis=0)
        w = gamma - h / alpha
        tracked = ((gradients - at_best) ** 2).sum(axis=1).mean()
        wanted.append((tracked, ((gamma - best) ** 2).sum(), drift, h @ h, ((gamma - last) ** 2).sum()))
    ours = (found.tracked[1:], found.distance[1:], found.drift, found.server, found.moved)
    np.testing.assert_allclose(np.array(ours).T, wanted, rtol=1e-7)
    assert found.gap.max() < 1e-9
    assert found.tracked[0] == pytest.approx((at_best**2).sum(axis=1).mean())


def test_lemma_1_holds_and_would_not_with_a_larger_excess(tmp_path):
    recipe, problem = prepared(tmp_path, "all", "a500")
    found = measure_dynamics(recipe, problem)
    assert problem.smoothness <= 500 / 25
    assert found.falls(500.0, problem.smoothness).all()
    assert not replace(found, excess=50 * found.excess).falls(500.0, problem.smoothness).any()


def test_the_theorems_hold_and_are_no_more_than_their_lemmas(tmp_path):
    """Sums by hand, with the papers' constants for all clients and, of theorem 4, no strong convexity."""
    recipe, problem = prepared(tmp_path, "all", "a600")
    found, alpha, smoothness, convexity = measure_dynamics(recipe, problem), 600.0, problem.smoothness, 0.5
    curvature = problem.squares.mean(axis=0)
    assert convexity > problem.convexity > 0
    assert found.slope[0] == pytest.approx(((curvature @ problem.minimum) ** 2).sum())
    scale = alpha * (alpha**2 - 20 * smoothness**2)
    kappa = 8 * (smoothness + alpha) / scale
    gain = 2 * (alpha**2 - 20 * alpha * smoothness - 40 * smoothness**2) / scale
    np.testing.assert_allclose(constants(alpha, smoothness), (kappa, gain), rtol=1e-12)
    left, right = found.convex_bound(alpha, smoothness, 1.0)
    start = found.distance[0] + kappa * found.tracked[0]
    np.testing.assert_allclose(left, [found.excess[:t].mean() for t in range(1, ROUNDS + 1)], rtol=1e-12)
    np.testing.assert_allclose(right, [start / (gain * t) for t in range(1, ROUNDS + 1)], rtol=1e-12)
    assert (left <= right).all()
    kappa, gain = constants(alpha, smoothness, 1.0, convexity)
    potential, r = found.distance + kappa * found.tracked, 1 + convexity / alpha
    weights = r ** np.arange(ROUNDS)
    left, right = found.convex_bound(alpha, smoothness, 1.0, convexity)
    assert left[-1] == pytest.approx(weights @ found.excess[:ROUNDS] / weights.sum())
    assert right[-1] == pytest.approx(potential[0] / gain / weights.sum())
    left, right = found.nonconvex_bound(alpha, smoothness, 1.0)
    gain = (alpha**2 - 4 * alpha * smoothness - 72 * smoothness**2) / (2 * alpha * (alpha**2 - 36 * smoothness**2))
    assert left[-1] == pytest.approx(found.slope[:ROUNDS].mean())
    assert right[-1] == pytest.approx(found.excess[0] / (gain * ROUNDS))
    assert (left <= right).all()


@pytest.mark.soak
def test_the_table_counts_rounds_and_leaves_lemma_1_out_where_it_does_not_apply(tmp_path):
    session = ReproduceSession(World(), Places(tmp_path), "full", rounds=2)
    experiment = session.prepare(experiments()["feddyn-dynamics"])
    assert not session.run(experiment)
    shown = session.show(experiment)
    assert [row[3] for row in shown.table.rows] == [*3 * ["2 of 2"], *7 * ["–"]]
    applies = [[cell.partition(",")[0] for cell in row[6:9]] for row in shown.table.rows[:6]]
    assert applies == [*2 * [3 * ["2 of 2"]], ["2 of 2", "–", "2 of 2"], *2 * [3 * ["–"]], 3 * ["2 of 2"]]
    assert {cell for row in shown.table.rows for cell in row[4:6]} == {"2 of 2"}
    assert {file.name for file in shown.files[1:]} == {
        f"{case}-{word}.png" for case in experiment.cases for word in ("tracked", "drift")
    }


@pytest.mark.parametrize("method", ["t1", "t5"])
def test_both_sides_of_fedexps_bounds_are_those_of_its_rounds(method, tmp_path):
    """FedExP by hand, in 20 dimensions, where clients' minima differ; all that the bounds name from its iterates."""
    experiment, places = experiments()["fedexp-bounds"].limited(["differs"]), Places(tmp_path)
    list(prepare(experiment.cases["differs"].data, 0, places))
    (unit,) = lay_out(experiment, "full", places, ROUNDS, methods=[method]).plan.units
    problem, lr, steps = Problem.read(unit.recipe.data), unit.recipe.local.lr, unit.recipe.local.steps
    found = measure_bounds(unit.recipe, problem)
    best = problem.minimum
    noise, largest = (problem.gradients(best) ** 2).sum(axis=1).mean(), np.linalg.eigvalsh(problem.squares).max()

    def losses(w: np.ndarray) -> float:
        return float((w - best) @ problem.squares.mean(axis=0) @ (w - best)) / 2

    w, used, left, slopes, spread, wanted = np.zeros(20), [], [], [], 0.0, []
    for _ in range(ROUNDS):
        gradients, models = problem.gradients(w), np.tile(w, (20, 1))
        for _ in range(steps):
            models = models - lr * problem.gradients(models)
        deltas, mean = w - models, w - models.mean(axis=0)
        used.append(max(1.0, (deltas**2).sum(axis=1).mean() / (2 * mean @ mean)))
        left.append(losses(w))
        slopes.append((gradients.mean(axis=0) ** 2).sum())
        spread = max(spread, ((gradients - gradients.mean(axis=0)) ** 2).sum(axis=1).mean())
        w = w - used[-1] * mean
        share, drift = lr * steps * sum(used), lr**2 * steps * (steps - 1)
        first = 3 * best @ best / share + 9 * lr * steps * noise + 36 * drift * largest * noise
        second = 8 * losses(np.zeros(20)) / share + (40 * drift * largest**2 + 24 * lr * steps * largest) * spread
        wanted.append((np.average(left, weights=used), first, np.average(slopes, weights=used), second, used[-1]))
    ours = (found.loss, found.loss_bound, found.slope, found.slope_bound, found.server_lr)
    np.testing.assert_allclose(np.array(ours).T, wanted, rtol=1e-9)
    assert 6 * lr * steps * largest <= 1
    assert (found.loss <= found.loss_bound).all()
    assert (found.slope <= found.slope_bound).all()


@pytest.mark.parametrize("method", ["fedavgcm-gel", "fedavgcm-limit"])
def test_both_sides_of_gels_bound_are_those_of_its_rounds(method, tmp_path):
    """Momentum and guesses step by step, in 20 dimensions; weights and constants from their definitions."""
    experiment, places = experiments()["gel-surrogate"].limited(["differs"]), Places(tmp_path)
    list(prepare(experiment.cases["differs"].data, 0, places))
    (unit,) = lay_out(experiment, "full", places, ROUNDS, methods=[method]).plan.units
    steps = Cohorts(unit.recipe, np.full(20, 30)).round(1).steps
    problem, lr, rho = Problem.read(unit.recipe.data), unit.recipe.local.lr, 0.9
    found = measure_surrogate(with_fixed_budgets(unit.recipe, 20, tmp_path), problem)
    assert 4 <= steps.min() < steps.max() <= 13
    left = 2000 - steps if method.endswith("limit") else 18 - steps
    vectors = [(1 - rho ** (left[i] + np.arange(steps[i], 0, -1))) / (1 - rho) for i in range(20)]
    norms = np.array([a.sum() for a in vectors])
    w, effective = norms / norms.sum(), norms.mean()
    largest = max(a.sum() * (a.sum() - a[-1]) for a in vectors)
    smoothness = np.linalg.eigvalsh(problem.squares).max()
    best = np.linalg.solve(np.tensordot(w, problem.squares, axes=1), w @ problem.linear)
    first = problem.gradients(best / 2)  # F̃ is quadratic: F̃(0) − F̃_inf = −⟨∇F̃(w*/2), w*⟩
    excess, x, slopes, spread, wanted = -(w @ first) @ best, np.zeros(20), [], 0.0, []
    for number in range(1, ROUNDS + 1):
        gradients = problem.gradients(x)
        slopes.append(((w @ gradients) ** 2).sum())
        spread = max(spread, w @ (gradients**2).sum(axis=1) - slopes[-1])
        models, momenta = np.tile(x, (20, 1)), np.zeros((20, 20))
        for k in range(2000):
            active = (k < steps)[:, None]
            momenta = rho * momenta - active * lr * problem.gradients(models)
            models = models + np.where((k < steps + left)[:, None], momenta, 0)
        x = models.mean(axis=0)
        right = 4 * excess / (lr * effective * number) + 12 * lr**2 * smoothness**2 * spread * largest
        wanted.append((np.mean(slopes), right))
    np.testing.assert_allclose(np.array([found.slope, found.bound]).T, wanted, rtol=1e-9)
    assert found.step == pytest.approx(lr * effective * smoothness)
    assert found.step <= 1 / 2
    assert found.drift == pytest.approx(12 * lr**2 * smoothness**2 * largest)
    assert found.drift <= 1
    assert found.unevenness == pytest.approx(norms.max() / norms.min())
    assert (found.slope <= found.bound).all()
