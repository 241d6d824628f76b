"""Private and frozen parameters, and buffers of every role, on a strict device: the CPU's bits, resumed, replayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from hpcfed.errors import Diverged
from tests.mpi.recipes import small, write_small
from tests.mpi.test_models import CASES, LOCAL, write_all
from tests.mpi.test_parameters import FEDBN, FEDPER, everything, recipe
from tests.mpi.test_replay import check_steps
from tests.soak import often

pytestmark = pytest.mark.one_mpi
ROLES: Mapping[str, Mapping[str, Any]] = {
    "private norms": FEDBN,
    "a private head": FEDPER,
    "a head trained first": {**FEDPER, "private_first": 2},
    "averaged": {"buffers": "averaged"},
    "private statistics": {"buffers": "private", "frozen": ["1.*"]},
    "fixed": {"buffers": "fixed", "private": ["4.bias"]},
}
OFTEN = ("a private head", "averaged")
"""Roles with the server on the device, too: parts that stay with their clients, and ones beside the parameters."""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """The working folder of all ranks, with six clients."""
    world.on_root(lambda: write_small(shared_tmp, 6))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def of(output: str, role: str, **changes: Any) -> dict[str, Any]:
    kept = {"checkpoint": {"every": 2, "keep": 9}, "update_hashes": True}
    return recipe(output, ROLES[role], **{**kept, **changes})


@pytest.mark.every(3)
@pytest.mark.parametrize("role", ROLES)
def test_the_bits_are_the_cpus_also_after_a_checkpoint(role, stub, world, folder) -> None:
    cpu = hpcfed.run(of("cpu", role, rounds=4), world=world, quiet=True)
    for rounds in (2, 4):
        run = hpcfed.run(of("device", role, rounds=rounds, device="auto"), world=world, quiet=True)
    assert stub[0].counts.kernels > 0
    assert everything(run) == everything(cpu)
    if world.rank == world.size - 1:
        found = hpcfed.replay("device", 4, run.metrics[-1]["cohort"][0])
        assert found.w.device.type == stub.kind
        assert found.agrees
        check_steps(found)


@pytest.mark.every(2)
@pytest.mark.parametrize("role", often(OFTEN, ROLES))
def test_so_they_are_with_the_server_on_the_device(role, stub, world, folder, monkeypatch) -> None:
    monkeypatch.setattr("hpcfed.assembly.parts.LARGEST_ON_HOST", 0)
    cpu, device = (hpcfed.run(of(kind, role, device=kind), world=world, quiet=True) for kind in ("cpu", "auto"))
    assert everything(device) == everything(cpu)


ROOT = """
from torch import nn, zeros


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.own = nn.Linear(12, 4), nn.Parameter(zeros(()))

    def forward(self, x):
        root = self.own.sqrt()
        return self.body(x.flatten(1)) + (root - root.detach())
"""
"""A module one of whose derivatives is infinite, while all else is finite."""


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_private_part_that_is_not_finite_names_its_client(device, stub, world, folder) -> None:
    """On a device only after all clients' work, by the round's one wait."""
    world.on_root(lambda: (folder / "root.py").write_text(ROOT))
    local = {"steps": 1, "batch_size": 8, "lr": 0.1}
    about = {"model": {"factory": "root:Net"}, "parameters": {"private": ["own"]}, "evaluate": {"every": 0}}
    cohort = {"schedule": [[3]]}
    with pytest.raises(
        Diverged, match=r"round 1, client 3 .*rank \d+ on .*: its private parameters are not finite; lower"
    ):
        hpcfed.run(small("run", device=device, local=local, cohort=cohort, **about), world=world, quiet=True)


@pytest.mark.parametrize("state", often(["device"], ["device", "host", "disk"]))
def test_private_parts_beside_states_that_move(state, stub, world, folder) -> None:
    changes = {"algorithm": {"name": "feddyn", "alpha": 0.1}, "placement": "balanced", "client_state": state}
    tuned = {"every": 2, "models": ["global", "last", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}}
    changes["evaluate"] = {"every": 0, "model": "client-average", "clients": tuned, "batch_size": 16}
    cpu, device = (
        hpcfed.run(of(kind, "a private head", device=kind, **changes), world=world, quiet=True)
        for kind in ("cpu", "auto")
    )
    assert everything(device) == everything(cpu)


@pytest.mark.soak
def test_statistics_of_all_training_samples(stub, world, folder) -> None:
    evaluate = {"every": 1, "model": "last-two", "statistics": "training", "metrics": ["f1-macro"]}
    cpu, device = (
        hpcfed.run(of(kind, "averaged", device=kind, evaluate=evaluate), world=world, quiet=True)
        for kind in ("cpu", "auto")
    )
    assert everything(device) == everything(cpu)


@pytest.mark.every(2)
@pytest.mark.parametrize("model", ["dropout", "lstm"])
def test_what_draws_or_recurs_is_replayed_step_by_step(model, stub, world, folder) -> None:
    world.on_root(lambda: write_all(folder))
    kept = {"checkpoint": {"every": 1, "keep": 9}, "update_hashes": True, "rounds": 2}
    base = small("run", **{**kept, "local": LOCAL, "evaluate": {"every": 0}, **CASES[model], "device": "auto"})
    run = hpcfed.run(base, world=world, quiet=True)
    world.gather(None)
    found = hpcfed.replay("run", 2, run.metrics[-1]["cohort"][world.rank % 2])
    assert found.agrees
    check_steps(found)
