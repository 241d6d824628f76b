"""Guesses of clients with Adam and Yogi: GeL's two readings against optimizers of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from hpcfed.client.solver import Task
from hpcfed.models.flat import FlatModel
from hpcfed.types import Tilt
from tests.contract.test_engines import MODELS, built, solved, tasks_for

LOCAL: dict[str, Any] = {"batch_size": "full", "steps": 1, "lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4}
STEPS = (3, 5, 1)
LIMIT = 400
"""Steps with a gradient of 0 that stand for the limit: 0.8^400 is 2e-39."""


def gradient(model: FlatModel, y: torch.Tensor, task: Task) -> torch.Tensor:
    y = y.clone().requires_grad_()
    x, labels = task.samples
    loss = functional.cross_entropy(functional_call(model.module, model.views(y), (x,)), labels)
    return torch.autograd.grad(loss, y)[0]


def adam(model: FlatModel, w: torch.Tensor, task: Task, guessed: int) -> torch.Tensor:
    """Δ by torch's Adam, which is given gradients of 0 in the end."""
    y = w.clone().requires_grad_()
    optimizer = torch.optim.Adam([y], lr=0.02, betas=(0.8, 0.95), eps=1e-4)
    for step in range(task.steps + guessed):
        y.grad = gradient(model, y.detach(), task) if step < task.steps else torch.zeros_like(y)
        optimizer.step()
    return (w - y).detach()


def yogi(model: FlatModel, w: torch.Tensor, task: Task, guessed: int) -> torch.Tensor:
    """Δ by Yogi with Adam's corrections, by hand."""
    y, m, v = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    for k in range(1, task.steps + guessed + 1):
        g = gradient(model, y, task) if k <= task.steps else torch.zeros_like(w)
        m = 0.8 * m + 0.2 * g
        v = v - 0.05 * torch.sign(v - g**2) * g**2
        y = y - 0.02 * (m / (1 - 0.8**k)) / ((v / (1 - 0.95**k)).sqrt() + 1e-4)
    return w - y


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("optimizer", "guessed", "engine"),
    [
        (adam, float("inf"), "sequential"),
        (yogi, 4.0, "batched"),
        pytest.param(adam, 4.0, "batched", marks=pytest.mark.soak),
        pytest.param(yogi, float("inf"), "batched", marks=pytest.mark.soak),
        pytest.param(yogi, 4.0, "sequential", marks=pytest.mark.soak),
    ],
)
def test_a_guess_with_all_moments_is_the_optimizer_fed_with_zeros(optimizer, guessed, engine):
    keys = {**LOCAL, "optimizer": optimizer.__name__, "engine": engine}
    deltas = {}
    for moments in ("first", "all"):
        solver, model = built(MODELS["images"], {**keys, "guess_moments": moments}, torch.float64)
        w = model.vector.clone()
        tasks = tasks_for(MODELS["images"], model, [12, 9, 5], STEPS, 0.0)
        tasks = [replace(task, tilt=Tilt(), guessed=guessed) for task in tasks]
        deltas[moments] = [delta.clone() for delta, _ in solved(solver, w, tasks)]
    count = LIMIT if guessed > LIMIT else int(guessed)
    for place, task in enumerate(tasks):
        expected = optimizer(model, w, task, count)
        torch.testing.assert_close(deltas["all"][place], expected, rtol=0, atol=1e-12)
        plain, before = (optimizer(model, w, replace(task, steps=steps), 0) for steps in (task.steps, task.steps - 1))
        repeats = sum(0.8**j for j in range(1, count + 1))
        torch.testing.assert_close(deltas["first"][place], plain + repeats * (plain - before), rtol=0, atol=1e-12)
        assert float((deltas["all"][place] - deltas["first"][place]).norm()) > 1e-3
