"""FedDyn's convergence analysis, measured on least squares, against its Algorithm 1 with exact local minimization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.lab.reproduce.dynamics import Problem, measure_dynamics
from hpcfed.lab.reproduce.inputs import Places, prepare
from hpcfed.lab.reproduce.plan import lay_out
from hpcfed.lab.reproduce.session import ReproduceSession
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
    cohorts = Cohorts(recipe, np.full(20, 30), "uniform")
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


def test_the_table_counts_rounds_and_leaves_lemma_1_out_where_it_does_not_apply(tmp_path):
    session = ReproduceSession(World(), Places(tmp_path), "full", rounds=2)
    experiment = session.prepare(experiments()["feddyn-dynamics"])
    assert not session.run(experiment)
    shown = session.show(experiment)
    assert [row[3] for row in shown.table.rows] == ["2 of 2", *5 * ["–"]]
    assert {cell for row in shown.table.rows for cell in row[4:6]} == {"2 of 2"}
    assert {file.name for file in shown.files[1:]} == {
        f"{case}-{word}.png" for case in experiment.cases for word in ("tracked", "drift")
    }
