"""What a round asks of a device: waits that grow neither with clients nor with steps, and every large copy by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.models.flat import FlatModel
from hpcfed.simulation import Simulation
from jobs.bench import counts as bench
from tests.device.strict import KIND, Counts, Stub
from tests.mpi.recipes import small, write_small
from tests.mpi.test_models import CASES as MODELS
from tests.mpi.test_models import write_all
from tests.soak import often

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
ENGINES = ("sequential", "batched")


def round_counts(stub: Stub, world, recipe: dict[str, Any]) -> tuple[Counts, FlatModel]:
    """Return what the third round of a recipe asks of the device, and its model."""
    stub.reset()
    parts, _ = assemble(resolve(load_recipe(recipe)), world)
    simulation = Simulation(parts)
    with parts.clients:
        for number in (1, 2, 3):
            stub[0].counts = Counts()
            simulation.round(number)
    return stub[0].counts, parts.model


@pytest.fixture
def counted(stub: Stub, world, tmp_path: Path, monkeypatch):
    """A function that returns what the third round of a recipe asks of the device, and the bytes of a vector (d,)."""
    write_small(tmp_path, 12)
    monkeypatch.chdir(tmp_path)

    def count(**changes: Any) -> tuple[Counts, int]:
        changes["local"] = {"steps": 3, "batch_size": 5, "lr": 0.1, **changes.get("local", {})}
        recipe = small("run", **{"device": "auto", "evaluate": {"every": 0}, **changes})
        counts, model = round_counts(stub, world, recipe)
        return counts, model.vector.nbytes

    return count


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("engine", "hidden", "reduction"),
    [("sequential", 8, "fast"), ("sequential", 2000, "exact"), ("batched", 8, "exact"), ("batched", 2000, "fast")],
)
def test_waits_grow_neither_with_clients_nor_with_steps(engine, hidden, reduction, counted) -> None:
    """Two: the clients' scalars, all in one copy, and the sums. 2,000 units are too many to be added 64 at a time."""
    for cohort, steps in ((2, 1), (12, 7)):
        changes = {"model": {"name": "mlp", "hidden": [hidden]}, "reduction": reduction}
        work = {"engine": engine, "steps": steps}
        found, _ = counted(**changes, cohort={"size": cohort}, local=work)
        assert found.waits == 2, (cohort, steps)


def test_private_parts_are_checked_in_the_clients_one_copy(counted) -> None:
    """Each client's, of every name: a BatchNorm's scale, shift and statistics here."""
    for cohort in (2, 12):
        found, _ = counted(
            model={"factory": "tests.mpi.nets:mlp"}, parameters={"private": ["2.*"]}, cohort={"size": cohort}
        )
        assert found.waits == 2, cohort


STATES = {"feddyn": {"name": "feddyn", "alpha": 0.1}, "scaffold": {"name": "scaffold"}}


@pytest.mark.every(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("algorithm", "client_state", "up", "down"),
    [
        ({"name": "fedavg"}, "device", 1, 2),  # w; its sum, of 8 bytes an entry
        (STATES["feddyn"], "device", 1, 2),
        (STATES["feddyn"], "host", 1 + 12, 2 + 12),  # and each client's state, to the device and back
        (STATES["scaffold"], "device", 2, 2),  # w and c; one sum, where all clients take as many steps
    ],
)
def test_every_copy_of_size_d_is_known(engine, algorithm, client_state, up, down, counted) -> None:
    """Sums of int64 are twice the bytes of a vector: copies are counted in multiples of it."""
    model = {"name": "mlp", "hidden": [400]}
    found, d = counted(algorithm=algorithm, client_state=client_state, model=model, local={"engine": engine})
    assert sum(size // d for size in found.up) == up
    assert sum(size // d for size in found.down) == down


def test_batched_clients_launch_an_eighth_of_the_kernels(counted) -> None:
    """In each step, if none is recorded: 12 of them here."""

    def launched(engine: str, steps: int) -> int:
        return counted(local={"engine": engine, "steps": steps, "graphs": "off"})[0].kernels

    one_by_one, together = (launched(engine, 4) - launched(engine, 1) for engine in ENGINES)
    assert 0 < together <= one_by_one / 8


LAUNCHES = {"mlp": 30, "logistic": 30, "cnn": 30, "lstm": 60}
"""At most, of a round without evaluation: a graph is one."""


@pytest.mark.parametrize("name", often(["mlp"], LAUNCHES))
def test_a_round_of_the_benchmark_launches_no_more_than_a_few_graphs(name, stub, tmp_path):
    """As `python -m jobs.bench.counts` prints them for docs/gpu.md; all but the logistic server is on the device."""
    bench.write_files(name, bench.COUNTED[name], tmp_path)
    found, d = bench.of_hpcfed(tmp_path / "recipe.yaml")
    assert 0 < found.kernels <= LAUNCHES[name]
    assert found.waits == 2
    up = 2 if name == "logistic" else 0  # w, and what else is as large as so small a model
    assert [sum(size >= d for size in sizes) for sizes in (found.up, found.down)] == [up, 1]


def of_a_bare_step(module: torch.nn.Module, stub: Stub, shape: tuple[int, ...], tokens: bool) -> int:
    """Return the kernels of a step of torch's own SGD."""
    device = torch.device(KIND, 0)
    module = module.to(device).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.ones(4, *shape, dtype=torch.int64 if tokens else torch.float32, device=device)
    y = torch.ones(4, dtype=torch.int64, device=device)
    for _ in range(2):
        before = stub[0].counts.kernels
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
    return stub[0].counts.kernels - before


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "shape"),
    often(
        [("dropout", (16, 16))],
        [("dropout", (16, 16)), ("cifar-cnn", (3, 16, 16)), ("lstm", (9,)), ("resnet18-gn", (3, 16, 16))],
    ),
)
def test_a_round_of_a_large_model(case, shape, stub, world, tmp_path, monkeypatch) -> None:
    """A step adds no launch; where it is not recorded, at most twice the bare loop's. The waits are for the clients'
    scalars, and for the next w, which comes down with ‖Δ̄‖², and nothing else is as large.
    """
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    base = {**MODELS[case], "device": "auto", "evaluate": {"every": 0}, "weights": "uniform"}

    def of(cohort: list[int], steps: int, graphs: str = "auto") -> tuple[Counts, FlatModel]:
        local = {"steps": steps, "batch_size": 4, "lr": 0.05, "graphs": graphs}
        recipe = small("run", **base | {"local": local, "cohort": {"schedule": [cohort]}})
        return round_counts(stub, world, recipe)

    (one, model), (more, _), (both, _) = of([1], 1), of([1], 3), of([0, 1], 3)
    d = model.vector.nbytes
    for found in (one, more, both):
        assert found.waits == 2
        assert not [size for size in found.up if size >= d]
        assert [size for size in found.down if size >= d] == [d]
    bare = of_a_bare_step(model.module, stub, shape, case == "lstm")
    assert more.kernels == one.kernels
    (one, _), (more, _) = (of([1], steps, "off") for steps in (1, 3))
    assert 0 < (more.kernels - one.kernels) / 2 <= 2 * bare  # masks by their addresses, convolutions slot by slot
