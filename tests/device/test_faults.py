"""Devices that are full or fail: another memory, or one line and exit code 4 on every rank."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hpcfed
from hpcfed.client.state_store import ClientStates
from hpcfed.errors import Diverged, EnvironmentFailure, InputError
from hpcfed.ranks.accelerators import check_refusals
from hpcfed.ranks.devices import DeviceSlot
from hpcfed.reduce.device import device_sum
from hpcfed.sentinel import Sentinel
from tests.device.strict import KIND, Stub
from tests.mpi.recipes import small, write_small
from tests.mpi.test_models import write_all
from tests.soak import often

pytestmark = pytest.mark.one_mpi


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of eight clients; the working folder of all ranks."""
    world.on_root(lambda: write_small(shared_tmp, 8, samples=300))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def run(name: str, world, **changes: Any) -> hpcfed.Result:
    return hpcfed.run(
        small(name, **{"rounds": 2, "device": "auto", "placement": "static", **changes}), world=world, quiet=True
    )


def peak_of(stub: Stub, world, **changes: Any) -> int:
    """The most bytes that a run takes of each rank's device, all that is tried out before the first round known."""
    for attempt in range(2):
        stub.reset()
        run(f"measured-{attempt}", world, **changes)
    return stub[0].peak


@pytest.mark.every(2)
@pytest.mark.parametrize("where", ["on every rank", "on the last rank"])
def test_a_tile_that_does_not_fit_ends_the_run_and_is_named(where, stub, world, folder) -> None:
    """Smaller tiles would have other last bits."""
    large = {"local": {"steps": 12, "batch_size": 150, "lr": 0.1}, "evaluate": {"every": 0}}
    peak = peak_of(stub, world, **large)
    stub.reset()
    if where == "on every rank" or world.rank == world.size - 1:
        stub[0].limit = peak * 7 // 8  # most of it is the clients' minibatches
    full = r"memory is full with tiles of 8 clients \(local\.tile\); use a smaller local\.tile"
    with pytest.raises(EnvironmentFailure, match=full):
        run("full", world, **large)


ALONE = {"steps": 3, "batch_size": 10, "lr": 0.1, "engine": "sequential"}


@pytest.mark.serial
def test_a_client_that_does_not_fit_alone_ends_the_run(stub, world, folder) -> None:
    peak = peak_of(stub, world, local=ALONE, evaluate={"every": 0})
    stub.reset()
    stub[0].limit = peak * 7 // 8
    with pytest.raises(EnvironmentFailure, match="the device's memory is full: got stub out of memory"):
        run("full", world, local=ALONE, on_bad_client="skip", evaluate={"every": 0})


def test_a_model_that_does_not_fit_is_one_line(stub, world, folder) -> None:
    for device in stub.devices.values():
        device.limit = 1000
    with pytest.raises(EnvironmentFailure, match="the device's memory is full: got stub out of memory"):
        run("full", world)
    for device in stub.devices.values():
        device.limit = 1 << 40
    run("fits", world)


@pytest.mark.every(3)
@pytest.mark.serial  # a rank that fails alone ends the job, and these tests with it
@pytest.mark.parametrize("eighths", often([1, 4, 7], range(1, 8)))
def test_memory_that_is_nearly_full_ends_the_run_wherever_it_is(eighths, stub, world, folder, monkeypatch) -> None:
    """In the set-up, training, the sums, the server's step or an evaluation: exit code 4, with what to reduce."""
    monkeypatch.setattr("hpcfed.assembly.parts.LARGEST_ON_HOST", 0)
    large = {"local": ALONE, "evaluate": {"batch_size": 300, "train": {"every": 1}}, "algorithm": {"name": "scaffold"}}
    peak = peak_of(stub, world, **large)
    held = stub[0].allocated
    stub.reset()
    if world.rank == world.size - 1:
        stub[0].limit = held + (peak - held) * eighths // 8
    with pytest.raises(EnvironmentFailure, match=r"memory is full.*; (take|use) a smaller local") as error:
        run("full", world, **large)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 4


WORKS_IN: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "set-up": (1 << 30, {"local": ALONE}),
    "round": (1 << 30, {"local": {**ALONE, "graphs": "off"}}),
    "evaluation": (36000, {"local": {**ALONE, "batch_size": 1}, "evaluate": {"batch_size": 11}}),
}
"""Bytes of a convolution's workspace for each byte of its input, by where the first does not fit."""


@pytest.fixture
def convolve(world, shared_tmp, monkeypatch) -> Callable[..., hpcfed.Result]:
    """A function that trains a CNN for a round, in a folder that all ranks work in."""
    world.on_root(lambda: write_all(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    cnn = {"data": "colours.h5", "model": {"name": "cifar-cnn"}, "rounds": 1, "evaluate": {"every": 0}}
    return lambda name="run", **changes: run(name, world, **{**cnn, **changes})


@pytest.mark.parametrize("where", ["set-up", "round", pytest.param("evaluation", marks=pytest.mark.serial)])
def test_a_convolution_without_its_workspace_ends_the_run(where, stub, convolve) -> None:
    """It takes another kernel, and other last bits, in silence: they would follow from what is free."""
    (stub[0].workspace, changes), stub[0].limit = WORKS_IN[where], 1 << 30
    place = "^round 1, evaluation, " if where == "evaluation" else "^"
    full = f"{place}rank .*: the device's memory is full: got too little for a convolution's workspace.*; take a small"
    with pytest.raises(EnvironmentFailure, match=full) as error:
        convolve(**changes)
    assert error.value.exit_code == 4
    assert Path("run/environment.json").is_file() == (where != "set-up")
    stub[0].limit = 1 << 40
    with pytest.raises(EnvironmentFailure, match="now or before in this process"):
        convolve(**changes)


@pytest.mark.serial
def test_the_sentinel_leaves_no_other_kernel_to_the_rounds(stub, convolve, monkeypatch) -> None:
    """Of memory that was full as an error, it goes without; a convolution keeps to the kernel that it takes."""
    trained_again = Sentinel._trained_again

    def full(*about: Any) -> list[int]:
        stub[0].refusals += 1  # as torch counts it
        raise torch.cuda.OutOfMemoryError("stub out of memory")

    def without_workspace(*about: Any) -> list[int]:
        stub[0].workspace, stub[0].limit = 1 << 30, 1 << 30
        return trained_again(*about)

    monkeypatch.setattr(Sentinel, "_trained_again", full)
    convolve("goes-on", local=ALONE, rounds=2)
    assert stub[0].refusals
    monkeypatch.setattr(Sentinel, "_trained_again", without_workspace)
    with pytest.raises(EnvironmentFailure, match="too little for a convolution's workspace"):
        convolve("ends", local=ALONE, rounds=2)


def test_kernels_of_any_order_do_without_a_workspace(stub, convolve) -> None:
    stub[0].workspace, stub[0].limit = 1 << 30, 1 << 30
    result = convolve(local=ALONE, deterministic=False)
    assert stub[0].refusals
    assert json.loads((result.folder / "environment.json").read_text())["bitwise"] is False


@pytest.mark.every(2)
@pytest.mark.parametrize("way", ["host", "host in pieces", "through MPI"])
def test_a_device_that_fails_in_a_round_ends_the_run_on_every_rank(way, stub, world, folder, monkeypatch) -> None:
    if way == "host in pieces":
        monkeypatch.setattr("hpcfed.reduce.memory.PIECE_BYTES", 512)
    stub.mpi_reads_it = way == "through MPI"
    monkeypatch.setattr(world, "reads_gpu_memory", way == "through MPI")
    run("measured", world, rounds=1, local=ALONE)
    needed = stub[0].counts.kernels
    stub.reset()
    stub.mpi_reads_it = way == "through MPI"
    if world.rank == world.size - 1:
        stub[0].fails_after = needed
    with pytest.raises(EnvironmentFailure, match="the device failed: got stub error"):
        run("lost", world, rounds=9, local=ALONE, on_bad_client="skip", evaluate={"every": 0})


def test_a_state_for_which_a_device_has_no_room_goes_to_the_host(stub, monkeypatch) -> None:
    """Memory is taken for one state at a time here, whose 400 bytes end on a boundary of 64."""
    monkeypatch.setattr("hpcfed.client.state_store.SLAB_BYTES", 1)
    stub[0].taken = True
    device = torch.device(KIND, 0)
    with ClientStates("device", device, {"device": 1 << 30, "host": 1 << 30}) as states:
        given = {client: {"c": torch.full((100,), float(client), device=device)} for client in range(4)}
        stub[0].limit = stub[0].allocated + 2 * 448
        states.commit(given)
        check_refusals(device)
        assert sorted(states) == [0, 1, 2, 3]
        assert stub[0].allocated == stub[0].limit
        stub[0].limit += 4000
        found = {client: states.get(client) for client in range(4)}
        assert all(found[client]["c"].cpu().tolist() == [float(client)] * 100 for client in range(4))


def test_an_mpi_is_tried_whatever_it_says_of_gpu_memory(stub, world, monkeypatch) -> None:
    """A variable, or a build, may say that it takes what it cannot read."""
    monkeypatch.setattr(world, "reads_gpu_memory", True)
    stub[0].taken = True
    slot = DeviceSlot(0, world.size, world.size, KIND)
    if world.size > 1:
        assert device_sum("auto", slot, world) is None
        refused = "gpu_reduce: mpi: expected an MPI that sums a GPU's memory, got MPI cannot read .* at a trial; set"
        with pytest.raises(InputError, match=refused):
            device_sum("mpi", slot, world)
    stub.mpi_reads_it = True
    assert device_sum("auto", slot, world) == world.sum_in_place


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("lr", [0.1, 1e15], ids=["ends", "diverges"])
def test_a_run_gives_its_memory_back_when_it_has_ended(stub, world, folder, monkeypatch, engine, lr) -> None:
    """At once: Python's collector does not know that a device's memory is short, and the next run may come first."""
    monkeypatch.setattr("hpcfed.assembly.parts.LARGEST_ON_HOST", 0)
    own = stub[world.rank % stub.visible]
    recipe = small("run", device="auto", local={"steps": 4, "batch_size": 10, "lr": lr, "engine": engine})
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Diverged) if lr > 1 else nullcontext() as failure:
            hpcfed.run(recipe, world=world, quiet=True)
        del failure
        assert own.peak > 0
        assert own.allocated == 0
    finally:
        gc.enable()
