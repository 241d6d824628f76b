"""The papers' ResNet-18 and step of FedProx against definitions written anew from their authors' code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcfed import models
from hpcfed.config.recipe import Model
from hpcfed.errors import InputError
from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.types import Tilt
from tests.contract.test_engines import MODELS, built, solved, tasks_for


class Block(nn.Module):
    """A basic block of either code; with a shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(2, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(2, outputs)
        changes = stride != 1 or inputs != outputs
        narrow = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(2, outputs)]
        self.shortcut = nn.Sequential(*(narrow if changes else []))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class FedExPs(nn.Module):
    """FedExP's util_models.py:41-97: a 3×3 stem, and avg_pool2d(3) of the last map of 4×4."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64)
        self.blocks, self.head = blocks(), nn.Linear(512, 10)

    def last_map(self, x: Tensor) -> Tensor:
        return self.blocks(functional.relu(self.norm(self.stem(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.avg_pool2d(self.last_map(x), 3).flatten(1))


class FedDyns(FedExPs):
    """FedDyn's utils_models.py:40-72: torchvision's ResNet-18, each BatchNorm replaced by GroupNorm(2)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(functional.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


def blocks() -> nn.Module:
    widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    return nn.Sequential(*(block for i, o, s in widths for block in (Block(i, o, s), Block(o, o, 1))))


def ours(**keys: Any) -> nn.Module:
    spec = models.spec(Model(name="resnet18-gn", **keys))
    assert spec is not None
    return spec.build((3, 32, 32), 10)


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.parametrize(
    ("theirs", "experiment", "count"),
    [(FedExPs, "fedexp-neural", 11_173_962), (FedDyns, "feddyn-resnet", 11_181_642)],
)
def test_the_experiments_network_is_its_authors(theirs, experiment, count):
    torch.manual_seed(2)
    one = experiments()[experiment]
    keys = {key: value for key, value in one.recipe["model"].items() if key != "name"}
    reference, found = theirs().double(), ours(**keys).double()
    with torch.no_grad():
        for source, target in zip(reference.parameters(), found.parameters(), strict=True):
            assert source.shape == target.shape
            target.copy_(source + 0.1 * torch.randn_like(source))  # norms, too, which all begin at 1 and 0
            source.copy_(target)
    assert sum(parameter.numel() for parameter in found.parameters()) == count
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    outputs = reference(x), found(x)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    for output in outputs:
        output.square().sum().backward()
    for source, target in zip(reference.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(source.grad, target.grad, rtol=1e-8, atol=1e-8)
    plain = ours().double()
    if theirs is FedExPs:
        plain.load_state_dict(found.state_dict())
        mean = reference.head(reference.last_map(x).mean((2, 3)))
        torch.testing.assert_close(plain(x), mean, rtol=0, atol=1e-10)  # as before, and not the authors'
        assert float((mean - outputs[0]).abs().max().detach()) > 0.05


def test_every_experiment_has_its_papers_network():
    of = {"fedexp": {"name": "resnet18-gn", "pool": 3}, "feddyn": {"name": "resnet18-gn", "stem": "7x7"}}
    for name, one in experiments().items():
        for case in one.cases.values():
            for method in one.methods_of(case):
                model = one.recipe_of(case, method, "full").get("model") or {}
                assert model.get("name") != "resnet18-gn" or model == of[one.paper], name


def test_a_window_that_leaves_no_single_average_is_refused():
    spec = models.spec(Model(name="resnet18-gn", pool=3))
    assert spec is not None
    for side in (16, 48):
        with pytest.raises(InputError, match=r"pool: 3.*3 to 5"):
            spec.build((3, side, side), 10)


def fedprox_step(model: nn.Module, w: Tensor, x: Tensor, y: Tensor, lr: float, mu: float, decay: float) -> Tensor:
    """Return the model after a step of FedDyn's `train_fedprox_mdl` (utils_general.py:248-290), from a point off w."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    flat = torch.cat([parameter.reshape(-1) for parameter in model.parameters()])
    loss = functional.cross_entropy(model(x), y, reduction="sum") / len(y)
    loss = loss + mu / 2 * torch.sum(flat * flat) - mu * torch.sum(flat * w)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
    optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.serial
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_feddyns_experiments_clip_all_of_fedproxs_term(engine):
    """Two steps from w with a large μ, so that the second is clipped and its term is not small."""
    one = experiments()["feddyn-cifar10"]
    local = one.recipe_of(one.cases["dir03-10"], "fedprox", "full")["local"]
    of_feddyn = one.recipe_of(one.cases["dir03-10"], "feddyn", "full")["local"]
    assert (local["clip"], of_feddyn["clip"]) == ("all", "linear")
    lr, mu, decay = 0.5, 300.0, local["weight_decay"]
    keys = {"batch_size": "full", "steps": 1, "lr": lr, "engine": engine}
    keys |= {key: local[key] for key in ("weight_decay", "clip_norm", "clip")}
    solver, model = built(MODELS["images"], keys, torch.float64)
    w = model.vector.clone()
    task = replace(tasks_for(MODELS["images"], model, [12], [2], mu)[0], tilt=Tilt(mu=mu), guessed=0.0)
    ((delta, _),) = solved(solver, w, [task])
    other = built(MODELS["images"], {**keys, "clip": "linear"}, torch.float64)[0]
    ((unlike, _),) = solved(other, w, [task])
    x, y = task.samples
    reference = model.module
    with torch.no_grad():
        for name, view in model.views(w).items():
            reference.get_parameter(name).copy_(view)
    anchor = torch.cat([parameter.detach().reshape(-1) for parameter in reference.parameters()])
    for _ in range(2):
        after = fedprox_step(reference, anchor, x, y, lr, mu, decay)
    found = torch.cat([view.reshape(-1) for view in model.views(delta).values()])
    torch.testing.assert_close(found, anchor - after, rtol=0, atol=1e-11)
    assert float((unlike - delta).norm()) > 1
