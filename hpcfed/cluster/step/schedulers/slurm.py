"""SLURM, used from inside a job."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping

from hpcfed.cluster.step.scheduler import Step, answer

CANCELS_BY_TERM = False
"""SLURM sends SIGTERM to the ranks itself."""
PAUSE = 20
"""Seconds between a requeue and the next start: for ten seconds the nodes may not have released the job."""
TRIES = 5
"""Attempts, half a second apart, to set the start time before SLURM kills this process."""


def name_of(step: Step) -> str:
    """Return the job's number, or ``<array's number>_<task's number>`` for a job of an array.

    `step.array` decides, since a job that is submitted from an array's job inherits its SLURM_ARRAY_* variables.
    """
    if step.array:
        return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID", "")


def prepare(step: Step) -> Mapping[str, str]:
    """Return SLURM_JOB_END_TIME, and variables with which srun passes on the environment and the cores per rank.

    By default, srun passes no environment on if the job has ``--export=NONE``, and since SLURM 22.05 it ignores the
    ``--cpus-per-task`` of the job. SLURM 22.05 does not set the end time. Cores and end time are left out if unknown.

    After a requeue, one empty step is run for each earlier start, so that the ranks' step gets a new number: MPICH
    names its shared memory after the step, and killed ranks have left shared memory on the node.
    """
    if step.command[0] == "srun":
        for _ in range(int(os.environ.get("SLURM_RESTART_COUNT") or 0)):
            answer("srun", "--nodes=1", "--ntasks=1", "--mpi=none", "true")
    found = {"SLURM_EXPORT_ENV": "ALL"}
    if cores := os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("OMP_NUM_THREADS"):
        found["SRUN_CPUS_PER_TASK"] = cores
    in_seconds = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    ends = answer("squeue", "--noheader", f"--jobs={name_of(step)}", "--format=%e", env=in_seconds)
    return found | ({"SLURM_JOB_END_TIME": ends} if ends and ends.isdecimal() else {})


def signal_ranks(step: Step, process: subprocess.Popen[bytes]) -> None:
    """Send SIGUSR1 to the launcher, which passes it on to the ranks."""
    process.send_signal(signal.SIGUSR1)


def is_wanted(step: Step) -> bool:
    """Return whether the job's state is RUNNING; a cancelled job's state is COMPLETING."""
    return " JobState=RUNNING " in f"{answer('scontrol', 'show', '--oneliner', 'job', name_of(step))} "


def send_back(step: Step) -> bool:
    """Requeue the job to start in 20 s (SLURM's default is two minutes); return whether SLURM accepted it.

    SLURM then ends all processes of the job, scontrol among them. So a failed scontrol counts as accepted if the job is
    no longer running.
    """
    requeued = answer("scontrol", "requeue", name_of(step))
    if requeued is None and is_wanted(step):
        return False
    for _ in range(TRIES):
        if answer("scontrol", "update", f"JobId={name_of(step)}", f"StartTime=now+{PAUSE}") is not None:
            break
        time.sleep(0.5)
    return True


def cancel_waiting(name: str) -> None:
    """Cancel all waiting jobs with the job name `name` in one command.

    If only one were cancelled, the next one of the chain would start: SLURM counts a cancelled job as failed.
    """
    answer("scancel", "--state=PENDING", f"--name={name}", f"--user={os.getuid()}")
