"""Hosts in namespaces for the session, both MPIs, and a recipe that runs on them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from tests.launch import Completed
from tests.mpi.recipes import write_recipe, write_small
from tests.network.hosts import Hosts, hosts, missing
from tests.slurm.conftest import OPEN_MPI_PYTHON

RECIPE = {"algorithm": {"name": "scaffold"}, "placement": "balanced", "rounds": 4}
"""States move between hosts, for their clients have states and are spread anew in each round."""


@pytest.fixture(scope="session")
def network() -> Iterator[Hosts]:
    """Four hosts."""
    lacking = missing()
    if lacking:
        pytest.skip(f"THE NETWORK IS NOT TESTED: {lacking}")
    with hosts(4) as made:
        yield made


@pytest.fixture(params=["this environment's MPI", "the Open MPI wheel"], scope="session")
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter of each environment in turn."""
    if request.param == "this environment's MPI":
        return sys.executable
    path = os.environ.get(OPEN_MPI_PYTHON)
    if not path:
        pytest.skip(f"OPEN MPI IS NOT TESTED BETWEEN HOSTS: {OPEN_MPI_PYTHON} names no interpreter (make test-network)")
    return path


@dataclass(frozen=True)
class Place:
    """A folder with ``small.h5`` and ``recipe.yaml``, whose run goes to ``run``."""

    path: Path

    @property
    def model(self) -> bytes:
        """The final model of the run."""
        return (self.path / "run" / "model.safetensors").read_bytes()

    @property
    def hosts(self) -> list[str]:
        """The host of each rank of the last job."""
        return json.loads((self.path / "run" / "environment.json").read_text())["hosts"]

    def rounds(self) -> int:
        """Return the number of rounds recorded so far."""
        record = self.path / "run" / "metrics.jsonl"
        return record.read_text().count("\n") if record.exists() else 0

    def write(self, **changes: Any) -> None:
        """Write the recipe."""
        write_recipe(self.path, **RECIPE | changes)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder with a recipe."""
    write_small(tmp_path, 7)
    made = Place(tmp_path)
    made.write()
    return made


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final model of that recipe, run in this process alone."""
    folder = tmp_path_factory.mktemp("reference")
    write_small(folder, 7)
    hpcfed.run(write_recipe(folder, **RECIPE), [f"output={folder / 'run'}"], quiet=True)
    return (folder / "run" / "model.safetensors").read_bytes()


def hpcfed_run(network: Hosts, python: str, ranks: int, names: list[str]) -> list[str]:
    """Return the command that runs the recipe on some hosts."""
    return [*network.mpirun(python, ranks, names), python, "-m", "hpcfed", "run", "recipe.yaml", "--quiet"]


def succeeded(done: Completed) -> Completed:
    """Return a command that ended well; else fail with what it said."""
    assert done.returncode == 0, done.stderr
    return done
