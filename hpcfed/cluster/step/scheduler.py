"""The interface between `hpcfed job-step` and the scheduler of its job, which is a file of ``schedulers/``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from hpcfed.config import registry

SCHEDULERS = "hpcfed.cluster.step.schedulers"
PATIENCE = 60.0
"""Seconds for a scheduler to answer."""


@dataclass(frozen=True)
class Step:
    """What a job runs, and what becomes of the job.

    Attributes:
        command: words that start the ranks.
        output: the folder in which runs save themselves.
        requeue: whether the job goes back into the queue.
        array: whether the job is one of an array's.
        mps: whether ranks share GPUs through NVIDIA's service; None where they are more than the GPUs.
        early: whether the scheduler's signal came before this command.
        signal_after: seconds after which to signal the ranks, of a scheduler that does not; None for one that does.
        chain: name of the jobs that wait to resume the run; None without.
        script: the job's script, of schedulers that have it submitted again.
        unchanged: path and SHA-256 of a file that must be as it was; None without.
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
    """A scheduler, seen from one of its jobs: the functions of its file."""

    CANCELS_BY_TERM: bool
    """Whether SIGTERM means that the job is cancelled, and has to reach the ranks as SIGUSR1."""

    def name_of(self, step: Step) -> str:
        """Return what tells the job from others with its output, and stays when it goes back into the queue, or ""."""
        ...

    def prepare(self, step: Step) -> Mapping[str, str]:
        """Do what has to precede the ranks, and return the variables that they need beside the job's."""
        ...

    def signal_ranks(self, step: Step, process: subprocess.Popen[bytes]) -> None:
        """Send SIGUSR1 to the ranks that a process has started."""
        ...

    def is_wanted(self, step: Step) -> bool:
        """Return whether the job may go on: it has not been cancelled, and none that would go on waits already."""
        ...

    def send_back(self, step: Step) -> bool:
        """Send the job back into the queue, and return whether the scheduler has taken it."""
        ...

    def cancel_waiting(self, name: str) -> None:
        """Cancel this user's waiting jobs of a name."""
        ...


def scheduler_of(name: str) -> JobScheduler:
    """Return the scheduler of a name."""
    return cast("JobScheduler", registry.entry(SCHEDULERS, name))


def answer(*command: str, env: Mapping[str, str] | None = None) -> str | None:
    """Return what a command of a scheduler prints; None if it fails or does not answer. Errors go to the log."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        done = subprocess.run(command, stdin=null, stdout=pipe, timeout=PATIENCE, text=True, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
