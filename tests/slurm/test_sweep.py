"""A sweep as an array on the real SLURM: its jobs share the runs, and one that is killed is succeeded."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.mpi.recipes import write_recipe
from tests.slurm.conftest import Cluster
from tests.sweep.conftest import endings, read_claims, read_table
from tests.sweep.test_kill_and_resume import check_whole

HPCFED = (sys.executable, "-m", "hpcfed")
SMALL = ("--grid", "local.lr=0.01,0.1,1", "--seeds", "2")
LARGE = (
    "rounds=40",
    "--grid",
    "local.lr=10**-3:10**0:6",
    "--grid",
    "algorithm.server_lr=10**-1:10**0:4",
    "--seeds",
    "2",
)


def submit(cluster: Cluster, place: Path, *arguments: str, jobs: int) -> str:
    """Submit a sweep as an array, and return what was said."""
    size = ("--array", str(jobs), "--time", "5", "--notice", "10", "--output", "swept")
    done = cluster.call(*HPCFED, "sweep", "recipe.yaml", *arguments, *size, cwd=place)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number_of(said: str) -> str:
    return said.partition("submitted as job ")[2].partition(",")[0]


def shared(place: Path) -> set[str]:
    """The jobs that had a part in the sweep."""
    (place / "run-sweep").exists() or (place / "run-sweep").symlink_to("swept")  # where `check_whole` looks
    return {claim["session"] for claims in read_claims(place / "swept").values() for claim in claims}


def test_the_jobs_of_an_array_share_the_runs(cluster: Cluster, place: Path) -> None:
    write_recipe(place, rounds=20)
    said = submit(cluster, place, *SMALL, jobs=2)
    assert "#SBATCH --array=1-2\n" in (place / "swept.sbatch").read_text()
    number = number_of(said)
    assert f"in the queue already, job {number}_" in submit(cluster, place, *SMALL, jobs=2)
    for task in ("1", "2"):
        ended = cluster.wait(f"{number}_{task}", JobState="COMPLETED")
        assert ended["ExitCode"] == "0:0"
        assert (place / f"swept-{number}_{task}.log").exists()
    sessions = shared(place)
    assert 0 < len(sessions) <= 2
    check_whole(place, 6)
    assert all(len(claims) == 1 for claims in read_claims(place / "swept").values())
    assert len(read_table(place / "swept" / "summary.csv")) == 3
    assert "finished already" in submit(cluster, place, *SMALL, jobs=2)
    here = cluster.call(*HPCFED, "sweep", "recipe.yaml", *SMALL, "--output", "swept", cwd=place)
    assert here.returncode == 0, here.stderr
    assert "6 runs, 6 done" in here.stdout


def test_an_experiment_as_an_array(cluster: Cluster, tmp_path: Path) -> None:
    asked = (*HPCFED, "reproduce", "fedexp-figure2", "--rounds", "3", "--output", "out")
    size = ("--array", "2", "--time", "5", "--notice", "10")
    said = cluster.call(*asked, *size, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "out" / "data").is_dir()  # prepared before the jobs
    for task in ("1", "2"):
        assert cluster.wait(f"{number_of(said.stdout)}_{task}", JobState="COMPLETED")["ExitCode"] == "0:0"
    claims = read_claims(tmp_path / "out" / "fedexp-toy" / "sweep")
    assert {len(own) for own in claims.values()} == {1}
    table = (tmp_path / "out" / "fedexp-toy" / "table.md").read_text()
    assert "not run" not in table
    assert "3 of 20" in table
    assert "fedexp-toy: finished already" in cluster.call(*asked, *size, cwd=tmp_path).stdout


def test_a_study_as_an_array(cluster: Cluster, place: Path) -> None:
    """Both jobs share the runs that tune and those of the tables; the last one's page has all."""
    write_recipe(place, rounds=2)
    asked = (*HPCFED, "study", "recipe.yaml", "--splits", "2", "--baselines", "pooled", "--output", "studied")
    asked += ("--tune", "local.lr=0.01,0.1", "--array", "2", "--time", "5", "--notice", "10")
    said = cluster.call(*asked, cwd=place)
    assert said.returncode == 0, said.stderr
    for task in ("1", "2"):
        assert cluster.wait(f"{number_of(said.stdout)}_{task}", JobState="COMPLETED")["ExitCode"] == "0:0"
    for sweep in ("studied/tuning/sweep", "studied/sweep"):
        assert {len(own) for own in read_claims(place / sweep).values()} == {1}
    assert len(read_claims(place / "studied/sweep")) == 6
    assert "have no result" not in (place / "studied" / "study.html").read_text()
    assert "studied: finished already" in cluster.call(*asked, cwd=place).stdout


def test_the_ready_made_script(cluster: Cluster, place: Path, pmi: str) -> None:
    program = place / "bin" / "hpcfed"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcfed "$@"\n')
    program.chmod(0o755)
    script = (ROOT / "jobs" / "slurm" / "sweep.sbatch").read_text().replace("--mpi=pmi2", f"--mpi={pmi}")
    (place / "sweep.sbatch").write_text(script)
    options = ("--array=1-1", "--ntasks-per-node=2", f"--export=ALL,PATH={program.parent}:{cluster.env['PATH']}")
    number = cluster.submit(*options, "sweep.sbatch", "recipe.yaml", "swept", "--grid=local.lr=0.1,1", cwd=place)
    cluster.wait(f"{number}_1", JobState="COMPLETED")
    shared(place)
    check_whole(place, 2)


def kill(place: Path, finished: int, jobs: int) -> None:
    """Kill the processes of so many jobs in the middle of a run, once so many runs are done."""
    deadline = time.monotonic() + 300
    killed: set[str] = set()
    while len(killed) < jobs:
        assert time.monotonic() < deadline
        if endings(place / "swept")["finished"] >= finished:
            for claims in read_claims(place / "swept").values():
                holder = claims[-1]
                if holder["ending"] is None and holder["session"] not in {"", *killed} and len(killed) < jobs:
                    os.kill(holder["pid"], signal.SIGKILL)
                    killed.add(holder["session"])
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.deadline(900)
def test_24_configurations_of_2_seeds_with_a_job_killed_in_the_middle(cluster: Cluster, place: Path) -> None:
    number = number_of(submit(cluster, place, *LARGE, jobs=3))
    kill(place, finished=10, jobs=1)
    states = {task: wait_until_over(cluster, f"{number}_{task}") for task in ("1", "2", "3")}
    assert sorted(states.values()) == ["COMPLETED", "COMPLETED", "FAILED"]
    shared(place)
    check_whole(place, 48)


@pytest.mark.soak
@pytest.mark.deadline(900)
def test_24_configurations_of_2_seeds_all_killed_and_submitted_again(cluster: Cluster, place: Path) -> None:
    number = number_of(submit(cluster, place, *LARGE, jobs=3))
    kill(place, finished=10, jobs=3)
    assert {wait_until_over(cluster, f"{number}_{task}") for task in ("1", "2", "3")} == {"FAILED"}
    done = {path: path.stat().st_mtime_ns for path in (place / "swept").rglob("model.safetensors")}
    assert 0 < len(done) < 48
    number = number_of(submit(cluster, place, *LARGE, jobs=3))
    assert {wait_until_over(cluster, f"{number}_{task}") for task in ("1", "2", "3")} == {"COMPLETED"}
    shared(place)
    check_whole(place, 48)
    assert {path: path.stat().st_mtime_ns for path in done} == done


def wait_until_over(cluster: Cluster, number: str) -> str:
    """Wait until a job has ended, and return how."""
    deadline = time.monotonic() + 600
    while (state := cluster.job(number)["JobState"]) in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return state


@pytest.mark.soak
def test_what_is_cancelled_stays_cancelled(cluster: Cluster, place: Path) -> None:
    number = number_of(submit(cluster, place, *LARGE, jobs=1))
    deadline = time.monotonic() + 120
    while endings(place / "swept")["finished"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert cluster.call("scancel", f"{number}_1", cwd=place).returncode == 0
    time.sleep(15)  # it stops with something new saved, which else sends it back into the queue
    assert endings(place / "swept")["stopped"] <= 1  # none between two runs
    assert cluster.job(f"{number}_1")["JobState"] == "CANCELLED"


def test_of_an_array_only_the_task_that_has_more_to_do_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The last task has the array's own number; as a job's number it means all of them."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "done.json").write_text('{"status": "finished"}')
    deed = "if ((SLURM_ARRAY_TASK_ID == 1)); then cp done.json run/result.json; exit 0; fi; "
    deed += "sleep 2; touch run/checkpoints/round-1.json; exit 75"
    step = f"exec {sys.executable} -m hpcfed job-step --array --output run -- bash -c '{deed}'\n"
    (tmp_path / "job.sbatch").write_text(f"#!/bin/bash\n{step}")
    number = cluster.submit("--requeue", "--array=1-2", "job.sbatch", cwd=tmp_path)
    cluster.wait(f"{number}_2", Restarts="1")
    ended = cluster.wait(f"{number}_1", JobState="COMPLETED")
    assert ended["Restarts"] == "0"
    assert cluster.call("scancel", number, cwd=tmp_path).returncode == 0
