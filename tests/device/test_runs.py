"""Every path of a run, on a strict device, leaves the bits that it leaves on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from hpcfed.reduce import buffer
from tests.device.strict import Stub
from tests.mpi.recipes import small, write_small
from tests.mpi.test_models import CASES as MODELS
from tests.mpi.test_models import LOCAL, write_all
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi
ONE_BY_ONE = {"steps": 3, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
PATHS: Mapping[str, Mapping[str, Any]] = {
    "batched": {},
    "one by one": {"local": ONE_BY_ONE},
    "momentum, clipping and a budget": {
        "local": {"steps": 9, "batch_size": 7, "lr": 0.1, "momentum": 0.6, "clip_norm": 0.5, "weight_decay": 1e-3},
        "budget": {"low": 1, "high": 7},
        "guess": "remaining",
    },
    "float64": {"dtype": "float64", "local": {"steps": 3, "batch_size": "full", "lr": 0.1, "clip": "linear"}},
    "two vectors": {"algorithm": {"name": "scaffold"}, "budget": {"low": 1, "high": 4}},
    "adam": {"local": {**ONE_BY_ONE, "optimizer": "adam", "lr": 0.01}},
    "states on the device": {"algorithm": {"name": "feddyn", "alpha": 0.1}, "client_state": "device"},
    "states on the host": {"algorithm": {"name": "feddyn", "alpha": 0.1}, "client_state": "host"},
    "states on disk": {"algorithm": {"name": "scaffold"}, "client_state": "disk", "cohort": {"size": 3}},
    "states that move": {"algorithm": {"name": "feddyn", "alpha": 0.1}, "placement": "balanced", "cohort": {"size": 3}},
    "all measures": {
        "local": ONE_BY_ONE,
        "evaluate": {
            "model": "client-average",
            "train": {"every": 1},
            "clients": {"every": 1, "models": ["global", "last", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}},
            "batch_size": 16,
        },
    },
}


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """The working folder of all ranks, with federations of numbers, images, tokens and label sets."""
    world.on_root(lambda: (write_small(shared_tmp), write_all(shared_tmp)))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


@pytest.fixture
def both(stub: Stub, world, folder) -> Callable[..., list[dict[str, Any]]]:
    """Run a recipe on the CPU and on the device, and compare what is left; return the device's record."""

    def check(**changes: Any) -> list[dict[str, Any]]:
        found = []
        for device in ("cpu", "auto"):
            result = hpcfed.run(small(device, **{**changes, "device": device}), world=world, quiet=True)
            found.append(left_by(result))
        assert stub[world.rank % stub.visible].counts.kernels > 0
        assert found[0] == found[1]
        return found[1][1]

    return check


@pytest.mark.parametrize("path", PATHS)
def test_the_bits_are_the_cpus(path, both) -> None:
    both(rounds=2, **PATHS[path])


@pytest.mark.parametrize("case", [name for name in MODELS if name not in ("resnet18-gn", "dropout", "lstm")])
def test_the_bits_of_models_are_the_cpus(case, both) -> None:
    both(**{"rounds": 1, "local": LOCAL, "evaluate": {"batch_size": 4}, **MODELS[case]})


@pytest.mark.parametrize("through", ["host", "host in pieces", "mpi", "nccl"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_sums_leave_the_device_whole(through, reduction, both, stub, world, monkeypatch) -> None:
    if through == "host in pieces":
        monkeypatch.setattr(buffer, "PIECE_BYTES", 512)
    if through == "nccl":
        stub.reset(visible=world.size)
    stub.mpi_reads_it = through == "mpi"
    monkeypatch.setattr(world, "reads_gpu_memory", through == "mpi")
    way = through.partition(" ")[0]
    if through == "nccl" and world.size > 2:
        reduction = "exact"  # of more than two numbers, gloo and MPI add float32 in different orders
    both(rounds=2, reduction=reduction, gpu_reduce=way, placement="static")  # float32 sums depend on who adds what


def test_states_that_find_no_room_on_the_device_lie_on_the_host(both, stub) -> None:
    stub.says_free = 4000  # two states' room
    both(algorithm={"name": "feddyn", "alpha": 0.1}, client_state="device", rounds=4, local=ONE_BY_ONE)
    assert stub[0].counts.up.count(PADDED) > 0


PADDED = 4 * 160
"""Bytes of a vector of the small model: 12·8+8 and 8·4+4 entries, each parameter padded to 16 and all to 32."""


def test_a_run_goes_on_from_its_checkpoint(both, folder, world) -> None:
    recipe = {"algorithm": {"name": "feddyn", "alpha": 0.1}, "checkpoint": {"every": 2}}
    for device in ("cpu", "auto"):
        hpcfed.run(small(device, rounds=2, **recipe, device=device), world=world, quiet=True)
    both(rounds=4, **recipe)


@pytest.mark.parametrize("visible", [1, 2, 4])
def test_ranks_share_devices_out(visible, both, stub, world) -> None:
    stub.reset(visible=visible)
    both(rounds=1)
    assert [device.index for device in stub.devices.values() if device.taken] == [world.rank % visible]
