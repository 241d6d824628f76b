"""Tiles on a GPU: their clients are shared out among ranks, and methods with states are trained in them, too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.lab.bench.workloads import write_files
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import Accelerator
from hpcfed.ranks.placement import Placement, homes
from hpcfed.ranks.world import World
from jobs.bench.counts import COUNTED
from tests.device.strict import Stub
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


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_methods_with_states_are_trained_in_tiles(algorithm, assembled):
    changes = ["algorithm.alpha=0.1"] if algorithm == "feddyn" else []
    engine = assembled("mlp", f"algorithm.name={algorithm}", *changes).engine
    assert engine.tile == COUNTED["mlp"].cohort
