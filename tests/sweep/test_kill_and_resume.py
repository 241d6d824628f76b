"""A sweep that is killed or stopped goes on with the same command; no run is repeated or lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import hpcfed
from hpcfed.ranks.world import World
from tests.launch import LEAKED, ROOT, launch, launcher, own_line
from tests.mpi.recipes import write_recipe, write_small
from tests.sweep.conftest import endings, read_claims, read_table

BLOWN = '''
import os
import signal
from pathlib import Path

import torch


class Linear(torch.nn.Linear):
    """The first to find the order, in the visit that it names, takes it and sends its process a signal."""

    def __init__(self):
        super().__init__(12, 4)
        self.visits = 0

    def forward(self, x):
        self.visits += 1
        order = Path("order")
        if order.exists() and self.visits == int(order.read_text().split()[1]):
            number = int(order.read_text().split()[0])
            order.rename("landed")
            os.kill(os.getpid(), number)
        return super().forward(x)
'''
GRIDS = ("--grid", "local.lr=0.01,0.1", "--grid", "algorithm.server_lr=1,2")
RECIPE = {
    "model": {"factory": "blown:Linear"},
    "rounds": 6,
    "local": {"steps": 1, "batch_size": "full", "lr": 0.1},
    "algorithm": {"name": "scaffold"},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 1},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for a sweep of 8 runs that is to be killed."""
    write_small(tmp_path)
    (tmp_path / "blown.py").write_text(BLOWN)
    write_recipe(tmp_path, **RECIPE)
    return tmp_path


SWEEP = ("sweep", "recipe.yaml", *GRIDS, "--seeds", "2")


def check_whole(place: Path, runs: int) -> None:
    """Each run has ended well exactly once, and has a whole record."""
    claims = read_claims(place / "run-sweep")
    assert len(claims) == runs
    assert {sum(claim["ending"] == "finished" for claim in own) for own in claims.values()} == {1}
    table = read_table(place / "run-sweep" / "results.csv")
    assert len(table) == runs
    assert {row["status"] for row in table} == {"finished"}
    for row in table:
        lines = (place / "run-sweep" / row["folder"] / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(1, int(row["rounds"]) + 1))


def has_rounds(run: Path) -> bool:
    """Whether a run has a record that would be put aside if it began anew."""
    return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGKILL, 2), pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.soak)]
)
def test_a_sweep_goes_on(place, command, number, ranks):
    """One rank is killed or receives the only signal; the remaining runs are done without MPI."""
    (place / "order").write_text(f"{int(number)} 12")
    first = launch(ranks, [*SWEEP, "--groups", "2"], cwd=place)
    assert (place / "landed").exists()
    done = {path: path.stat().st_mtime_ns for path in (place / "run-sweep").rglob("model.safetensors")}
    left = endings(place / "run-sweep")
    if number == signal.SIGKILL:
        assert first.returncode not in (0, 2, 3, 4, 75), first.stderr
        assert left["None"] > 0  # claims that nobody holds any more
    else:
        assert first.returncode == 75, first.stderr
        line = own_line(first.stderr)
        assert "runs done; the same command goes on from there" in line
        assert left["None"] == 0
        assert left["stopped"] > 0
        stopped = [row for row in read_table(place / "run-sweep" / "results.csv") if row["status"] == "stopped"]
        records = [place / "run-sweep" / row["folder"] / "metrics.jsonl" for row in stopped]
        lines = [path.read_text().count("\n") if path.exists() else 0 for path in records]
        assert [int(row["rounds"]) for row in stopped] == lines
        assert any(lines)
    assert left["finished"] < 8
    unfinished = [run for run in (place / "run-sweep").glob("runs/*/*") if not (run / "model.safetensors").exists()]
    lost = {run for run in unfinished if not any(run.glob("checkpoints/*.json")) and has_rounds(run)}
    assert len(lost) <= 2 * (number == signal.SIGKILL)  # each group's, killed before its first checkpoint
    again = command([*SWEEP, "--quiet"], place)
    assert again.returncode == 0, again.stderr
    check_whole(place, 8)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert {aside.parent for aside in (place / "run-sweep").rglob("previous-*")} == lost
    alone = hpcfed.run(
        place / "recipe.yaml",
        ["local.lr=0.01", "algorithm.server_lr=1", "seed=0", f"output={place / 'alone'}"],
        world=World(),
        quiet=True,
    )
    run = place / "run-sweep" / "runs" / "local.lr=0.01,algorithm.server_lr=1" / "seed-0"
    assert (run / "model.safetensors").read_bytes() == (alone.folder / "model.safetensors").read_bytes()


@pytest.mark.soak
@pytest.mark.deadline(900)
@pytest.mark.parametrize("case", range(3))
def test_24_configurations_of_2_seeds_killed_in_the_middle(place, case):
    """The whole job is killed at a random moment, once or twice."""
    rng = random.Random(case)
    grids = ("--grid", "local.lr=10**-3:10**0:6", "--grid", "algorithm.server_lr=10**-1:10**1:4")
    arguments = ["sweep", "recipe.yaml", "rounds=30", *grids, "--seeds", "2", "--groups", "2"]
    for _ in range(1 + case % 2):
        before = endings(place / "run-sweep")["finished"]
        job = start(4, arguments, place)
        while endings(place / "run-sweep")["finished"] < before + rng.randint(5, 15):
            assert job.poll() is None
            time.sleep(0.05)
        kill(job)
    done = {path: path.stat().st_mtime_ns for path in (place / "run-sweep").rglob("model.safetensors")}
    assert 0 < len(done) < 48
    again = launch(4, arguments, cwd=place, timeout=600)
    assert again.returncode == 0, again.stderr
    check_whole(place, 48)
    assert {path: path.stat().st_mtime_ns for path in done} == done


def start(ranks: int, arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a job and leave it to itself."""
    mpi = launcher(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LEAKED)}
    env = kept | mpi.settings | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*mpi.command, "-n", str(ranks), sys.executable, "-m", "hpcfed", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(job: subprocess.Popen[bytes]) -> None:
    """Kill a job and all its processes at once, as a power cut would."""
    family = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()
    psutil.wait_procs(family[:-1], timeout=10)
