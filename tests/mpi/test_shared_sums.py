"""Sums in memory that the ranks of a host share: MPI's bits, on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.ranks import shared
from hpcfed.reduce import memory
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.slots import Sums
from hpcfed.reduce.units import Units
from hpcfed.reduce.weighted_update import WeightedUpdate
from tests.mpi.recipes import METHODS, small, write_small
from tests.mpi.test_same_result import left_by

SIZE = 1013
CPU = torch.device("cpu")
LAYOUTS: tuple[dict[str, Units], ...] = (
    {"delta": (2.0**-20, 2.0**-60)},
    {"delta": (2.0**-40,)},
    {"delta": (2.0**-40,), "psi": (2.0**-38,), "few": (2.0**-36,)},
    {"delta": (2.0**-40,)},
)
"""Of rounds one after another: fewer words, more vectors, one of fewer entries than ranks, and fewer vectors again."""


@pytest.fixture
def small_is_large(monkeypatch):
    """Share all sums, some blocks of each."""
    monkeypatch.setattr(memory, "SHARED_BYTES", 1)
    monkeypatch.setattr(memory, "SHARED_BLOCK", 100)


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """The working folder of all ranks, with a federation of five clients."""
    world.on_root(lambda: write_small(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def one_a_rank(world, rounds: int, vectors: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    """Return each rank's vectors."""
    rng = np.random.default_rng(rounds)
    shape = world.size, SIZE
    drawn = {name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for name in vectors}
    return [
        {name: both[rank][: 2 if name == "few" else None] for name, both in drawn.items()} for rank in range(world.size)
    ]


def reduced(world, kind: str, idle: int | None = None) -> list[Sums]:
    """Return the sums of rounds of every layout, with a client on each rank but `idle`."""
    buffer, found = RoundBuffer(SIZE, torch.float32, CPU, world, kind=kind, others={"few": 2}), []
    for number, units in enumerate(LAYOUTS):
        buffer.open(units, world.size, expected=world.rank != idle)
        if world.rank != idle:
            own = one_a_rank(world, number, tuple(units))[world.rank]
            buffer.add(WeightedUpdate(world.rank, 0.5, own, loss_sum=0.25 + world.rank, steps=3))
        found.append(buffer.reduce(number, 0.0))
    return found


@pytest.mark.parametrize("idle", [None, 0])
def test_exact_sums_are_those_of_an_allreduce(idle, world, small_is_large, monkeypatch):
    found = reduced(world, "exact", idle)
    monkeypatch.setattr(memory, "SHARED_BYTES", memory.LARGE_BYTES)
    for ours, theirs in zip(found, reduced(world, "exact", idle), strict=True):
        assert ours.vectors.keys() == theirs.vectors.keys()
        assert all(torch.equal(ours.vectors[name], theirs.vectors[name]) for name in ours.vectors)
        assert ours.loss_sum.tolist() == theirs.loss_sum.tolist()


def test_fast_sums_are_added_in_the_order_of_the_ranks(world, small_is_large):
    for number, (sums, units) in enumerate(zip(reduced(world, "fast"), LAYOUTS, strict=True)):
        for name in units:
            total, *others = (
                own[name] * np.float32(0.5 / world.size) for own in one_a_rank(world, number, tuple(units))
            )
            for other in others:
                total = total + other
            assert torch.equal(sums.vectors[name], total.double())


@pytest.mark.ranks(2)
def test_ranks_that_cannot_share_leave_the_sums_to_mpi(world, small_is_large, monkeypatch):
    """One that cannot is enough: here its memory has no name that the others could open."""
    expected = reduced(world, "exact")
    calls = []
    summed = world.sum_in_place
    monkeypatch.setattr(world, "sum_in_place", lambda buffer: calls.append(len(buffer)) or summed(buffer))
    if world.rank == world.size - 1:
        monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    assert shared.shared_memory(world, 100) is None
    for ours, theirs in zip(reduced(world, "exact"), expected, strict=True):
        assert all(torch.equal(ours.vectors[name], theirs.vectors[name]) for name in ours.vectors)
    assert len(calls) == len(LAYOUTS)
    assert min(calls) > SIZE  # whole buffers


def test_one_rank_with_a_device_is_enough_to_leave_them_to_mpi(world, small_is_large):
    sums = world.sum_in_place if world.rank == world.size - 1 else None
    buffer = RoundBuffer(SIZE, torch.float32, CPU, world, sum_on_device=sums)
    for number, units in enumerate(LAYOUTS[:2]):
        buffer.open(units, world.size)
        own = torch.full((SIZE,), 1.0 + world.rank)
        buffer.add(WeightedUpdate(world.rank, 1.0, {"delta": own}, loss_sum=0.0, steps=1))
        found = buffer.reduce(number, 0.0).vectors["delta"]
        assert torch.equal(found, torch.full_like(found, (1 + world.size) / 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "scaffold", **METHODS["scaffold"]}, "budget": {"low": 1, "high": 9}},
        {"algorithm": {"name": "feddyn", **METHODS["feddyn"]}, "dtype": "float64", "cohort": {"size": 1}},
    ],
    ids=["two vectors", "float64, ranks without a client"],
)
def test_a_run_is_the_same(changes, world, folder, small_is_large, monkeypatch):
    found = left_by(hpcfed.run(small("shared", **changes), world=world, quiet=True))
    monkeypatch.undo()
    assert found == left_by(
        hpcfed.run(small(folder / "by-mpi", data=str(folder / "small.h5"), **changes), world=world, quiet=True)
    )


def test_a_fast_run_goes_on_to_the_same_bits(world, folder, small_is_large):
    changes: dict[str, Any] = {"reduction": "fast", "checkpoint": {"every": 1}, "placement": "static"}
    whole = hpcfed.run(small("whole", rounds=4, **changes), world=world, quiet=True)
    for rounds in (2, 4):
        twice = hpcfed.run(small("twice", rounds=rounds, **changes), world=world, quiet=True)
    assert left_by(whole)[0] == left_by(twice)[0]
