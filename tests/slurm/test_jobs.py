"""Batch jobs: an array, what is requeued and what is not, and a run that reaches its time limit and goes on."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

import hpcfed
from tests.mpi.recipes import write_recipe, write_small
from tests.slurm.conftest import Cluster

HPCFED = (sys.executable, "-m", "hpcfed")

SLOW = '''
import os
import time

import torch


class Linear(torch.nn.Linear):
    """Takes its time until its job has been requeued; its result knows nothing of time."""

    def __init__(self):
        super().__init__(12, 4)
        self.nap = 0.2 if "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ else 0

    def forward(self, x):
        time.sleep(self.nap)
        return super().forward(x)
'''
LONG = {
    "model": {"factory": "slow:Linear"},
    "rounds": 200,
    "cohort": {"size": 3},
    "local": {"steps": 1, "batch_size": 10, "lr": 0.1, "engine": "sequential"},  # which calls the model at each step
    "evaluate": {"every": 0},
    "algorithm": {"name": "scaffold"},
}
"""80 s at least, where two of three clients nap on one of two ranks; a minute is what the job has."""


class Started(NamedTuple):
    """A run that was submitted: where, as which job, and what the command said, and said when called again."""

    place: Path
    number: str
    said: str
    again: str


def submit(cluster: Cluster, place: Path, *more: str) -> str:
    """Call ``hpcfed submit`` and return what it says."""
    size = ("--nodes", "2", "--time", "1")
    done = cluster.call(*HPCFED, "submit", "recipe.yaml", *size, *more, cwd=place)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def started(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The long run, begun before the module's other tests: it waits for SLURM while they work."""
    place = tmp_path_factory.mktemp("long")
    write_small(place)
    write_recipe(place, **LONG)
    (place / "slow.py").write_text(SLOW)
    said = submit(cluster, place)
    number = said.partition("submitted as job ")[2].partition(",")[0]
    yield Started(place, number, said, submit(cluster, place))
    cluster.call("scancel", number, cwd=place)


@pytest.mark.parametrize(
    ("deed", "code", "goes_on"),
    [
        ("exit 3", 3, False),
        ("exit 75", 75, False),  # nothing new is on disk: it would go on for ever
        ("touch run/checkpoints/round-00000002.json; exit 75", 75, True),
        ("touch run/checkpoints/round-00000002.json; exit 4", 4, False),
        ("touch run/checkpoints/round-00000002.json; exit 14", 14, True),  # Open MPI's, whose peer was killed
        ('touch run/checkpoints/round-00000002.json; echo {\\"status\\": \\"finished\\"} > run/result.json', 0, False),
        ("touch run/checkpoints/round-00000002.json", 137, True),  # no word of the run's that it has ended
        ("touch run/checkpoints/round-00000002.json; kill -KILL $$", 137, True),
        ("touch run/checkpoints/round-00000002.json; exit 9", 9, True),  # MPICH's mpirun says it so
        ("touch run/checkpoints/round-00000002.json; exit 253", 253, True),  # srun, for want of memory
        ("kill -KILL $$", 137, False),
        ("touch run/checkpoints/round-00000002.json; kill -TERM $$", 143, False),  # a second signal of the user's
        ("touch run/checkpoints/round-00000002.json; echo 3 > run-$SLURM_JOB_ID.deaths; kill -KILL $$", 137, False),
    ],
)
def test_only_a_run_that_stopped_or_was_killed_with_something_new_is_requeued(
    cluster: Cluster, tmp_path: Path, deed: str, code: int, goes_on: bool
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "round-00000001.json").touch()
    step = f"exec {sys.executable} -m hpcfed job-step --output run -- bash -c '{deed}'\n"
    (tmp_path / "job.sbatch").write_text(f"#!/bin/bash\n{step}")
    number = cluster.submit("--requeue", "job.sbatch", cwd=tmp_path)
    if goes_on:
        cluster.wait(number, Restarts="1")
        assert cluster.call("scancel", number, cwd=tmp_path).returncode == 0
        deaths = tmp_path / f"run-{number}.deaths"
        assert (deaths.read_text() if deaths.exists() else "") == ("" if code == 75 else "1\n")
        said = (tmp_path / f"slurm-{number}.out").read_text()
        assert ("; requeued, 1 of at most 3 in a row" in said) == deaths.exists()
    else:
        ended = cluster.wait(number, JobState="COMPLETED" if code == 0 else "FAILED")
        assert (ended["ExitCode"], ended["Restarts"]) == (f"{code}:0", "0")
        assert not list(tmp_path.glob("*.deaths"))
        said = (tmp_path / f"slurm-{number}.out").read_text()
        assert ("a rank was killed (exit code 137), and the job is not requeued" in said) == (code == 137)


def chained(cluster: Cluster, place: Path, *more: str) -> list[str]:
    """Submit the recipe as a chain of three jobs, and return their numbers."""
    said = submit(cluster, place, "--chain", "3", *more)
    numbers = re.findall(r"\d+", said.partition("submitted as job ")[2].partition(", from ")[0])
    assert len(numbers) == 3
    return numbers


def test_in_a_chain_the_jobs_after_a_finished_run_are_cancelled(
    cluster: Cluster, place: Path, reference: bytes
) -> None:
    first, *others = chained(cluster, place)
    assert cluster.job(others[0])["Dependency"].startswith(f"afternotok:{first}")
    cluster.wait(first, JobState="COMPLETED")
    for number in others:
        cluster.wait(number, JobState="CANCELLED")
        assert not (place / f"run-{number}.log").exists()  # it never began
    assert (place / "run" / "model.safetensors").read_bytes() == reference


@pytest.mark.parametrize(("code", "goes_on"), [(2, False), (3, False), (4, True), (75, True)])
def test_a_chain_ends_with_an_error_that_would_come_again(
    cluster: Cluster, place: Path, code: int, goes_on: bool
) -> None:
    """A command that ends with that exit code replaces the run."""
    (place / "site.yaml").write_text(f"{{python: \"bash -c 'exit {code}'\", launch: env}}\n")
    first, second, third = chained(cluster, place, "--site", "site.yaml")
    assert cluster.wait(first, JobState="FAILED")["ExitCode"] == f"{code}:0"
    for number in (second, third):
        cluster.wait(number, JobState="FAILED" if goes_on else "CANCELLED")
        assert (place / f"run-{number}.log").exists() == goes_on


@pytest.mark.deadline(400)
def test_a_run_goes_on_after_its_time_limit_with_the_same_bits(
    cluster: Cluster, started: Started, tmp_path: Path
) -> None:
    place, number, said, again = started
    assert re.fullmatch(rf"\S+: submitted as job {number}, from {place / 'run.sbatch'}\n", said)
    assert f"in the queue already, job {number} (" in again
    assert "nothing submitted" in again

    ended = cluster.wait(number, JobState="COMPLETED", timeout=300)
    log = place / f"run-{number}.log"
    assert re.search(r"recipe stopped after round \d+: (SIGUSR1|a signal to another rank);", log.read_text())
    assert ended["ExitCode"] == "0:0"
    assert int(ended["Restarts"]) >= 1  # more where all is slow
    assert "goes on after round" in log.read_text()

    shutil.copy(place / "small.h5", tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    whole = hpcfed.run(write_recipe(tmp_path, **LONG), [f"output={tmp_path / 'whole'}"], quiet=True)
    assert (place / "run" / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert unmeasured(place / "run") == unmeasured(whole.folder)
    assert "finished already" in submit(cluster, place)


def test_a_job_of_killed_ranks_goes_on_on_the_same_node(cluster: Cluster, place: Path) -> None:
    """Killed ranks leave MPICH's shared memory, whose name SLURM's job and step decide."""
    write_recipe(place, **{**LONG, "rounds": 40}, checkpoint={"every": 1, "keep": 2})
    (place / "slow.py").write_text(SLOW)
    size = ("--nodes", "1", "--ranks-per-node", "2", "--time", "5", "-o", "nodelist=n1")
    said = cluster.call(*HPCFED, "submit", "recipe.yaml", *size, cwd=place).stdout
    number = said.partition("submitted as job ")[2].partition(",")[0]
    deadline = time.monotonic() + 60
    while not list(place.glob("run/checkpoints/round-*3.json")):
        assert time.monotonic() < deadline, cluster.log(cluster.job(number))
        time.sleep(0.1)
    python = [process for process in psutil.process_iter(["cmdline"]) if "hpcfed" in (process.info["cmdline"] or ())]
    ranks = [process for process in python if process.environ().get("SLURM_JOB_ID") == number]
    parents = {process.ppid() for process in ranks}
    ranks = [process for process in ranks if process.name() != "srun" and process.pid not in parents]
    assert len(ranks) == 2
    for rank in ranks:
        rank.kill()
    waits = cluster.wait(number, Restarts="1", JobState="PENDING")
    assert datetime.fromisoformat(waits["StartTime"]) < datetime.now() + timedelta(seconds=30)
    ended = cluster.wait(number, JobState="COMPLETED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0")


def unmeasured(run: Path) -> list[dict]:
    """The record without what was measured."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "imbalance")} for row in rows]
