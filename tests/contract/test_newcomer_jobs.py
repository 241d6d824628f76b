"""What a newcomer adds, each in one file: a method by name in the package, another world in place of MPI.

The others are tested where they belong: q-FFL and FedSAM (`test_worked_methods`), a local step (`test_own_step`), a
data set, a model and a metric of one's own (`tests/docs`, `tests/cli`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest

import hpcfed
from hpcfed import algorithms
from hpcfed.lab.report.group import method_name
from hpcfed.ranks.world import World
from tests.contract import glooworld
from tests.launch import ROOT
from tests.mpi.recipes import small, write_small

NEAR = '''"""FedNear: FedProx whose μ grows with the rounds, to show what a method's file holds."""

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Tilt
from pydantic import Field


class Near(ClientRule):
    mu: float = Field(ge=0)

    def tilt(self, w, shared, client, context):
        return Tilt(mu=self.mu * context.round)


LOCAL, SERVER = Near, ServerStep
TITLE, REFERENCES, EXAMPLE = "FedNear", ("li2020federated",), {"mu": 0.1}
'''


@pytest.fixture
def fednear(world, shared_tmp, monkeypatch) -> Iterator[None]:
    """A file more in ``hpcfed/algorithms/``, and nothing else."""
    cached = algorithms.choices, algorithms.titles, algorithms.references, algorithms.examples
    world.on_root(lambda: (shared_tmp / "fednear.py").write_text(NEAR) and None)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(shared_tmp)])
    importlib.invalidate_caches()
    for function in cached:
        function.cache_clear()
    yield
    sys.modules.pop("hpcfed.algorithms.fednear", None)
    for function in cached:
        function.cache_clear()


def test_a_method_of_the_package_is_one_file(fednear, world, shared_tmp):
    """By name in a recipe, in products of parts, in reports, with its papers."""
    world.on_root(lambda: write_small(shared_tmp) and None)
    algorithm = {"name": "fednear", "mu": 0.1}
    result = hpcfed.run(
        small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), algorithm=algorithm), world=world, quiet=True
    )
    assert result.recipe.algorithm.parameters == {"mu": 0.1, "server_lr": 1.0}
    assert "fednear" in algorithms.names()
    assert method_name({"algorithm": algorithm}) == "FedNear"
    assert algorithms.references()["fednear"] == ("li2020federated",)
    with pytest.raises(hpcfed.InputError, match=r"unknown key 'algorithm.nu' for fednear.*did you mean 'mu'"):
        hpcfed.run(small(shared_tmp / "no", algorithm={"name": "fednear", "nu": 1}), world=World(), quiet=True)


@pytest.mark.soak
@pytest.mark.serial
def test_another_world_takes_the_place_of_mpi(tmp_path):
    """FedDyn, whose states move between two processes connected by Gloo: the same bits as in one; one run goes on."""
    data = str(write_small(tmp_path))
    recipe = small(
        None,
        data=data,
        algorithm={"name": "feddyn", "alpha": 0.1},
        placement="balanced",
        rounds=2,
        checkpoint={"every": 1},
    )
    spawned = multiprocessing.get_context("spawn")
    meeting, together = tmp_path / "meeting", {**recipe, "output": str(tmp_path / "together")}
    ranks = [spawned.Process(target=glooworld.run, args=(rank, 2, meeting, together)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    alone = hpcfed.run({**recipe, "output": str(tmp_path / "alone")}, world=World(), quiet=True)
    assert (tmp_path / "together" / "model.safetensors").read_bytes() == (
        alone.folder / "model.safetensors"
    ).read_bytes()


def test_the_table_of_first_contributions_is_what_a_script_counts():
    """Within a tenth, since the files change with other work; those named are there."""
    counted = run_path(str(ROOT / "jobs" / "bench" / "newcomers.py"))["table"]().splitlines()
    told = [line for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines() if line.startswith("| a")]
    for here, there in zip(told, [line for line in counted if line.startswith("| a")], strict=True):
        (what, files, lines), (also, as_many, about) = (row.split(" | ")[:3] for row in (here, there))
        assert (what, files) == (also, as_many)
        assert abs(int(lines) - int(about)) <= max(20, int(about) // 10), f"python jobs/bench/newcomers.py: {what}"


def test_a_worked_file_is_a_page_at_most():
    for name in ("fedsam", "qffl", "samstep", "moon", "glooworld", "terngrad"):
        assert len((Path(__file__).parent / f"{name}.py").read_text().splitlines()) < 60
