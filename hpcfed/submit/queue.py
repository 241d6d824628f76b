"""The SLURM commands of `hpcfed submit`: list jobs, submit jobs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hpcfed.errors import EnvironmentFailure, InputError

PATIENCE = 60.0
"""Seconds for SLURM to answer; a busy controller takes several."""
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of SLURM that do not describe a job."""
NOT_OURS = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")
"""Variables of sbatch that would make an array of a job, or have us wait for its end."""


@dataclass(frozen=True)
class Queued:
    """A job in the queue: its number and state."""

    id: str
    state: str


def jobs_named(label: str) -> list[Queued]:
    """Return this user's pending and running jobs of a name.

    Raises:
        InputError: SLURM is not installed here.
        EnvironmentFailure: SLURM does not answer.
    """
    listed = _slurm(["squeue", "--noheader", f"--user={os.getuid()}", f"--name={label}", "--format=%i %T"])
    if listed.returncode != 0:
        raise EnvironmentFailure("squeue failed", got=_last_line(listed.stderr), remedy="try again, or ask the site")
    rows = (line.split() for line in listed.stdout.splitlines() if line.strip())
    return [Queued(number, state) for number, state in rows]


def submit(script: Path, chain: int) -> list[str]:
    """Submit a script as `chain` jobs; each waits for the one before and starts only if that did not finish its run.

    A job whose run ends for good cancels all waiting ones (see ``job.sbatch.j2``): SLURM counts a cancelled job as not
    finished, so cancelling the next job alone would start the one after it.

    Returns:
        The jobs' numbers.

    Raises:
        InputError: SLURM refuses the job.
        EnvironmentFailure: SLURM does not answer.
    """
    numbers: list[str] = []
    options = _options(script.read_text(encoding="utf-8"))
    for _ in range(chain):
        after = [f"--dependency=afternotok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
        done = _slurm(["sbatch", "--parsable", *options, *after, str(script)])
        if done.returncode != 0:
            raise InputError(
                "sbatch refuses the job", where=str(script), got=_last_line(done.stderr), remedy="change the options"
            )
        numbers.append(done.stdout.strip().partition(";")[0])  # "number;cluster" with several clusters
    return numbers


def _options(script: str) -> list[str]:
    """Return the options that a script sets; on the command line they override variables such as SBATCH_TIMELIMIT."""
    head = takewhile(lambda line: line.startswith("#"), script.splitlines())  # sbatch reads no further
    lines = (line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH "))
    return [word for line in lines for word in shlex.split(line)]


def _slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except FileNotFoundError:
        raise InputError(
            f"{command[0]} is not on the PATH",
            remedy="submit from a login node of the cluster, or look at the script with --dry-run",
        ) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure(
            f"{command[0]} does not answer", where="SLURM", remedy="try again, or ask the site"
        ) from None


def _environment() -> dict[str, str]:
    """Return the environment for sbatch to read and pass on, without the variables of the job around this process."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    if "SLURM_JOB_ID" not in variables:
        return variables
    return {key: value for key, value in variables.items() if key in OF_THE_CLUSTER or not key.startswith("SLURM_")}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
