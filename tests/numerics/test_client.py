"""The client optimizers and the displacement ‖a_i‖₁ against torch's and the papers' closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from hpcfed.client.effective_steps import effective_steps, guess_factor
from hpcfed.client.optimizers import Adam, Optimizer, Sgd, optimizer_for
from hpcfed.client.solver import Stepping
from hpcfed.config.recipe import Local

D = 23


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(D, generator=generator, dtype=torch.float64) for _ in range(count)]


def step(optimizer: Optimizer, y: torch.Tensor, g: torch.Tensor, lr: float = 0.1, *, scalars: bool = False) -> None:
    """Take the next step, as the solvers do; with `scalars`, as those on a device."""
    optimizer.taken += 1
    numbers = optimizer.numbers(lr, optimizer.taken)
    optimizer.move(y, g, torch.tensor(numbers, dtype=torch.float64).unbind() if scalars else numbers)


def run(optimizer: Optimizer, count: int, lr: float = 0.1, *, scalars: bool = False) -> torch.Tensor:
    """Take steps from 0 along the same gradients each time."""
    y = torch.zeros(D, dtype=torch.float64)
    optimizer.reset()
    for g in gradients(count):
        step(optimizer, y, g, lr, scalars=scalars)
    return y


def like() -> torch.Tensor:
    return torch.empty(D, dtype=torch.float64)


@pytest.mark.parametrize(
    ("section", "theirs"),
    [
        ({}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            {"optimizer": "adam", "beta1": 0.8, "beta2": 0.95, "eps": 1e-4},
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4),
        ),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_steps_are_those_of_torch(section, theirs):
    own = optimizer_for(Local(**section), like())
    ours, on_device = run(own, 6), run(own, 6, scalars=True)
    parameter = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    optimizer = theirs([parameter])
    for parameter.grad in gradients(6):
        optimizer.step()
    for found in (ours, on_device):
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-14, atol=1e-14)


def test_yogi_moves_its_second_moment_by_the_square_at_most():
    """The update written out, entry by entry; a guess that feeds the whole optimizer with zeros leaves it alone."""
    y, m, v = [0.0] * D, [0.0] * D, [0.0] * D
    for k, g in enumerate(gradients(5), 1):
        for j in range(D):
            square = float(g[j]) ** 2
            m[j] += (1 - 0.9) * (float(g[j]) - m[j])
            v[j] -= (1 - 0.99) * math.copysign(square, v[j] - square)
            y[j] -= 0.1 * m[j] / (1 - 0.9**k) / (math.sqrt(v[j] / (1 - 0.99**k)) + 1e-3)
    section = Local(optimizer="yogi", beta1=0.9, beta2=0.99, eps=1e-3, guess_moments="all")
    yogi = optimizer_for(section, like())
    ours = run(yogi, 5)
    torch.testing.assert_close(ours, torch.tensor(y, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    guessed, expected = ours.clone(), ours.clone()
    yogi.guess(guessed, 0.1, 2)
    for k in (6, 7):
        m = [0.9 * one for one in m]
        for j in range(D):
            expected[j] -= 0.1 * m[j] / (1 - 0.9**k) / (math.sqrt(v[j] / (1 - 0.99**k)) + 1e-3)
    torch.testing.assert_close(guessed, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [lambda: Sgd(like(), 0.9), lambda: Adam(like(), 0.9, 0.99, 1e-8)], ids=["sgd", "adam"])
def test_a_guess_is_steps_without_gradient(make):
    """τ' steps in which the first moment decays; for Adam with the second moment and both corrections as they were."""
    optimizer = make()
    start = run(optimizer, 4)
    before = run(make(), 3)
    last = start - before  # −η · direction of the fourth step
    guessed = start.clone()
    optimizer.guess(guessed, 0.1, 3)
    expected = start + (0.9 + 0.9**2 + 0.9**3) * last
    torch.testing.assert_close(guessed, expected, rtol=1e-12, atol=1e-12)
    limit = start.clone()
    optimizer.guess(limit, 0.1, math.inf)
    torch.testing.assert_close(limit, start + 9.0 * last, rtol=1e-12, atol=1e-12)


def test_zero_gradients_are_what_a_guess_of_sgd_saves():
    optimizer = Sgd(like(), 0.8)
    guessed = run(optimizer, 5)
    optimizer.guess(guessed, 0.1, 4)
    stepped = run(optimizer, 5)
    for _ in range(4):
        step(optimizer, stepped, torch.zeros(D, dtype=torch.float64))
    torch.testing.assert_close(guessed, stepped, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_displacement_has_the_papers_closed_forms(steps):
    plain = {"lr": 0.1, "momentum": 0.0, "mu": 0.0}
    rho, mu = 0.9, 0.7
    assert effective_steps(steps, 0, **plain) == steps
    momentum = sum((1 - rho ** (steps - k)) / (1 - rho) for k in range(steps))
    assert effective_steps(steps, 0, **plain | {"momentum": rho}) == pytest.approx(momentum, rel=1e-13)
    proximal = sum((1 - 0.1 * mu) ** k for k in range(steps))
    assert effective_steps(steps, 0, **plain | {"mu": mu}) == pytest.approx(proximal, rel=1e-13)
    for guessed in (3, math.inf):  # GeL, eq. (6)
        gel = sum((1 - rho ** (steps + guessed - k)) / (1 - rho) for k in range(steps))
        assert effective_steps(steps, guessed, **plain | {"momentum": rho}) == pytest.approx(gel, rel=1e-13)


def test_displacement_is_what_the_solver_does_to_gradients_of_one():
    """Momentum, proximal term and guess together, by the optimizer itself."""
    y, lr, mu = torch.zeros(1, dtype=torch.float64), 0.1, 0.3
    optimizer = Sgd(y, 0.9)
    for _ in range(5):
        step(optimizer, y, 1.0 + mu * y, lr)
    optimizer.guess(y, lr, 2)
    assert effective_steps(5, 2, lr=lr, momentum=0.9, mu=mu) == pytest.approx(-float(y) / lr, rel=1e-13)


@pytest.mark.parametrize(
    "keys", [{"lr_decay": 0.5}, {"lr_schedule": [{"round": 2, "lr": 0.1}, {"round": 3, "lr": 0.05}]}]
)
def test_displacement_is_by_the_step_size_of_its_round(keys):
    """Which a proximal term sees."""
    stepping = Stepping(Local(steps=5, lr=0.2, momentum=0.9, **keys))
    found = [stepping.effective_steps(5, 2.0, round=round, mu=0.7) for round in (1, 2, 3)]
    assert found == [effective_steps(5, 2.0, lr=lr, momentum=0.9, mu=0.7) for lr in (0.2, 0.1, 0.05)]
    assert len({*found}) == 3


def test_no_guess_changes_nothing():
    assert guess_factor(0.9, 0) == 0.0
    assert guess_factor(0.0, math.inf) == 0.0
    memoryless = Adam(like(), 0.0, 0.99, 1e-8, guesses_all=True)
    start = run(memoryless, 2)
    guessed = start.clone()
    memoryless.guess(guessed, 0.1, math.inf)
    assert torch.equal(guessed, start)
