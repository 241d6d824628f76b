"""Ditto's and FedRep's models of clients: by hand, by methods that they are in special cases, and measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.functional import cross_entropy

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.assembly.remarks import remarks
from hpcfed.cli.verify import command as verify
from hpcfed.config.load import load_recipe
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation
from hpcfed.types import PERSONAL
from tests.mpi.recipes import small, write_small

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
LR, STEPS, MU = 0.2, 3, 0.4
FULL: dict[str, Any] = {"dtype": "float64", "model": {"name": "logistic"}, "weights": "uniform"}
LOCAL: dict[str, Any] = {"steps": STEPS, "batch_size": "full", "lr": LR}
NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data of five clients."""
    folder = tmp_path_factory.mktemp("personal")
    write_small(folder)
    (folder / "twolayers.py").write_text(NET)
    return folder


def simulated(folder: Path, rounds: int, **changes: Any) -> tuple[Simulation, Any]:
    paths = {"data": str(folder / "small.h5"), "python_path": [str(folder)]}
    parts, _ = assemble(resolve(load_recipe(small(folder / "run", **{**paths, **changes}))), World())
    simulation = Simulation(parts)
    for round in range(1, rounds + 1):
        simulation.round(round)
    return simulation, parts


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_ditto_by_hand(engine, place):
    """Three rounds of full gradients; the server's model is FedAvg's, to the last bit."""
    simulation, parts = simulated(
        place, 3, algorithm={"name": "ditto", "mu": MU}, **FULL, local={**LOCAL, "engine": engine}
    )
    plain, _ = simulated(place, 3, **FULL, local={**LOCAL, "engine": engine})
    assert torch.equal(simulation.w, plain.w)
    names = [*parts.model.named(parts.initial_w)]
    initial = [parts.model.named(parts.initial_w)[name].clone() for name in names]

    def trained(start: list[torch.Tensor], client: int, w: list[torch.Tensor], mu: float) -> list[torch.Tensor]:
        x, y = parts.shards.client(client)
        at = [tensor.clone().requires_grad_() for tensor in start]
        for _ in range(STEPS):
            weight, bias = sorted(at, key=torch.Tensor.dim, reverse=True)
            gradients = torch.autograd.grad(cross_entropy(x.flatten(1) @ weight.T + bias, y), at)
            stepped = (a - LR * (g + mu * (a - b)) for a, g, b in zip(at, gradients, w, strict=True))
            at = [tensor.detach().requires_grad_() for tensor in stepped]
        return [tensor.detach() for tensor in at]

    w, own = initial, [initial] * 5
    for _ in range(3):
        models = [trained(w, client, w, 0.0) for client in range(5)]
        own = [trained(own[client], client, w, MU) for client in range(5)]
        w = [sum(each) / 5 for each in zip(*models, strict=True)]
    for client in range(5):
        found = parts.model.named(parts.clients.get(client)[PERSONAL])
        for name, expected in zip(names, own[client], strict=True):
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)


def test_personal_models_are_measured(place):
    evaluate = {"clients": {"every": 3, "models": ["global", "personal"]}}
    changes = {"data": str(place / "small.h5"), "evaluate": evaluate}
    run = hpcfed.run(small(place / "ditto", algorithm={"name": "ditto", "mu": 0.1}, **changes), quiet=True)
    scores = run.metrics[-1]["clients"]
    assert scores["personal"]["train"] != scores["global"]["train"]
    (place / "seed.txt").write_text("8f1c6a0be35d97421b6e0c9d4a7f5328")
    noised = ["updates=[{clip: {norm: 1.0}}]", "means=[{noise: {multiplier: 1.0}}]", "evaluate=null", "weights=null"]
    for changed, said in (
        ([], None),
        (["evaluate.clients.models=[global]"], "own; evaluate.clients: {every: 1, models: [global, personal]}"),
        ([*noised, f"secret_seed={place}/seed.txt"], "own; with noise those are neither measured nor kept"),
    ):
        recipe = resolve(load_recipe(run.folder / "recipe.yaml", changed))
        lines = [line for line in remarks(recipe, assemble(recipe, World())[0]) if "the common model is" in line]
        assert [str(said) in line for line in lines] == [True] * (said is not None)
    check_loaded(hpcfed.load(run.folder), place, scores["personal"])
    assert "verified: all 3 rounds" in CliRunner().invoke(verify, [str(run.folder), "--all"]).output
    (run.folder / "private/client-2.safetensors").unlink()
    assert "client-2.safetensors: is missing" in CliRunner().invoke(verify, [str(run.folder), "--all"]).output
    with pytest.raises(hpcfed.InputError, match="personal with fedavg has no meaning: its clients keep no model"):
        hpcfed.run(small(place / "fedavg", **changes), quiet=True)


HEAD = {"private": ["2.*"]}


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=str)
def test_fedrep_trains_the_head_and_then_the_body(optimizer, place):
    """By hand with two optimizers of torch; momentum of one part moves nothing of the other."""
    about = {"model": {"factory": "twolayers:net"}, "dtype": "float64", "evaluate": {"every": 0}}
    local = {**LOCAL, "steps": 5, **optimizer}
    simulation, parts = simulated(
        place, 2, **about, local=local, parameters={**HEAD, "private_first": 3}, cohort={"schedule": [[1]]}
    )
    found = {name: tensor.clone() for name, tensor in parts.model.named(simulation.w).items()}
    found |= parts.model.named_private(parts.private.of(1))
    x, y = parts.shards.client(1)
    net = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    start = {**parts.model.named(parts.initial_w), **parts.model.named_private(parts.model.own)}
    net.load_state_dict(start)
    for _ in range(2):
        for layer, steps in ((net[2], 3), (net[0], 2)):
            if "optimizer" in optimizer:
                steps_by = torch.optim.Adam(layer.parameters(), lr=0.01)
            else:
                steps_by = torch.optim.SGD(layer.parameters(), lr=LR, momentum=optimizer.get("momentum", 0.0))
            for _ in range(steps):
                net.zero_grad()
                cross_entropy(net(x), y).backward()
                steps_by.step()
    for name, expected in net.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["fedrep", "ditto"])
def test_the_sentinel_trains_such_clients_once_more(case, place, monkeypatch):
    warnings = list[Any]()
    monkeypatch.setattr("hpcfed.sentinel.log.warning", lambda *about, **_: warnings.append(about))
    about: dict[str, Any] = {"algorithm": {"name": "ditto", "mu": 0.1}}
    if case == "fedrep":
        about = {"model": {"factory": "twolayers:net"}, "parameters": {**HEAD, "private_first": 3}}
    paths = {"data": str(place / "small.h5"), "python_path": [str(place)], "evaluate": {"every": 0}}
    run = hpcfed.run(small(place / f"watched-{case}", **paths, **about, sentinel="strict"), quiet=True)
    assert not warnings
    assert not any("bitwise" in row for row in run.metrics)


def test_the_model_of_a_client_that_was_never_drawn_is_the_initial_one(place):
    """As it is measured; a private run keeps none."""
    about = {"algorithm": {"name": "ditto", "mu": 0.1}, "cohort": {"schedule": [[0, 1]]}}
    about |= {"data": str(place / "small.h5"), "evaluate": {"clients": {"every": 3, "models": ["personal"]}}}
    run = hpcfed.run(small(place / "two", **about), quiet=True)
    check_loaded(hpcfed.load(run.folder), place, run.metrics[-1]["clients"]["personal"])
    (place / "seed.txt").write_text("8f1c6a0be35d97421b6e0c9d4a7f5328")
    noise = {"updates": [{"clip": {"norm": 1.0}}], "means": [{"noise": {"multiplier": 1.0}}], "weights": None}
    about |= {**noise, "cohort": {"size": 2}, "evaluate": None, "secret_seed": str(place / "seed.txt")}
    run = hpcfed.run(small(place / "noised", **about), quiet=True)
    assert not (run.folder / "private").exists()
    with pytest.raises(hpcfed.InputError, match="client 0: a private run keeps no clients' models"):
        hpcfed.load(run.folder).module_of(0)


def check_loaded(run: hpcfed.LoadedRun, place: Path, scores: dict[str, Any]) -> None:
    """Clients' models have the accuracies that the last round recorded."""
    shares = []
    with h5py.File(place / "small.h5", locking=False) as file:
        ends = file["train/offsets"][:]
        for client, (start, end) in enumerate(itertools.pairwise(ends)):
            module = run.module_of(client if client % 2 else str(client))  # by number, and as a name is given
            output = module(torch.from_numpy(file["train/x"][start:end]))
            shares.append((output.argmax(1).numpy() == file["train/y"][start:end]).mean())
    assert sum(shares) / len(shares) == pytest.approx(scores["train"]["accuracy"]["mean"])


def test_a_personal_model_that_diverges_ends_the_run(place):
    """Its μ is too large for the step size; the server's model is as it is."""
    about = {"algorithm": {"name": "ditto", "mu": 1e12}, "data": str(place / "small.h5"), "rounds": 20}
    with pytest.raises(hpcfed.Diverged, match=r"client . .*its personal parameters are not finite"):
        hpcfed.run(small(place / "large", **about), quiet=True)


REFUSED = {
    "nothing": ({"parameters": {"private_first": 3}}, "'private' beside 'private_first'"),
    "scaffold": (
        {"parameters": {**HEAD, "private_first": 3}, "algorithm": {"name": "scaffold"}},
        "private_first with scaffold has no meaning: it counts the steps",
    ),
    "guess": ({"parameters": {**HEAD, "private_first": 3}, "guess": 3}, "private_first with guess: 3 has no meaning"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused(case, place):
    changes, words = REFUSED[case]
    about = {"model": {"factory": "twolayers:net"}, "evaluate": {"every": 0}, "local": {**LOCAL, "momentum": 0.5}}
    with pytest.raises(hpcfed.InputError, match=words):
        simulated(place, 1, **about, **changes)
