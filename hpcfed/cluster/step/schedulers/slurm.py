"""SLURM, from within a job."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping

from hpcfed.cluster.step.scheduler import Step, answer

CANCELS_BY_TERM = False
"""SLURM sends it to the ranks as well."""
PAUSE = 20
"""Seconds in the queue after a requeue, at least: within ten the nodes may not be rid of the job."""
TRIES = 5
"""Half seconds to say so, before SLURM kills what is left."""


def name_of(step: Step) -> str:
    """Return the job's number, with the task's of an array.

    Only the script knows whether it is an array's: a job inherits the variables of an array's task that submits it.
    """
    if step.array:
        return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID", "")


def prepare(step: Step) -> Mapping[str, str]:
    """Return what srun does not pass on by itself, and the job's end, which SLURM 22.05 does not set.

    With ``--export=NONE`` srun would pass nothing on; since 22.05 it does not know the job's ``--cpus-per-task``. After
    a requeue the numbers of the job's earlier steps are used up first: MPICH names its shared memory after the step,
    and killed ranks have left theirs on the node.
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
    """Signal the launcher, which passes it on."""
    process.send_signal(signal.SIGUSR1)


def is_wanted(step: Step) -> bool:
    """Return whether the job runs: one that has been cancelled is completing."""
    return " JobState=RUNNING " in f"{answer('scontrol', 'show', '--oneliner', 'job', name_of(step))} "


def send_back(step: Step) -> bool:
    """Requeue the job, to start after 20 s, since SLURM's own delay is two minutes.

    SLURM ends all processes of a job that is requeued, by SIGTERM first: scontrol may be one of them.
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
    """Cancel all at once: SLURM takes a cancelled job for one that failed, after which the next one starts."""
    answer("scancel", "--state=PENDING", f"--name={name}", f"--user={os.getuid()}")
