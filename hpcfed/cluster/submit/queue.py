"""The SLURM commands of `hpcfed submit`: list jobs, submit jobs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError

PATIENCE = 60.0
"""Seconds for SLURM to answer; a busy controller takes several."""
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of SLURM that do not describe a job."""
NOT_OURS = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")
"""Variables of sbatch that would make an array of a job, or have us wait for its end."""


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue: its number and state."""

    id: str
    state: str


def jobs_named(label: str) -> list[QueuedJob]:
    """Return this user's pending and running jobs of a name.

    Raises:
        InputError: SLURM is not installed here.
        EnvironmentFailure: SLURM does not answer.
    """
    listed = _slurm(["squeue", "--noheader", f"--user={os.getuid()}", f"--name={label}", "--format=%i %T"])
    if listed.returncode != 0:
        raise EnvironmentFailure("squeue failed", got=_last_line(listed.stderr), remedy="try again, or ask the site")
    rows = (line.split() for line in listed.stdout.splitlines() if line.strip())
    return [QueuedJob(number, state) for number, state in rows]


def submit(script: Path, chain: int, make_room: Callable[[], bool] | None = None) -> list[str]:
    """Submit a script as `chain` jobs; each waits for the one before and starts only if that did not finish its run.

    A job whose run ends for good cancels all waiting ones (see ``job.sbatch.j2``): SLURM counts a cancelled job as not
    finished, so cancelling the next job alone would start the one after it.

    Args:
        script, chain: path of the script, and number of jobs.
        make_room: moves earlier runs away and returns whether anything is left to do; called once SLURM has accepted
            the first job, which is held meanwhile.

    Returns:
        The jobs' numbers; none if nothing is left to do.

    Raises:
        InputError: SLURM refuses a job.
        EnvironmentFailure: SLURM does not answer.
    """
    numbers: list[str] = []
    options = _options(script.read_text(encoding="utf-8"))
    for _ in range(chain):
        after = [f"--dependency=afternotok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
        hold = ["--hold"] if make_room and not numbers else []
        done = _slurm(["sbatch", "--parsable", *options, *after, *hold, str(script)])
        if done.returncode != 0:
            before = f"submitted: {', then '.join(numbers)}"
            what = f"sbatch refuses job {len(numbers) + 1} of {chain}" if numbers else "sbatch refuses the job"
            remedy = before if numbers else "change the options"
            raise InputError(what, where=str(script), got=_last_line(done.stderr), remedy=remedy)
        numbers.append(done.stdout.strip().partition(";")[0])  # "number;cluster" with several clusters
        if hold and make_room and not _begins(numbers[0], make_room, release="--hold" not in options):
            return []
    return numbers


def _begins(number: str, make_room: Callable[[], bool], *, release: bool) -> bool:
    """Make room for a held job and release it, or cancel it if nothing is left to do; return whether anything is."""
    try:
        needed = make_room()
    except BaseException:
        with suppress(HpcfedError):
            _slurm(["scancel", number])
        raise
    if not needed or release:
        done = _slurm(["scontrol", "release", number] if needed else ["scancel", number])
        if done.returncode != 0:
            remedy = f"scontrol release {number}" if needed else f"scancel {number}"
            raise EnvironmentFailure("a held job is left", got=_last_line(done.stderr), remedy=remedy)
    return needed


def _options(script: str) -> list[str]:
    """Return the options that a script sets; on the command line they override variables such as SBATCH_TIMELIMIT."""
    head = takewhile(lambda line: line.startswith("#"), script.split("\n"))  # sbatch reads no further
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
    """Return the last line of what a command wrote that is more than a hint at its help."""
    lines = [line for line in text.strip().splitlines() if not line.startswith('Try "')]
    return (lines or ["no message"])[-1]
