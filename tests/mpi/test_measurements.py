"""What `hpcfed bench reduce` and `hpcfed scale` measure on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfed.lab.bench.reduction import measure
from hpcfed.lab.scaling.measure import measure_here, read
from hpcfed.reduce import memory
from hpcfed.reduce.slots import RANK_SLOT, client_slot
from tests.mpi.recipes import write_recipe, write_small


@pytest.mark.ranks(2)
def test_the_reduction_is_timed_separately(world):
    exact, fast = measure(world, 5_000, 2)
    assert (exact.kind, fast.kind) == ("exact", "fast")
    slot = client_slot(1).itemsize + RANK_SLOT.itemsize
    assert exact.num_bytes == 8 * 5_000 + slot * world.size
    assert fast.num_bytes == 4 * 5_000 + 2 * slot * world.size
    for row in (exact, fast):
        assert row.whole > max(row.pack, row.unpack) > 0
        assert min(row.bare, row.floor, row.allreduce, row.over_floor) > 0


@pytest.mark.ranks(2)
def test_ranks_measure_together(world, shared_tmp: Path, monkeypatch):
    """Rounds as between hosts: the ranks of this one share no memory, as they would with sums of this size."""
    shares, shared = memory.shared_memory, []
    monkeypatch.setattr(memory, "SHARED_BYTES", 1)
    monkeypatch.setattr(
        memory, "shared_memory", lambda *given, **how: shared.append(shares(*given, **how)) or shared[-1]
    )
    world.on_root(lambda: write_small(shared_tmp))
    world.on_root(lambda: write_recipe(shared_tmp))
    found = measure_here(shared_tmp / "recipe.yaml", ["cohort.size=4"], "strong", 3, shared_tmp / "out", world)
    kept = world.on_root(lambda: read(shared_tmp / "out", world.size))
    assert kept.samples == world.on_root(lambda: found.samples)
    assert [sample.ranks for sample in found.samples] == [world.size] * 3
    assert found.samples[0].load.slowest >= found.samples[0].load.average > 0
    assert [size for size, _ in kept.allreduce] == sorted(size for size, _ in kept.allreduce)
    assert kept.allreduce[0][0] == 8
    assert shared == [None] * 3
    assert world.shares_memory
