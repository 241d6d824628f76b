"""What ``hpcfed submit`` makes of its options and of the environment, as the real SLURM takes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import hpcfed
from tests.slurm.conftest import Cluster, Done

HPCFED = (sys.executable, "-m", "hpcfed")
NOTHING = "{launch: env, python: 'true'}"
"""A site file of jobs that do nothing."""


def call(
    cluster: Cluster, place: Path, *more: str, env: Mapping[str, str] | None = None, command: str = "submit"
) -> Done:
    return cluster.call(*HPCFED, command, "recipe.yaml", "--time", "1", *more, cwd=place, env=env)


def submitted(cluster: Cluster, place: Path, *more: str, env: Mapping[str, str] | None = None) -> str:
    """The number of the job that the command has submitted."""
    done = call(cluster, place, *more, env=env)
    assert done.returncode == 0, done.stderr
    (number,) = re.findall(r"submitted as job (\d+),", done.stdout)
    return number


def test_a_job_of_more_nodes_than_there_are_is_refused_and_one_that_waits_is_told(
    cluster: Cluster, place: Path
) -> None:
    """SLURM takes both, and says the same of both; of nodes that are drained the partition still has enough."""
    done = call(cluster, place, "--nodes", "5")
    assert done.returncode == 2
    refused = "--nodes: expected at most 2 in partition main, got 5 (allocation failure: Requested node configuration"
    assert refused in done.stderr
    done = call(cluster, place, "--ranks-per-node", "3", "threads=2")
    assert done.returncode == 2
    assert "--ranks-per-node: expected at most 4 CPUs a node in partition main, got 3 of 2 (alloc" in done.stderr
    assert cluster.call("squeue", "--noheader", cwd=place).stdout == ""
    cluster.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test", cwd=place)
    try:
        done = call(cluster, place, "--nodes", "2")
        (number,) = re.findall(r"submitted as job (\d+),", done.stdout)
        assert "SLURM could not start this job on its nodes as they are (allocation failure: " in done.stderr
        assert cluster.job(number)["JobState"] == "PENDING"
    finally:
        cluster.call("scontrol", "update", "NodeName=n2", "State=RESUME", cwd=place)
    cluster.call("scancel", number, cwd=place)
    cluster.wait_for_nodes()
    possible = call(cluster, place, "--nodes", "2", "-o", "begin=now+1hour")
    assert (possible.returncode, possible.stderr) == (0, "")
    (number,) = re.findall(r"submitted as job (\d+),", possible.stdout)
    cluster.call("scancel", number, cwd=place)


@pytest.fixture
def seen(cluster: Cluster, place: Path) -> Path:
    """The file in which a job leaves its ranks' environment, in place of a run."""
    setup = f"export FROM_SETUP=yes PYTHONPATH={cluster.env['PYTHONPATH']}"
    (place / "site.yaml").write_text(f"python: bash -c 'env > seen'\nlaunch: srun\nsetup: {setup}\n")
    return place / "seen"


MPS = """#!/bin/bash
# Stands for NVIDIA's program: it serves until it is told to quit.
pipe={place}/mps-$SLURMD_NODENAME
case $*  in
-f) echo up >> "$pipe.log"; mkfifo "$pipe"; read -r said < "$pipe"; rm "$pipe"; echo "$said" >> "$pipe.log" ;;
*) read -r said; [[ -p $pipe ]] || exit 1; if [[ $said == quit* ]]; then echo "$said" > "$pipe"; fi ;;
esac
"""


def test_ranks_that_share_gpus_are_served_on_every_node(cluster: Cluster, place: Path) -> None:
    """By NVIDIA's service, which is up before the ranks and has ended after them; SLURM has counted GPUs here."""
    program = place / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(MPS.replace("{place}", str(place)))
    program.chmod(0o755)
    rank = "bash -c 'cat mps-$SLURMD_NODENAME.log; echo $CUDA_MPS_PIPE_DIRECTORY $SLURM_GPUS_ON_NODE'"
    (place / "site.yaml").write_text(f"python: {rank}\nlaunch: srun --label\nsetup: PATH={program.parent}:$PATH\n")
    size = ("--nodes", "2", "--gpus-per-node", "2", "--ranks-per-node", "4", "--site", "site.yaml", "--mem", "100")
    number = submitted(cluster, place, *size)
    cluster.wait(number, JobState="COMPLETED")
    lines = (place / f"run-{number}.log").read_text().splitlines()
    said = [line for line in lines if not line.startswith("srun: cluster configuration lacks support for cpu binding")]
    assert sorted(said) == sorted(
        f"{rank}: {line}" for rank in range(8) for line in ("up", f"/tmp/hpcfed-mps-{number} 2")
    )
    for node in ("n1", "n2"):
        assert (place / f"mps-{node}.log").read_text() == "up\nquit -t 10\n"
    assert not Path(f"/tmp/hpcfed-mps-{number}").exists()
    program.unlink()
    number = submitted(cluster, place, *size)
    cluster.wait(number, JobState="COMPLETED")
    assert "hpcfed: MPS is not up on every node, so ranks that share" in (place / f"run-{number}.log").read_text()


def test_a_job_submitted_from_a_task_of_an_array_does_not_take_itself_for_that_task(
    cluster: Cluster, place: Path, seen: Path
) -> None:
    around = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_END_TIME": "9"}
    number = submitted(cluster, place, "--site", "site.yaml", env=around)
    cluster.wait(number, JobState="COMPLETED")
    variables = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    assert variables["SLURM_JOB_ID"] == number
    assert not any(name.startswith("SLURM_ARRAY") for name in variables)
    assert int(variables["SLURM_JOB_END_TIME"]) > 9


def test_ranks_get_what_setup_exports_whatever_sbatch_exports(cluster: Cluster, place: Path, seen: Path) -> None:
    number = submitted(cluster, place, "--site", "site.yaml", "-o", "export=NONE")
    cluster.wait(number, JobState="COMPLETED")
    assert "FROM_SETUP=yes" in seen.read_text().splitlines()


def test_variables_of_sbatch_do_not_override_the_script(cluster: Cluster, place: Path) -> None:
    others = {"SBATCH_JOB_NAME": "mine", "SBATCH_TIMELIMIT": "9", "SBATCH_NO_REQUEUE": "", "SBATCH_ARRAY_INX": "1-4"}
    held = submitted(cluster, place, "-o", "hold", env=others)
    job = cluster.job(held)
    assert job["JobName"].startswith("recipe-")
    assert (job["TimeLimit"], job["Requeue"], job.get("ArrayTaskId")) == ("00:01:00", "1", None)
    assert cluster.call("scancel", held, cwd=place).returncode == 0


def test_variables_of_sbatch_count_where_the_script_says_nothing(cluster: Cluster, place: Path) -> None:
    refused = call(cluster, place, env={"SBATCH_PARTITION": "nowhere"})
    assert (refused.returncode, "Invalid partition name specified" in refused.stderr) == (2, True)


def test_a_recipe_that_is_edited_while_its_job_waits_is_not_run(cluster: Cluster, place: Path) -> None:
    number = submitted(cluster, place, "-o", "hold")
    with (place / "recipe.yaml").open("a") as recipe:
        recipe.write("seed: 8\n")
    waits = call(cluster, place, "-o", "hold").stdout
    assert f"in the queue already, job {number} (pending); nothing submitted; to submit it with another recipe" in waits
    assert cluster.call("scontrol", "release", number, cwd=place).returncode == 0
    ended = cluster.wait(number, JobState="FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0")
    said = (place / f"run-{number}.log").read_text()
    assert said.startswith(f"hpcfed: {place}/recipe.yaml: has changed since the job was submitted"), said
    assert not (place / "run").exists()


def test_fresh_leaves_a_run_where_it_is_until_slurm_has_accepted_the_job(cluster: Cluster, place: Path) -> None:
    hpcfed.run(place / "recipe.yaml", [f"output={place / 'run'}"], quiet=True)
    model, kept = place / "run" / "model.safetensors", place / "run" / "previous-1" / "model.safetensors"
    refused = call(cluster, place, "--fresh", "--partition", "nowhere")
    assert (refused.returncode, model.exists(), kept.exists()) == (2, True, False)
    (place / "site.yaml").write_text(NOTHING)
    number = submitted(cluster, place, "--fresh", "--site", "site.yaml")
    assert kept.exists()
    cluster.wait(number, JobState="COMPLETED")


def test_fresh_leaves_runs_of_an_array_where_they_are_until_slurm_has_accepted_it(
    cluster: Cluster, place: Path
) -> None:
    asked = ("--grid", "local.lr=0.1", "--output", "swept", "--array", "1")
    swept = cluster.call(*HPCFED, "sweep", "recipe.yaml", *asked[:4], cwd=place)
    assert swept.returncode == 0, swept.stderr
    (run,) = (place / "swept" / "runs").iterdir()
    unchanged = call(cluster, place, *asked, "--fresh", command="sweep")
    assert "finished already" in unchanged.stdout
    assert cluster.call("squeue", "--noheader", cwd=place).stdout == ""
    (place / "site.yaml").write_text(NOTHING)
    changed = (*asked, "local.batch_size=5", "--fresh", "--site", "site.yaml")
    assert call(cluster, place, *changed, "--partition", "nowhere", command="sweep").returncode == 2
    assert (run / "model.safetensors").exists()
    said = call(cluster, place, *changed, command="sweep")
    assert "submitted as job" in said.stdout, said.stderr
    assert (run / "previous-1" / "model.safetensors").exists()
    (number,) = re.findall(r"submitted as job (\d+),", said.stdout)
    cluster.wait(f"{number}_1", JobState="COMPLETED")


def test_a_chain_that_is_refused_in_the_middle_names_the_jobs_before(cluster: Cluster, place: Path) -> None:
    """Its partition takes no more jobs after the first."""
    sbatch = place / "bin" / "sbatch"
    sbatch.parent.mkdir()
    drain = "scontrol update PartitionName=main State=DRAIN"
    asks = 'case "$*" in *--test-only*) exec sbatch "$@";; esac'
    sbatch.write_text(f'#!/bin/sh\nPATH=${{PATH#*:}}\n{asks}\nsbatch "$@"; code=$?; {drain}; exit $code\n')
    sbatch.chmod(0o755)
    path = {"PATH": f"{sbatch.parent}:{cluster.env['PATH']}"}
    try:
        refused = call(cluster, place, "--chain", "3", "-o", "hold", env=path)
    finally:
        cluster.call("scontrol", "update", "PartitionName=main", "State=UP", cwd=place)
    (number,) = cluster.call("squeue", "--noheader", "--format=%i", cwd=place).stdout.split()
    assert refused.returncode == 2
    assert "sbatch refuses job 2 of 3: got sbatch: error: " in refused.stderr
    assert refused.stderr.endswith(f"; submitted: {number}\n")
    assert cluster.call("scancel", number, cwd=place).returncode == 0
