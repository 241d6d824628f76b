"""A rank whose memory went wrong is found in the same round, before its sums are used, and named by every rank."""

from __future__ import annotations

import pytest
import torch

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.errors import EnvironmentFailure
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation
from tests.mpi.recipes import METHODS, small, write_small

COHORTS = {"everyone": {}, "nobody": {"cohort": {"schedule": [[0, 1, 2], [4]], "without": [4]}}}
"""Cohorts by that of the second round."""


@pytest.fixture
def simulation(request, world, shared_tmp) -> Simulation:
    """A simulation of FedDyn, which has a server state, after its first round."""
    world.on_root(lambda: write_small(shared_tmp))
    about = {"algorithm": {"name": "feddyn", **METHODS["feddyn"]}, **COHORTS[getattr(request, "param", "everyone")]}
    recipe = resolve(load_recipe(small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), **about)))
    parts, _ = assemble(recipe, world)
    simulation = Simulation(parts)
    simulation.round(1)
    return simulation


def flip_lowest_bit(vector: torch.Tensor) -> None:
    """Flip the lowest bit of one number."""
    words = vector.view({4: torch.int32, 8: torch.int64}[vector.element_size()])
    words[0] ^= 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("what", "culprit", "simulation"),
    [("w", 0, "everyone"), ("w", 1, "nobody"), ("server state", 1, "everyone"), ("server state", 0, "nobody")],
    indirect=["simulation"],
)
def test_one_flipped_bit_stops_every_rank_and_names_the_culprit(what, culprit, simulation, world):
    if world.rank == culprit:
        flip_lowest_bit(simulation.w if what == "w" else simulation.server["h"])
    with pytest.raises(EnvironmentFailure, match=r"round 2: the ranks no longer hold the same model") as stopped:
        simulation.round(2)
    assert f"rank {culprit} on {world.hosts[culprit]} differing" in str(stopped.value)
    assert str(stopped.value).count("rank ") == 1


def test_without_it_the_next_round_goes_on(simulation, world: World):
    before = simulation.w.clone()
    outcome = simulation.round(2)
    assert not torch.equal(simulation.w, before)
    assert outcome.gradients == 20
