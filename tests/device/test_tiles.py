"""Tiles on a GPU: their clients are shared out among ranks, and methods with states are trained in them, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, conv2d, conv3d

from hpcfed.assembly import assemble, resolve
from hpcfed.assembly.remarks import remarks
from hpcfed.client.batched.draws import Draws
from hpcfed.client.batched.operators import columns
from hpcfed.client.batched.solver import StackedSolver
from hpcfed.client.batched.tiles import tile_for
from hpcfed.client.solver import Expected
from hpcfed.config.load import load_recipe
from hpcfed.lab.bench.workloads import write_files
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import Accelerator
from hpcfed.ranks.placement import Placement, homes
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.simulation import Simulation
from jobs.bench.counts import COUNTED
from tests.device.strict import Stub
from tests.mpi.recipes import small, write_small
from tests.soak import often

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
ROUNDS, RANKS = 10, 2


@pytest.fixture
def assembled(stub: Stub, tmp_path: Path):
    """A function that returns the parts of a benchmark's recipe on a device with a GPU's room for stacks."""

    def parts_of(name: str, *overrides: str) -> Parts:
        stub.stack_bytes = Accelerator.stack_bytes
        if not (tmp_path / "recipe.yaml").exists():
            write_files(name, COUNTED[name], tmp_path)
        parts, _ = assemble(resolve(load_recipe(tmp_path / "recipe.yaml", ["device=auto", *overrides])), World())
        return parts

    return parts_of


@pytest.mark.every(2)
@pytest.mark.parametrize("name", often(["mlp", "logistic"], ["mlp", "cnn", "logistic"]))
def test_two_ranks_share_a_cohort_evenly(name, assembled, tmp_path):
    engine, work = assembled(name).engine, COUNTED[name]
    sizes = np.full(work.clients, work.samples)
    steps = np.full(work.cohort, -(-work.samples // work.batch_size))
    placement = Placement(homes(sizes, RANKS), RANKS, balanced=True, tile=engine.tile)
    for cohort in json.loads((tmp_path / "cohorts.json").read_text())[:ROUNDS]:
        clients = np.array(cohort)
        ranks = placement.place(clients, sizes[clients], steps)
        shares = np.bincount(ranks, minlength=RANKS)
        assert shares.tolist() == [work.cohort // RANKS] * RANKS
        tiles = -(-shares // engine.tile)
        placement.move(clients, ranks)
        placement.learn(ranks, sizes[clients], steps, 1e-3 * tiles * steps[0])


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_methods_with_states_are_trained_in_tiles(algorithm, assembled):
    changes = ["algorithm.alpha=0.1"] if algorithm == "feddyn" else []
    engine = assembled("mlp", f"algorithm.name={algorithm}", *changes).engine
    assert engine.tile == COUNTED["mlp"].cohort


def test_a_tile_is_no_larger_than_fills_the_device(assembled):
    """Where arithmetic takes the time and not launches, half as many slots leave fewer empty on several ranks."""
    model = assembled("mlp").model
    works = {"the mlp's": 9e6, "the cnn's": 3e8}
    tiles = {name: tile_for(model, model.vector.device, 20, [12] * 100, work) for name, work in works.items()}
    assert tiles == {"the mlp's": 20, "the cnn's": 10}


@pytest.mark.parametrize(("tile", "says"), [("auto", False), ("20", True)])
def test_slots_that_a_device_computes_for_nothing_are_told(tile, says, assembled, tmp_path):
    overrides = ["cohort.schedule=null", "cohort.size=2", f"local.tile={tile}"]
    parts = assembled("mlp", *overrides)
    recipe = resolve(load_recipe(tmp_path / "recipe.yaml", ["device=auto", *overrides]))
    with parts.federation, parts.clients:
        found = [line for line in remarks(recipe, parts) if "computed for nothing" in line]
    what = "tiles of 20 clients, of whom each rank trains 2: the other slots are computed for nothing"
    assert found == [f"{what}; local.tile=2 shares the work, with other last bits"] * says


@pytest.mark.parametrize(("axes", "bias"), [(1, True), (2, False), (2, True), (3, True)])
def test_convolutions_of_several_clients_by_products(axes, bias):
    """Against torch's own, client by client, in float64."""
    draws = torch.Generator().manual_seed(axes)
    convolution = {1: conv1d, 2: conv2d, 3: conv3d}[axes]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_()

    for k, stride, padding, dilation in product((1, 3), (1, 2), (0, 1), (1, 2)):
        x, weight, row = numbers(6, 2, *(7, 6, 7)[:axes]), numbers(3, 4, 2, *(k, 2, k)[:axes]), numbers(3, 4)
        each = zip(x.chunk(3), weight, row if bias else [None] * 3, strict=True)
        expected = torch.cat([convolution(*of_one, stride, padding, dilation) for of_one in each])
        given = (x, weight, row) if bias else (x, weight)
        outgoing = torch.randn(expected.shape, generator=draws, dtype=torch.float64)
        slopes = torch.autograd.grad(expected, given, outgoing)
        with torch.no_grad():
            windows = columns.Windows(weight.shape[3:], *([one] * axes for one in (stride, padding, dilation)))
            z, seen = columns.outputs(windows, x, weight, row if bias else None)
            found = columns.slopes(windows, outgoing, x, seen, weight, passes_on=True)
        for one, other in zip((z, *found), (expected, *slopes), strict=False):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


DRAWING: Mapping[str, Mapping[str, Any]] = {
    "part of the clients": {"cohort": {"size": 3}},
    "epochs and dropout": {
        "model": {"factory": "tests.mpi.nets:residual"},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.1},
    },
    "budgets": {"budget": {"low": 1, "high": 4}, "cohort": {"fraction": 0.5, "sampling": "bernoulli"}},
    "tiles of two": {"local": {"steps": 2, "batch_size": 8, "lr": 0.1, "engine": "batched", "tile": 2}},
}


@pytest.mark.parametrize("case", DRAWING)
def test_the_next_minibatches_are_drawn_while_the_device_works(case, stub, tmp_path, monkeypatch):
    """Those of the next round's first tile, once each, before the device is waited for; bits stay what they are."""
    write_small(tmp_path)
    monkeypatch.chdir(tmp_path)
    found, log = [], []
    drawn, settle = Draws._drawn, RoundBuffer.settle
    monkeypatch.setattr(Draws, "_drawn", lambda self, member: (log.append(member), drawn(self, member))[1])
    monkeypatch.setattr(RoundBuffer, "settle", lambda self: (log.append(None), settle(self))[1])
    for expects in (True, False):
        if not expects:
            monkeypatch.setattr(StackedSolver, "expect", lambda self, members: None)
        about = {"device": "auto", "sentinel": "off", **DRAWING[case]}
        parts, _ = assemble(resolve(load_recipe(small("run", **about))), World())
        simulation = Simulation(parts)
        log.clear()
        with parts.clients, parts.federation:
            results = [simulation.round(number) for number in (1, 2, 3)]
        found.append([result.hash for result in results])
        members = [result.cohort.clients.tolist() for result in results]
        before = [[member for member in log[:at] if member] for at, entry in enumerate(log) if entry is None]
        ahead = [sorted({m.client for m in own if m.round > r}) for r, own in zip((1, 2, 3), before[::2], strict=True)]
        firsts = [len(clients[: parts.engine.tile]) if expects else 0 for clients in (*members[1:], [])]
        assert [len(clients) for clients in ahead] == firsts
        assert all(set(clients) <= set(following) for clients, following in zip(ahead, members[1:], strict=False))
        assert len(log) - log.count(None) == sum(map(len, members))
    assert found[0] == found[1]
    for number in (8, 9):
        parts.engine._step_draws.make_ahead([Expected(number, 0, 9, 2)])
    assert [member.round for member in parts.engine._step_draws._ahead] == [9]  # those that nobody took are dropped
