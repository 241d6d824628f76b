"""Tilt, clip, decay, offset, radius and what follows momentum, by hand and in the three places that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from hpcfed.client.batched.solver import StackedSolver
from hpcfed.client.batched.steps import FlatDescent, FusedDescent
from hpcfed.client.solver import SequentialSolver, Task
from hpcfed.config.parameters import Parameters
from hpcfed.config.recipe import Local, LossSection
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import loss_for
from hpcfed.types import Tilt
from tests.contract.test_engines import MODELS, built, near_zero, solved, tasks_for

ROUND, MU, STEPS = 3, 0.3, (3, 4, 2, 0)
LOCAL: dict[str, Any] = {"batch_size": "full", "steps": 1, "lr": 0.2, "lr_decay": 0.9}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tilt": ({}, {}),
    "decay": ({"weight_decay": 0.05}, {}),
    "momentum": ({"weight_decay": 0.05, "momentum": 0.6}, {}),
    "clip": ({"weight_decay": 0.05, "clip_norm": 0.3}, {}),
    "clip-linear": ({"weight_decay": 0.05, "clip_norm": 0.3, "clip": "linear"}, {}),
    "offset": ({}, {"offset": 0.5}),
    "radius": ({}, {"radius": 0.4}),
    "offset-and-radius": ({}, {"offset": 0.5, "radius": 0.4}),
    "after": ({"weight_decay": 0.05}, {"after": 0.5}),
    "after-momentum": ({"weight_decay": 0.05, "clip_norm": 0.3, "momentum": 0.6}, {"after": 0.5}),
    "all": ({"weight_decay": 0.05, "clip_norm": 0.3, "momentum": 0.6}, {"offset": 0.5, "radius": 0.4, "after": 0.5}),
}


def by_hand(model: FlatModel, w: torch.Tensor, task: Task, section: dict[str, Any]) -> torch.Tensor:
    """Return Δ of one client: full batches, SGD as the module `hpcfed.client.solver` writes it."""
    (x, y_true), tilt = task.samples, task.tilt
    anchor = w if tilt.anchor is None else tilt.anchor
    decay, most, lr = section.get("weight_decay", 0.0), section.get("clip_norm"), 0.2 * 0.9 ** (ROUND - 1)

    def gradient(at: torch.Tensor) -> torch.Tensor:
        at = at.clone().requires_grad_()
        loss = functional.cross_entropy(functional_call(model.module, model.views(at), (x,)), y_true)
        return torch.autograd.grad(loss, at)[0]

    y, v = (anchor if tilt.from_anchor else w).clone(), torch.zeros_like(w)
    for _ in range(task.steps):
        at = y if tilt.offset is None else y + tilt.offset
        if tilt.radius:
            ascent = gradient(at)
            at = at + tilt.radius * ascent / ascent.norm()
        g = gradient(at) if tilt.shift is None else gradient(at) + tilt.shift
        linear = section.get("clip") == "linear"
        g = g - tilt.mu * anchor if linear else g + tilt.mu * (y - anchor)
        if most is not None:
            g = g * min(1.0, most / (float(g.norm()) + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        g = g + decay * y + (tilt.mu * y if linear else 0.0)
        v = section.get("momentum", 0.0) * v + g
        y = y - lr * v - (0.0 if tilt.after_momentum is None else lr * tilt.after_momentum)
    return w - y


def tilted(model: FlatModel, elsewhere: dict[str, Any]) -> list[Task]:
    """Four clients of different sizes and steps; every other one has an offset, and the radii differ."""
    tasks: Sequence[Task] = tasks_for(MODELS["images"], model, [12, 12, 5, 0], STEPS, MU)
    draws, found = torch.Generator().manual_seed(5), []
    for client, task in enumerate(tasks):
        offset = elsewhere.get("offset", 0.0) * 100 * near_zero(model, draws) if "offset" in elsewhere else None
        radius = elsewhere.get("radius", 0.0) * client
        after = elsewhere["after"] * 100 * near_zero(model, draws) if "after" in elsewhere and client != 1 else None
        tilt = replace(task.tilt, offset=offset if client % 2 else None, radius=radius, after_momentum=after)
        found.append(replace(task, tilt=tilt, guessed=0.0))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_step_is_the_one_computed_by_hand(case, engine):
    section, elsewhere = CASES[case]
    solver, model = built(
        MODELS["images"],
        {**LOCAL, **section, "engine": engine},
        torch.float64,
        elsewhere=bool(elsewhere.keys() - {"after"}),
        sizes=(12,) * 4,
    )
    if isinstance(solver, StackedSolver):
        assert type(solver._descent) is (FusedDescent if case in ("tilt", "decay", "after") else FlatDescent)
    else:
        assert isinstance(solver, SequentialSolver)
    w = model.vector.clone()
    tasks = tilted(model, elsewhere)
    hand = [by_hand(model, w, task, section) for task in tasks]
    assert len({float(delta.norm()) for delta in hand}) == len(tasks)
    for (delta, _), expected in zip(solved(solver, w, tasks), hand, strict=True):
        torch.testing.assert_close(delta, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_weights_without_a_slope_stay_at_the_anchor(engine, optimizer):
    """The rounding of μ y − μ w is no gradient: Adam's first step would be as long as any other."""
    solver, model = built(MODELS["images"], {**LOCAL, "optimizer": optimizer, "engine": engine}, torch.float32)
    w, tasks = model.vector.clone(), tasks_for(MODELS["images"], model, [12, 9], [4, 3], MU)
    for task in tasks:
        task.samples[0][:, 0] = 0.0  # the first 4 features of each sample
        task.tilt = Tilt(mu=MU)
    for delta, _ in solved(solver, w, tasks):
        first, *_ = model.views(delta).values()
        assert not first[:, :4].any()
        assert first[:, 4:].any()


def test_running_statistics_are_of_the_ascended_point():
    """A minibatch enters them once, in the second pass of a step with a radius."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 2))
    model = FlatModel(module, torch.float64, torch.device("cpu"), Parameters(buffers="averaged"))
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2
    w = model.vector.clone()

    def hidden(at: torch.Tensor) -> torch.Tensor:
        weight, bias, *_ = model.views(at).values()
        return functional.linear(x, weight, bias)

    def loss(at: torch.Tensor) -> torch.Tensor:
        _, _, scale, shift, weight, bias = model.views(at).values()
        normed = functional.batch_norm(hidden(at), None, None, scale, shift, training=True)
        return functional.cross_entropy(functional.linear(normed, weight, bias), y)

    at = w.clone().requires_grad_()
    (ascent,) = torch.autograd.grad(loss(at), at)
    solver = SequentialSolver(
        model, loss_for(LossSection(), "classification", []), Local(**LOCAL), 0, precision="float32", draws=False
    )
    (result,) = solver.solve(w, [Task(0, (x, y), Tilt(radius=0.4), 1, 0.0)], 1)
    assert int(module[1].num_batches_tracked) == 1
    expected = hidden(w + 0.4 * ascent / ascent.norm()).mean(0)
    torch.testing.assert_close(module[1].running_mean, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(module[1].running_mean, hidden(w).mean(0), atol=1e-3)
    assert float(result.delta.norm()) > 0


class Shrinking(nn.Linear):
    """Shrinks its weights in each forward pass in training, and halves their gradient once it is added up."""

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(input)


def test_decay_and_tilt_are_of_the_parameters_behind_a_forward_pass_and_hooks_see_neither():
    torch.manual_seed(0)
    module, plain = Shrinking(), nn.Linear(12, 4)
    plain.load_state_dict(module.state_dict())
    x, y = torch.randn(6, 12, dtype=torch.float64), torch.arange(6) % 4
    model, decay = FlatModel(module, torch.float64, torch.device("cpu")), 0.1
    model.watch()
    section = Local(steps=1, batch_size="full", lr=0.2, weight_decay=decay)
    loss = loss_for(LossSection(), "classification", [])
    solver = SequentialSolver(model, loss, section, 0, draws=False)
    (found,) = solver.solve(model.vector.clone(), [Task(0, (x, y), Tilt(mu=MU), 3, 0.0)], 1)
    start, values = [one.detach().double() for one in plain.parameters()], list(plain.double().parameters())
    for _ in range(3):
        with torch.no_grad():
            plain.weight.mul_(0.9)
        slopes = torch.autograd.grad(functional.cross_entropy(plain(x), y), values)
        with torch.no_grad():
            for one, slope, first, factor in zip(values, slopes, start, (0.5, 1.0), strict=True):
                one -= 0.2 * (factor * slope + MU * (one - first) + decay * one)
    for delta, one, first in zip(model.views(found.delta).values(), values, start, strict=True):
        torch.testing.assert_close(delta, first - one.detach(), rtol=0, atol=1e-14)
