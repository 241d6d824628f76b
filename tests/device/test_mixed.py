"""Ranks with a GPU beside ranks without one: the same sums, sizes and places on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfed
from hpcfed.client import engine
from hpcfed.errors import InputError
from hpcfed.evaluation import blocks
from hpcfed.ranks.graphs import on_device
from hpcfed.reduce import memory
from tests.federations import write_federation
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by
from tests.soak import often

pytestmark = pytest.mark.one_mpi
ALONE = {"steps": 3, "batch_size": 10, "lr": 0.1, "engine": "sequential"}


@pytest.fixture
def mixed(stub, world, shared_tmp, monkeypatch) -> Callable[..., Path]:
    """Run a recipe on the CPUs, and where all ranks but the last have a device; compare; return the second's folder."""
    world.on_root(lambda: write_small(shared_tmp, 9))
    monkeypatch.chdir(shared_tmp)

    def check(**changes: Any) -> Path:
        cpu = hpcfed.run(small("cpu", **changes), world=world, quiet=True)
        stub.visible = 0 if world.size > 1 and world.rank == world.size - 1 else 1
        result = hpcfed.run(small("mixed", **{**changes, "device": "auto"}), world=world, quiet=True)
        assert left_by(result) == left_by(cpu)
        facts = json.loads((result.folder / "environment.json").read_text())
        assert [rank["kind"] for rank in facts["per_rank"]] == ["stub"] * max(1, world.size - 1) + ["cpu"] * (
            world.size > 1
        )
        return result.folder

    return check


SUMS: Mapping[str, Mapping[str, int]] = {
    "whole": {},
    "in pieces": {"PIECE_BYTES": 512},
    "of a size that CPUs share": {"SHARED_BYTES": 512},
    "of a size that CPUs send in pieces": {"LARGE_BYTES": 512, "LARGE_PIECE_BYTES": 256},
    "large by each rule": {"PIECE_BYTES": 768, "LARGE_BYTES": 512, "LARGE_PIECE_BYTES": 256},
}


WAYS = [(sums, reduction, mpi) for sums in SUMS for reduction in ("exact", "fast") for mpi in (False, True)]
USUAL = [way for way in WAYS if way[1:] == ("exact", False)]
USUAL += [("whole", "fast", True), ("in pieces", "fast", False), ("large by each rule", "exact", True)]
"""Exact sums through the host, of every size, and some of the others."""


@pytest.mark.every(3)
@pytest.mark.parametrize(("sums", "reduction", "mpi_reads_it"), often(USUAL, WAYS))
def test_all_ranks_sum_in_the_same_pieces(sums, reduction, mpi_reads_it, mixed, stub, world, monkeypatch) -> None:
    for name, value in SUMS[sums].items():
        monkeypatch.setattr(memory, name, value)
    stub.mpi_reads_it = mpi_reads_it
    monkeypatch.setattr(world, "reads_gpu_memory", mpi_reads_it)
    mixed(rounds=2, reduction=reduction, local=ALONE, placement="static", algorithm={"name": "scaffold"})


@pytest.mark.parametrize("algorithm", [{"name": "fedavg"}, {"name": "feddyn", "alpha": 0.1}])
def test_all_ranks_place_clients_alike(algorithm, mixed, stub) -> None:
    """Tiles, of which the costs of placement count the steps, are of one size, though a device's rule has another."""
    stub.stack_bytes = 4 * 160 * 2
    local = {"steps": 4, "batch_size": 5, "lr": 0.1, "engine": "batched", "matmul": "blas"}
    mixed(rounds=6, local=local, algorithm=algorithm, placement="balanced", cohort={"size": 7})


UNLIKE: Mapping[str, Mapping[str, Any]] = {
    "private": {"parameters": {"private": ["*bias"]}, "evaluate": {"every": 0, "clients": {"every": 1}}},
    "augmented": {"data": "images.h5", "local": {**ALONE, "engine": "auto", "augment": {"flip": 0.5}}},
}
"""What a GPU trains one client after another, and a CPU in tiles."""


@pytest.mark.parametrize("case", UNLIKE)
def test_all_ranks_cut_a_cohort_alike_where_a_gpu_takes_no_tiles(case, stub, world, shared_tmp, monkeypatch) -> None:
    """Else they would place its clients differently, and wait for each other for ever."""
    monkeypatch.setattr(engine, "on_device", on_device)
    monkeypatch.chdir(shared_tmp)
    images = [(np.zeros((6, 1, 8, 8), np.float32), np.arange(6) % 4)] * 9
    world.on_root(lambda: write_small(shared_tmp, 9) and None)
    world.on_root(lambda: write_federation(Path("images.h5"), clients=images, test=images[0]) and None)
    stub.visible = 0 if world.size > 1 and world.rank == world.size - 1 else 1
    changes = {**UNLIKE[case], "device": "auto", "placement": "balanced", "cohort": {"size": 7}}
    run = hpcfed.run(small("mixed", **changes), world=world, quiet=True)
    if world.size > 1:
        account = json.loads((run.folder / "environment.json").read_text())["training"]
        assert account == "one after another: a GPU and a CPU would take tiles of different sizes"
        asked = {**changes, "local": {**changes.get("local", ALONE), "engine": "batched"}}
        with pytest.raises(InputError, match=r"local\.engine: batched"):
            hpcfed.run(small("asked", **asked), world=world, quiet=True)


def test_all_ranks_measure_the_same_clients_in_tiles(mixed, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "MANY", 1)
    monkeypatch.setattr("hpcfed.evaluation.tiles.WORK_OF_CALLS", 16 * 140)
    evaluate = {"train": {"every": 1}, "clients": {"every": 1}, "batch_size": 64}
    mixed(rounds=1, local=ALONE, evaluate=evaluate)


@pytest.mark.parametrize("way", ["mpi", "nccl"])
def test_sums_between_gpus_are_refused_where_a_rank_has_none(way, mixed, stub, world, monkeypatch) -> None:
    if world.size == 1:
        return
    stub.visible = 0 if world.rank == 0 else 1
    monkeypatch.setattr(world, "reads_gpu_memory", True)
    refused = rf"gpu_reduce: {way}: expected a GPU for each rank, got ranks without one; set gpu_reduce: auto"
    with pytest.raises(InputError, match=refused):
        hpcfed.run(small("run", device="auto", gpu_reduce=way), world=world, quiet=True)


def test_the_sentinel_compares_no_bits_of_two_kinds_of_device(mixed) -> None:
    folder = mixed(rounds=3, sentinel="strict", placement="static", local=ALONE)
    assert "sentinel" not in json.loads((folder / "environment.json").read_text())


def test_without_deterministic_kernels_slots_are_alike(mixed) -> None:
    """Though a CPU's kernels have one order: the sentinel's slot is on all ranks, or on none."""
    folder = mixed(rounds=2, deterministic=False, local=ALONE, placement="static")
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["bitwise"] is False
    assert "deterministic: false" in facts["bitwise_why_not"]
