"""Ranks with different copies of hpcfed are refused, and with different versions of libraries not called bitwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launch import ROOT, Completed, launch, own_line
from tests.mpi.recipes import write_recipe, write_small

START = """
import os, sys
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    sys.path.insert(0, "on-rank-1")
from hpcfed.cli.main import main
main()
"""
"""A rank 1 that finds modules elsewhere first, as where one node's copy is stale."""


@pytest.fixture
def other(folder: Path) -> Path:
    """A place from which only rank 1 imports."""
    write_small(folder)
    write_recipe(folder, rounds=1)
    (folder / "start.py").write_text(START)
    (folder / "on-rank-1").mkdir()
    return folder / "on-rank-1"


def call(folder: Path, *words: str) -> Completed:
    return launch(2, words, program=("start.py",), cwd=folder)


@pytest.mark.one_mpi
def test_ranks_with_other_code_do_not_train_together(other: Path, folder: Path) -> None:
    copy = shutil.copytree(ROOT / "hpcfed", other / "hpcfed")
    solver = copy / "client" / "batched" / "solver.py"
    solver.write_text(solver.read_text() + "\n# stale\n")
    done = call(folder, "run", "recipe.yaml", "--quiet")
    assert done.returncode == 4
    line = own_line(done.stderr)
    assert "hpcfed: the ranks run different code of hpcfed: got " in line
    assert "(rank 0), " in line
    assert "(rank 1); unpack the same copy on every node" in line
    assert not (folder / "run").exists()


READS = r"""
import os
from hpcfed.ranks.code import digest
from hpcfed.ranks.world import connect
world = connect()
half = world.split(2)
line = f"{world.rank} {digest.cache_info().misses} {len(set(world.code) | set(half.code))}\n"
os.write(1, line.encode())  # whole: the launcher may put another rank's output between two writes
"""


@pytest.mark.one_mpi
def test_one_rank_of_a_host_reads_the_code(tmp_path: Path) -> None:
    """In a folder that hosts share, a rank's reading of all files takes seconds; groups know what the world found."""
    done = launch(4, [READS], program=("-c",), cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0 1 1", "1 0 1", "2 0 1", "3 0 1"]


@pytest.mark.one_mpi
@pytest.mark.soak
def test_ranks_with_other_versions_are_not_called_bitwise(other: Path, folder: Path) -> None:
    about = other / "numpy-1.99.9.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.99.9\n")
    done = call(folder, "run", "recipe.yaml", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads((folder / "run" / "environment.json").read_text())
    assert facts["bitwise"] is False
    assert "the ranks differ in versions: " in facts["bitwise_why_not"]
    assert "numpy 1.99.9" in facts["bitwise_why_not"]
    assert "numpy 1.99.9" not in facts["per_rank"][0]["versions"]
