"""What a round asks of a device: waits that grow neither with clients nor with steps, and every large copy by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcfed.config.load import load_recipe
from hpcfed.setup import assemble, resolve
from hpcfed.simulation import Simulation
from tests.device.strict import Counts, Stub
from tests.mpi.recipes import small, write_small

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
ENGINES = ("sequential", "batched")


@pytest.fixture
def counted(stub: Stub, world, tmp_path: Path, monkeypatch):
    """A function that returns what the third round of a recipe asks of the device, and the bytes of a vector (d,)."""
    write_small(tmp_path, 12)
    monkeypatch.chdir(tmp_path)

    def count(**changes: Any) -> tuple[Counts, int]:
        changes["local"] = {"steps": 3, "batch_size": 5, "lr": 0.1, **changes.get("local", {})}
        recipe = small("run", **{"device": "auto", "evaluate": {"every": 0}, **changes})
        stub.reset()
        parts, _ = assemble(resolve(load_recipe(recipe)), world)
        simulation = Simulation(parts)
        with parts.clients:
            for number in (1, 2, 3):
                stub[0].counts = Counts()
                simulation.round(number)
        return stub[0].counts, parts.model.vector.nbytes

    return count


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


STATES = {"feddyn": {"name": "feddyn", "alpha": 0.1}, "scaffold": {"name": "scaffold"}}


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
    """In each step: 12 of them here."""

    def launched(engine: str, steps: int) -> int:
        return counted(local={"engine": engine, "steps": steps})[0].kernels

    one_by_one, together = (launched(engine, 4) - launched(engine, 1) for engine in ENGINES)
    assert 0 < together <= one_by_one / 8
