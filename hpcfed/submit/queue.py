"""What `hpcfed submit` asks of SLURM: which jobs there are, and to take new ones."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfed.errors import EnvironmentFailure, InputError

PATIENCE = 60.0
"""Seconds SLURM has to answer; a busy controller takes several."""


@dataclass(frozen=True)
class Queued:
    """A job in the queue: its number and state."""

    id: str
    state: str


def jobs_named(label: str) -> list[Queued]:
    """Return this user's jobs of a name that wait or run.

    Raises:
        InputError: there is no SLURM here.
        EnvironmentFailure: SLURM does not answer.
    """
    listed = _slurm(["squeue", "--noheader", f"--user={getpass.getuser()}", f"--name={label}", "--format=%i %T"])
    if listed.returncode != 0:
        raise EnvironmentFailure("squeue failed", got=_last_line(listed.stderr), remedy="try again, or ask the site")
    rows = (line.split() for line in listed.stdout.splitlines() if line.strip())
    return [Queued(number, state) for number, state in rows]


def submit(script: Path, chain: int) -> list[str]:
    """Submit a script as `chain` jobs, each of which waits for the one before and runs only if that did not finish.

    A job whose run ends for good cancels those that wait (see ``job.sbatch.j2``): for SLURM one that was cancelled did
    not finish either, and the next but one would start.

    Returns:
        The jobs' numbers.

    Raises:
        InputError: SLURM refuses the job.
        EnvironmentFailure: SLURM does not answer.
    """
    numbers: list[str] = []
    for _ in range(chain):
        after = [f"--dependency=afternotok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
        done = _slurm(["sbatch", "--parsable", *after, str(script)])
        if done.returncode != 0:
            raise InputError(
                "sbatch refuses the job", where=str(script), got=_last_line(done.stderr), remedy="change the options"
            )
        numbers.append(done.stdout.strip().partition(";")[0])  # "number;cluster" where there are several
    return numbers


def _slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise InputError(
            f"{command[0]} is not on the PATH",
            remedy="submit from a login node of the cluster, or look at the script with --dry-run",
        ) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure(
            f"{command[0]} does not answer", where="SLURM", remedy="try again, or ask the site"
        ) from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
