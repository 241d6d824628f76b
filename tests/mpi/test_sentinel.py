"""The sentinel: products that see a client's slot, neighbours, tile or rank are noticed, and nothing else changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.client.batched.matmul import Blas
from hpcfed.config.load import load_recipe
from hpcfed.errors import EnvironmentFailure
from hpcfed.sentinel import BUDGET, Sentinel
from hpcfed.simulation import Simulation
from tests.mpi.recipes import METHODS, small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi
LAST_BIT = 2.0**-20
TILES = 200
OFTEN = ("dsgd", "feddyn", "scaffold")
"""Methods with full batches, and with states of clients."""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp, 8))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def by_slot(x: Tensor, rank: int) -> Tensor:
    return torch.arange(len(x), dtype=x.dtype, device=x.device)


def by_neighbour(x: Tensor, rank: int) -> Tensor:
    return x.roll(1, 0).sum((1, 2)).frac().abs()


def by_fullness(x: Tensor, rank: int) -> Tensor:
    return x.flatten(1).any(1).sum().to(x.dtype).expand(len(x))


def by_rank(x: Tensor, rank: int) -> Tensor:
    return x.new_full((len(x),), float(rank))


def round_by(monkeypatch: pytest.MonkeyPatch, what: Any, rank: int) -> None:
    """Let the products of forward passes round by something that they should not see."""
    outputs = Blas.outputs

    def rounded(self: Blas, layer: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        return outputs(self, layer, x, scale) * (1 + LAST_BIT * what(x, rank)).view(-1, 1, 1)

    monkeypatch.setattr(Blas, "outputs", rounded)


def recipe(output: str, **changes: Any) -> dict[str, Any]:
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "batched", "matmul": "blas", "tile": 4}
    return small(output, local=local, rounds=6, cohort={"size": 4}, checkpoint={"every": 3}, **changes)


def trained_tiles(rows: list[dict[str, Any]]) -> int:
    """Tiles up to the first round that was suspected, at most: a client a tile."""
    return sum(len(row["cohort"]) for row in rows if row.get("bitwise", True))


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 10))])
@pytest.mark.parametrize("what", [by_slot, by_neighbour, by_fullness, by_rank])
def test_products_that_see_what_they_should_not_are_noticed(what, seed, world, folder, monkeypatch):
    if what is by_rank and world.size == 1:
        return  # there is no other
    round_by(monkeypatch, what, world.rank)
    placement = ("static", "balanced")[seed % 2]
    result = hpcfed.run(recipe("run", seed=seed, placement=placement), world=world, quiet=True)
    assert trained_tiles(result.metrics) <= TILES
    suspected = [row for row in result.metrics if "sentinel" in row]
    assert suspected
    found = suspected[0]["sentinel"][0]
    assert found["hash"] != found["other_hash"]
    assert found["client"] in suspected[0]["cohort"]
    assert all(row["bitwise"] is False for row in result.metrics[suspected[0]["round"] - 1 :])
    environment = json.loads((result.folder / "environment.json").read_text())
    assert environment["bitwise"] is False
    assert f"from round {found['round']} on: the update of client {found['client']}" in environment["bitwise_why_not"]
    certificate = json.loads((result.folder / "certificate.json").read_text())
    assert certificate["repeatable"] is False


class Ranks(Sequence[int]):
    """The ranks of a cohort's members, which counts how often all of them are read."""

    def __init__(self, ranks: Sequence[int]):
        self._ranks, self.reads = ranks, 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, place: Any) -> Any:
        return self._ranks[place]

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        self.reads += 1
        return np.array(self._ranks)


def test_a_draw_reads_the_cohort_a_few_times_however_large_it_is(world, folder):
    """Not once for each member, which took a cohort of 10,000 more time than its training."""
    about = recipe("run") | {"cohort": {"fraction": 1.0}}
    parts, _ = assemble(resolve(load_recipe(about)), world)
    with parts.federation, parts.clients:
        plan = Simulation(parts).plan(1)
        ranks = Ranks(plan.ranks)
        drawn = Sentinel(parts, AveragedBuffers(parts.model), is_on=True).draw(replace(plan, ranks=ranks))
        assert len(drawn) > 0
        assert ranks.reads <= 3 < len(ranks)


def test_after_the_first_round_one_tile_in_a_hundred_is_checked(world, folder):
    """By all variants in turn, each kind of client by each, new ones first, and the same ones on every rank."""
    parts, _ = assemble(resolve(load_recipe(recipe("run"))), world)
    with parts.federation, parts.clients:
        plan = Simulation(parts).plan(1)
        sentinel = Sentinel(parts, AveragedBuffers(parts.model), is_on=True)
        rounds = [sentinel.draw(replace(plan, round=round)) for round in range(1, 2001)]
    counts, tile = np.bincount(plan.ranks, minlength=world.size), parts.engine.tile
    tiles, made = np.ceil(counts / tile).sum(), np.cumsum([len(checks) for checks in rounds[1:]])
    assert made.tolist() == [int(BUDGET * number * tiles) for number in range(1, 2000)]
    checks = [check for checks in rounds for check in checks]
    variants = [check.variant for check in rounds[0]]
    assert [check.variant for check in checks] == list(itertools.islice(itertools.cycle(variants), len(checks)))
    assert all((check.rank == plan.ranks[check.place]) == (check.variant != "rank") for check in checks)
    assert all(len({check.place for check in checks}) == len(checks) for checks in rounds)
    minibatches = parts.federation.sizes[plan.cohort.clients] % 10
    kinds = [*zip(minibatches.tolist(), plan.ranks, strict=True)]
    for variant in variants:
        first = [kinds[check.place] for check in checks if check.variant == variant][: len({*kinds})]
        assert {*first} == {*kinds}
    assert world.gather(checks) == [checks] * world.size


def test_what_was_found_stays_when_a_run_goes_on(world, folder, monkeypatch):
    with monkeypatch.context() as patch:
        round_by(patch, by_slot, world.rank)
        hpcfed.run(recipe("run"), world=world, quiet=True)
    again = hpcfed.run({**recipe("run"), "rounds": 8}, world=world, quiet=True)
    assert [row["bitwise"] for row in again.metrics[-2:]] == [False, False]
    assert json.loads((again.folder / "environment.json").read_text())["bitwise"] is False


def test_strict_ends_the_run(world, folder, monkeypatch):
    round_by(monkeypatch, by_slot, world.rank)
    with pytest.raises(EnvironmentFailure, match=r"round 1: the update of client \d was another in other slots"):
        hpcfed.run(recipe("run", sentinel="strict"), world=world, quiet=True)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in METHODS]
)
def test_it_changes_nothing_and_finds_nothing_where_nothing_is(name, world, folder, monkeypatch):
    """With states that go to another rank as copies; with and without tiles."""
    monkeypatch.setattr("hpcfed.sentinel.BUDGET", 0.5)  # in rounds, too, in which clients have a state
    engine = {"steps": 3, "batch_size": 10, "lr": 0.05, "engine": "sequential"} if name == "scaffold" else None
    changes = {"algorithm": {"name": name, **METHODS[name]}, **({"local": engine} if engine else {})}
    runs = []
    for sentinel in ("strict", "off"):
        about = recipe(sentinel, sentinel=sentinel, placement="balanced") | changes
        if name == "dsgd":  # full batches of different sizes
            del about["local"]["tile"]
        runs.append(hpcfed.run(about, world=world, quiet=True))
    assert left_by(runs[0]) == left_by(runs[1])
    assert sum("sentinel" in row["seconds"] for row in runs[0].metrics) >= 3
    assert "sentinel" not in runs[1].metrics[0]["seconds"]
