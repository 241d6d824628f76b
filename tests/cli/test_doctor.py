"""``hpcfed doctor`` as a command: one correct report on any number of ranks, and its exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import launch, launcher, own_line, own_lines


@pytest.mark.soak
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [0, 1, 2, 3])
def test_json_tells_of_every_rank_once(ranks: int, tmp_path: Path, command, monkeypatch) -> None:
    mpirun = launcher(sys.executable).command[0]
    monkeypatch.setenv("PATH", f"{Path(mpirun).parent}{os.pathsep}{os.environ['PATH']}")
    asked = ["doctor", "--json"]
    done = launch(ranks, asked, cwd=tmp_path) if ranks else command(asked, tmp_path)
    assert (done.returncode, own_lines(done.stderr)) == (0, [])
    told = json.loads(done.stdout)
    size = max(ranks, 1)
    assert [entry["rank"] for entry in told["ranks"]] == list(range(size))
    assert all(set(entry["cores"]) <= os.sched_getaffinity(0) for entry in told["ranks"])
    assert told["mpi"]["vendor"] == told["mpi"]["mpirun_vendor"] == launcher(sys.executable).mpi
    assert told["mpi"]["mpirun"] == mpirun
    assert (told["launcher"] is None) == (ranks == 0)
    assert told["working"]["path"] == str(tmp_path.resolve())
    assert told["working"]["problem"] == ""
    measured = told["measured"]
    assert len(measured["gflops"]) == len(measured["copy_gb_per_s"]) == size
    assert min(measured["gflops"] + measured["copy_gb_per_s"] + [measured["write_mb_per_s"]]) > 0
    assert (measured["allreduce_small_s"] is None) == (size == 1)
    assert (len(measured["allreduce"]), len(measured["ping_pong"])) == ((0, 0) if size == 1 else (3, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.one_mpi
def test_several_ranks_print_one_report(tmp_path: Path) -> None:
    done = launch(2, ["doctor", "--no-probe"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (started,) = [line for line in lines if line.startswith("started by")]
    assert f"{launcher(sys.executable).mpi}'s mpirun: 2 ranks on 1 host" in started
    assert sum(line.startswith("hpcfed ") for line in lines) == 1
    assert "ranks 0–1" in done.stdout
    assert "GFLOP/s" not in done.stdout


@pytest.mark.soak
def test_more_threads_than_cores_are_found(tmp_path: Path) -> None:
    threads = str(len(os.sched_getaffinity(0)) + 1)
    env = {"OMP_NUM_THREADS": threads, "MKL_DYNAMIC": "FALSE"}  # else MKL stops at the number of cores
    done = launch(0, ["doctor", "--no-probe"], cwd=tmp_path, env=env)
    assert done.returncode == 0
    assert f"torch {threads}" in done.stdout.partition("What looks slow or wrong:")[2]


@pytest.fixture
def one_core() -> Iterator[int]:
    """The only core that this process and those it starts may use, for the length of a test."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


@pytest.mark.soak
def test_ranks_bound_to_one_core_are_found(one_core: int, tmp_path: Path) -> None:
    done = launch(2, ["doctor", "--no-probe", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [entry["cores"] for entry in told["ranks"]] == [[one_core]] * 2
    assert "MPI" not in {finding["where"] for finding in told["findings"]}
    assert any(finding["what"].startswith("2 ranks ") for finding in told["findings"])


@pytest.mark.soak
def test_a_folder_that_cannot_be_written_is_found() -> None:
    done = launch(0, ["doctor"], cwd="/proc")  # which refuses even root
    assert (done.returncode, own_lines(done.stderr)) == (0, [])
    assert "the working folder /proc cannot be written" in done.stdout
    assert "to disk" not in done.stdout


@pytest.mark.one_mpi
def test_an_mpi_library_that_cannot_be_loaded_is_found(tmp_path: Path) -> None:
    absent = str(tmp_path / "libmpi.so")
    done = launch(0, ["doctor", "--no-probe", "--json"], cwd=tmp_path, env={"MPI4PY_LIBMPI": absent})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["mpi"]["library"] is None
    assert absent in told["mpi"]["problem"]
    assert [finding["where"] for finding in told["findings"]] == ["MPI"]


def test_a_launcher_of_another_mpi_ends_it_with_4(tmp_path: Path) -> None:
    done = launch(0, ["doctor", "--json"], cwd=tmp_path, env={"OMPI_COMM_WORLD_SIZE": "3"})
    assert (done.returncode, done.stdout) == (4, "")
    (line,) = [line for line in own_lines(done.stderr) if line.startswith("hpcfed: ")]
    assert "started 3 ranks" in line
    assert "sees only one" in line


@pytest.mark.soak
def test_a_torch_that_cannot_be_loaded_ends_it_with_4(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    done = launch(2, ["doctor"], cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    assert (done.returncode, done.stdout) == (4, "")
    line = own_line(done.stderr)
    assert "cannot load what a run needs" in line
    assert "libcudart.so.12" in line
