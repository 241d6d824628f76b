"""Every path of a run, on a strict device, leaves the bits that it leaves on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

import hpcfed
from hpcfed.algorithms import _blocks
from hpcfed.client import engine
from hpcfed.errors import InputError
from hpcfed.evaluation import blocks
from hpcfed.reduce import memory
from tests.device.strict import Stub
from tests.mpi.recipes import METHODS, small, write_small
from tests.mpi.test_models import CASES as MODELS
from tests.mpi.test_models import LOCAL, write_all
from tests.mpi.test_same_result import check_same_as_alone, left_by
from tests.soak import often

pytestmark = pytest.mark.one_mpi
ONE_BY_ONE = {"steps": 3, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
AFTER = {"name": "scaffold", "correction": "after-momentum"}
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
    "after momentum": {"algorithm": AFTER, "local": {"steps": 5, "batch_size": 7, "lr": 0.1, "momentum": 0.6}},
    "after momentum, one by one": {"algorithm": AFTER, "local": {**ONE_BY_ONE, "momentum": 0.6, "clip_norm": 0.5}},
    "adam": {"local": {**ONE_BY_ONE, "optimizer": "adam", "lr": 0.01}},
    "states on the device": {"algorithm": {"name": "feddyn", "alpha": 0.1}, "client_state": "device"},
    "states on the host": {"algorithm": {"name": "feddyn", "alpha": 0.1}, "client_state": "host"},
    "states on disk": {"algorithm": {"name": "scaffold"}, "client_state": "disk", "cohort": {"size": 3}},
    "states that move": {"algorithm": {"name": "feddyn", "alpha": 0.1}, "placement": "balanced", "cohort": {"size": 3}},
    "parts of updates": {
        "algorithm": {"name": "scaffold"},
        "updates": [{"centred-clip": {"norm": 0.1}}, {"topk": {"fraction": 0.2}}, {"quantize": {"bits": 4}}],
    },
    "signs and a bounded mean": {
        "updates": [{"clip": {"norm": 0.2}}, {"randk": {"fraction": 0.5}}, "sign"],
        "means": [{"clip": {"norm": 0.05}}],
    },
    "a robust mean and flipped labels": {
        "algorithm": {"name": "scaffold"},
        "updates": [{"attack": {"clients": [1], "what": "labels"}}],
        "means": ["geometric-median"],
    },
    "rows of all clients": {"means": [{"krum": {"attackers": 1}}]},
    "personal models": {
        "algorithm": {"name": "ditto", "mu": 0.1},
        "evaluate": {"clients": {"every": 1, "models": ["personal"]}, "batch_size": 16},
    },
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
OFTEN = ("batched", "two vectors", "states on disk", "states that move", "all measures")
"""Paths with the server on the host, too."""


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
        parts = zip(*found, strict=True)
        assert not [
            number for number, (cpu, device) in enumerate(parts) if cpu != device
        ]  # not their bytes: it takes minutes
        return found[1][1]

    return check


@pytest.mark.every(2)
@pytest.mark.parametrize("path", often(OFTEN, PATHS))
def test_the_bits_are_the_cpus(path, both) -> None:
    both(rounds=2, **PATHS[path])


ON_THE_DEVICE = "hpcfed.assembly.parts.LARGEST_ON_HOST"
"""Entries of the largest model whose server stays on the host."""


@pytest.mark.every(3)
@pytest.mark.parametrize("path", PATHS)
def test_a_server_on_the_device_leaves_the_bits_that_it_leaves_on_the_host(path, both, monkeypatch) -> None:
    monkeypatch.setattr(ON_THE_DEVICE, 0)
    both(rounds=2, **PATHS[path])


SERVER_OF_ANOTHER = ("dsgd", "fednova", "fedprox", "scaffold-exp")
"""Methods whose server does what another method's does."""


@pytest.mark.every(3)
@pytest.mark.parametrize("method", often(METHODS.keys() - {*SERVER_OF_ANOTHER}, METHODS))
def test_every_methods_server_has_the_hosts_bits_on_the_device(method, both, stub, monkeypatch) -> None:
    """Where a device multiplies by the inverse of Python's numbers, as a GPU does."""
    monkeypatch.setattr(ON_THE_DEVICE, 0)
    monkeypatch.setattr(_blocks, "GPU_BLOCK", 64)
    stub.inverts = True
    both(rounds=3, algorithm={"name": method, **METHODS[method]}, local=ONE_BY_ONE)


def test_the_bits_of_clients_evaluated_in_blocks_are_the_cpus(both, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "MANY", 1)
    both(rounds=1, **PATHS["all measures"])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "local",
    [{"epochs": 1, "batch_size": 7, "tile": 1}, {"steps": 2, "batch_size": "full"}, {"epochs": 1, "batch_size": 7}],
)
def test_models_are_those_of_the_cpus_own_operations(local, stub, world, folder, monkeypatch) -> None:
    """Minibatches of other sizes in tiles of one, and fillers."""
    recipe = {"dtype": "float64", "rounds": 3, "local": {"lr": 0.1, "engine": "batched", **local}}
    found = []
    for device in ("auto", "cpu"):
        monkeypatch.setattr(engine, "on_device", lambda device: device.type != "cpu")
        run = hpcfed.run(small(device, **recipe, device=device), world=world, quiet=True)
        found.append(load_file(run.folder / "model.safetensors"))
    for name, tensor in found[0].items():
        np.testing.assert_allclose(tensor, found[1][name], rtol=1e-12, atol=1e-14)


OTHER_KERNELS = ("lstm", "resnet18-gn", "cifar-cnn")
"""Models that take other kernels than on a CPU: steps of an LSTM in one, norms over images with channels first,
convolutions of several clients together."""


@pytest.mark.every(2)
@pytest.mark.parametrize("case", [name for name in MODELS if name not in OTHER_KERNELS])
def test_the_bits_of_models_are_the_cpus(case, both, monkeypatch) -> None:
    """Squared norms are summed in one piece on a device: on the CPU, too. Masks of dropout follow from the engine."""
    monkeypatch.setattr("hpcfed.reduce.exact.BLOCK", 1 << 21)
    local = {**LOCAL, "engine": "sequential"} if case == "dropout" else LOCAL
    both(**{"rounds": 1, "local": local, "evaluate": {"batch_size": 4}, **MODELS[case]})


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.soak if c == "resnet18-gn" else []) for c in OTHER_KERNELS]
)
def test_models_of_other_kernels_are_close_and_the_same_on_all_ranks(case, stub, world, folder) -> None:
    recipe = small(None, **{"rounds": 1, "local": LOCAL, "evaluate": {"batch_size": 4}, **MODELS[case]})
    cpu = hpcfed.run({**recipe, "output": str(folder / "cpu")}, world=world, quiet=True)
    check_same_as_alone(world, folder, {**recipe, "device": "auto"})
    found = load_file(folder / "together" / "model.safetensors")
    for name, tensor in load_file(cpu.folder / "model.safetensors").items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-4, atol=1e-6)


WAYS = [
    (home, reduction, through)
    for home in ("host", "device")
    for reduction in ("exact", "fast")
    for through in ("host", "host in pieces", "mpi", "nccl")
]
USUAL = [way for way in WAYS if way[:2] == ("host", "exact")]
USUAL += [
    ("device", "exact", "mpi"),
    ("device", "exact", "host in pieces"),
    ("device", "fast", "host"),
    ("host", "fast", "nccl"),
]
"""Exact sums of a server on the host, which leave by every way, and each way once more."""


@pytest.mark.every(3)
@pytest.mark.parametrize(("home", "reduction", "through"), often(USUAL, WAYS))
def test_sums_leave_the_device_whole(home, through, reduction, both, stub, world, monkeypatch) -> None:
    if home == "device":
        monkeypatch.setattr(ON_THE_DEVICE, 0)
    if through == "host in pieces":
        monkeypatch.setattr(memory, "PIECE_BYTES", 512)
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


def test_a_compiled_model_is_tried_before_the_first_round(stub, world, folder, monkeypatch) -> None:
    """Steps that are only tried leave no trace; a device whose compiler is missing says so in one line."""
    plain = left_by(hpcfed.run(small("plain", device="auto", local=ONE_BY_ONE), world=world, quiet=True))
    compiled = {"device": "auto", "local": {**ONE_BY_ONE, "compile": True}}
    assert left_by(hpcfed.run(small("compiled", **compiled), world=world, quiet=True)) == plain

    def missing(module: nn.Module) -> NoReturn:
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(stub, "compiled", missing)
    with pytest.raises(InputError, match=r"compile: true does not work here \(RuntimeError: Cannot find a working"):
        hpcfed.run(small("refused", **compiled), world=world, quiet=True)
