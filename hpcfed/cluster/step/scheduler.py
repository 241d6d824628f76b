"""The interface between `hpcfed job-step` and the job's scheduler; each scheduler is a module of ``schedulers/``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from hpcfed.config import registry

SCHEDULERS = "hpcfed.cluster.step.schedulers"
PATIENCE = 60.0
"""Seconds for a scheduler's command to answer."""


@dataclass(frozen=True)
class Step:
    """Settings of ``hpcfed job-step``: the command of the ranks, and how the job continues.

    Attributes:
        command: the command that starts the ranks, as words.
        output: the output folder of the run, or of all runs of the job.
        requeue: whether the job may be requeued.
        array: whether the job belongs to a job array.
        mps: whether ranks share GPUs through NVIDIA's Multi-Process Service; None decides by `mps.shares_gpus`.
        early: whether the scheduler's signal to stop arrived before ``hpcfed job-step`` started.
        signal_after: seconds until ``hpcfed job-step`` signals the ranks to stop; None: the scheduler sends the signal.
        chain: job name of the queued jobs that will resume the run; None if there are none.
        script: the job's script, which PBS and Flux need to requeue the job; None for SLURM.
        unchanged: path and SHA-256 of a file that must not have changed since the submission; None to check no file.
    """

    command: Sequence[str]
    output: Path
    requeue: bool = True
    array: bool = False
    mps: bool | None = None
    early: bool = False
    signal_after: int | None = None
    chain: str | None = None
    script: Path | None = None
    unchanged: tuple[Path, str] | None = None


class JobScheduler(Protocol):
    """Interface of a scheduler's module, as used from inside a job."""

    CANCELS_BY_TERM: bool
    """Whether SIGTERM to `hpcfed job-step` means that the job is cancelled; the ranks then get SIGUSR1."""

    def name_of(self, step: Step) -> str:
        """Return what identifies the job across requeues, besides its output folder; "" if the folder is enough."""
        ...

    def prepare(self, step: Step) -> Mapping[str, str]:
        """Prepare the job for its ranks; return the environment variables that they need in addition to the job's."""
        ...

    def signal_ranks(self, step: Step, process: subprocess.Popen[bytes]) -> None:
        """Send SIGUSR1 to the ranks; `process` is the launcher that started them."""
        ...

    def is_wanted(self, step: Step) -> bool:
        """Return whether a requeue is still wanted: the job is not cancelled, and no copy of it waits in the queue."""
        ...

    def send_back(self, step: Step) -> bool:
        """Requeue the job, or submit its script again; return whether the scheduler accepted it."""
        ...

    def cancel_waiting(self, name: str) -> None:
        """Cancel this user's waiting jobs with the job name `name`."""
        ...


def scheduler_of(name: str) -> JobScheduler:
    """Return the scheduler called `name`: ``slurm``, ``pbs`` or ``flux``."""
    return cast("JobScheduler", registry.entry(SCHEDULERS, name))


def answer(*command: str, env: Mapping[str, str] | None = None) -> str | None:
    """Return the output of a scheduler's command; None if it fails or times out. Its stderr goes to the job's log."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        done = subprocess.run(command, stdin=null, stdout=pipe, timeout=PATIENCE, text=True, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
