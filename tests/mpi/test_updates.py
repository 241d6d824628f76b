"""Chains of parts on ranks: the same bits as alone, after a resume, in `verify`, in `replay`, and for the sentinel."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from tests.mpi.recipes import METHODS, small, write_small
from tests.mpi.test_parameters import everything

pytestmark = pytest.mark.one_mpi

CHAINS: Mapping[str, Mapping[str, Any]] = {
    "topk-quantize": {"updates": [{"topk": {"fraction": 0.2}}, {"quantize": {"bits": 4, "block": 32}}]},
    "randk-cast": {"updates": [{"randk": {"fraction": 0.3}}, {"cast": {"to": "float16"}}]},
    "sign": {"updates": ["sign"], "means": [{"clip": {"norm": 0.5}}]},
    "attacked": {"updates": [{"attack": {"fraction": 0.4, "what": "mean"}}, {"centred-clip": {"norm": 0.2}}]},
    "median": {"updates": [{"attack": {"clients": [0], "what": "labels"}}], "means": ["geometric-median"]},
    "nearest": {"updates": ["sign"], "means": [{"krum": {"attackers": 0, "selected": 1}}, {"clip": {"norm": 0.5}}]},
    "trimmed": {"means": [{"trimmed-mean": {"fraction": 0.34}}]},
    "bounded": {"updates": [{"attack": {"clients": [0], "factor": 9.0}}, {"clip": {"norm": 0.3}}, "sign"]},
    "down": {"updates": [{"quantize": {"bits": 8}}], "down": [{"quantize": {"bits": 4}}]},
}
SOUND = ("dsgd", "fedadam", "fedavg", "fedavgm", "fednova", "fedprox", "scaffold", "fedyogi")
"""Methods that go with every chain; FedDyn and FedSplit with those that have no `means`."""


ROLES: list[Mapping[str, Any]] = [
    {},
    {
        "model": {"factory": "tests.mpi.nets:perceptron"},
        "parameters": {"private": ["3.*"]},
        "evaluate": {"every": 0, "clients": {"every": 1}},
    },
    {"model": {"factory": "tests.mpi.nets:mlp"}, "parameters": {"buffers": "averaged"}, "evaluate": {"batch_size": 64}},
]


def drawn(seed: int) -> dict[str, Any]:
    """Return a recipe with a chain and a method of a seed, two of three with private parameters or averaged buffers."""
    draws = random.Random(seed)
    chain = CHAINS[draws.choice([name for name in CHAINS if name != "down"])]
    method = draws.choice([*SOUND, *(() if "means" in chain else ("feddyn", "fedsplit"))])
    role = ROLES[seed // 2 % 3]
    engine = "sequential" if seed % 2 or "buffers" in role.get("parameters", {}) else "batched"
    local: dict[str, Any] = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": engine}
    found = {"algorithm": {"name": method, **METHODS[method]}, "local": local, **chain}
    found["dtype"] = draws.choice(["float32", "float64"])
    if method != "dsgd":
        found["budget"] = draws.choice([None, {"low": 1, "high": 6}])
    if draws.random() < 0.3:
        found["evaluate"] = {"model": "client-average", "batch_size": 64}
    found |= role
    base = {"rounds": 5, "cohort": {"size": 3}, "client_state": draws.choice(["device", "disk"]), "output": "run"}
    base["placement"] = draws.choice(["static", "balanced"])
    return small(
        **{**base, "down": draws.choice([None, [{"quantize": {"bits": 8}}], [{"cast": {"to": "bfloat16"}}]]), **found}
    )


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients; the working folder of all ranks."""
    world.on_root(lambda: write_small(shared_tmp) and None)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


USUAL, MANY = (2, 3, 5, 7), (0, 1, 4, 6, *range(8, 40))


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", [*USUAL, *(pytest.param(seed, marks=pytest.mark.soak) for seed in MANY)])
def test_a_drawn_chain_and_method_are_the_same_as_alone(seed, world, folder):
    """On all ranks in one go, and after the first rounds on one; the sentinel finds nothing."""
    recipe = drawn(seed)

    def run(name: str, where: World, **changes: Any) -> tuple:
        return everything(hpcfed.run({**recipe, **changes, "output": name}, world=where, quiet=True))

    together = run("together", world)
    assert not any("bitwise" in row for row in together[1])
    if world.rank == world.size - 1:
        assert run("alone", World()) == together
    world.on_root(lambda: run("resumed", World(), rounds=3, checkpoint={"every": 1}) and None)
    assert run("resumed", world, checkpoint={"every": 1}) == together


OFTEN = ("topk-quantize", "median", "down")


@pytest.mark.every(3)
@pytest.mark.parametrize("chain", [pytest.param(c, marks=[] if c in OFTEN else [pytest.mark.soak]) for c in CHAINS])
def test_a_run_is_verified_and_replayed(chain, world, folder):
    changes = {"cohort": {"size": 3}, "checkpoint": {"every": 2, "keep": 9}, "update_hashes": True, "rounds": 4}
    recipe = small("run", algorithm={"name": "scaffold"}, **CHAINS[chain], **changes)
    run = hpcfed.run(recipe, world=world, quiet=True)
    code = verify(Verification(folder / "run", None, 0), world, [].append)
    assert code == 0
    client = run.metrics[-1]["cohort"][0]
    found = hpcfed.replay("run", 4, client)
    assert found.recorded_hash == found.reported.hash
    assert found.agrees
