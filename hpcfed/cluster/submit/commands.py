"""Calls of a scheduler's commands, with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError

PATIENCE = 60.0
"""Seconds for a scheduler to answer; a busy one takes several."""


def call(
    command: Sequence[str], scheduler: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command; return its exit code and output.

    Args:
        scheduler: name of the scheduler, for messages.
        env: the command's environment; None: this process's.

    Raises:
        InputError: the command is not on the PATH.
        EnvironmentFailure: the command takes longer than `PATIENCE`.
    """
    try:
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
        )
    except FileNotFoundError:
        remedy = "submit from a login node of the cluster, or look at the script with --dry-run"
        raise InputError(f"{command[0]} is not on the PATH", remedy=remedy) from None
    except subprocess.TimeoutExpired:
        remedy = "try again, or ask the site"
        raise EnvironmentFailure(f"{command[0]} does not answer", where=scheduler, remedy=remedy) from None


def last_line(text: str) -> str:
    """Return the last line of a command's output that is not a hint (``Try "…"``), or else ``no message``."""
    lines = [line for line in text.strip().splitlines() if not line.startswith('Try "')]
    return (lines or ["no message"])[-1]


Call = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Queue:
    """A scheduler's commands for submitting jobs.

    Attributes:
        call: runs a command of the scheduler.
        submit: the command that submits a script, without the script.
        hold: options of `submit` that hold the job in the queue.
        after: maps a job's number to the options of `submit` that let the new job start only if that job has failed.
        release, cancel: map a held job's number to the command that releases or cancels the job; `release` returns []
            if the user wants the job to stay held.
        number: extracts a job's number from the output of `submit`.
    """

    call: Call
    submit: Sequence[str]
    hold: Sequence[str]
    after: Callable[[str], Sequence[str]]
    release: Callable[[str], Sequence[str]]
    cancel: Callable[[str], Sequence[str]]
    number: Callable[[str], str] = str.strip


def submit_chain(
    queue: Queue,
    script: Path,
    chain: int,
    make_room: Callable[[], bool] | None,
    check: Callable[[str], None] | None = None,
) -> list[str]:
    """Submit a script as `chain` jobs, each after the previous one; return their numbers, [] if they are not needed.

    Args:
        queue: the scheduler's commands.
        script: the batch script.
        chain: number of jobs.
        make_room: moves earlier runs away, and returns whether the jobs are needed; called while the first job is held
            in the queue. None: nothing is moved, and no job is held.
        check: called with the number of each job that is not held; raises an error if that job can never run.
    """
    numbers: list[str] = []
    for job in range(chain):
        held = make_room is not None and not numbers
        after = queue.after(numbers[-1]) if numbers else []
        done = queue.call([*queue.submit, *after, *(queue.hold if held else []), str(script)])
        if done.returncode != 0:
            which = f"job {job + 1} of {chain}" if numbers else "the job"
            submitted = f"submitted: {', then '.join(numbers)}"
            remedy = submitted if numbers else "change the options, typed or of the site file"
            got, command = last_line(done.stderr), queue.submit[0]
            raise InputError(f"{command} refuses {which}", where=str(script), got=got, remedy=remedy)
        numbers.append(queue.number(done.stdout))
        if held:
            assert make_room is not None
            if not _begin(make_room, queue.call, queue.release(numbers[0]), queue.cancel(numbers[0])):
                return []
        elif check is not None:
            check(numbers[-1])
    return numbers


def _begin(make_room: Callable[[], bool], call: Call, release: Sequence[str], cancel: Sequence[str]) -> bool:
    """Call `make_room` while a job is held in the queue; then release the job if it is needed, else cancel it.

    The job is also cancelled if `make_room` raises an error.

    Args:
        make_room: moves earlier runs away; returns whether the job is needed.
        call: runs a command of the scheduler.
        release, cancel: commands for the held job; an empty `release` leaves it held.

    Returns:
        Whether the job is needed.

    Raises:
        EnvironmentFailure: the scheduler does not release or cancel the job.
    """
    try:
        needed = make_room()
    except BaseException:
        with suppress(HpcfedError):
            call(cancel)
        raise
    command = release if needed else cancel
    if command and (done := call(command)).returncode != 0:
        raise EnvironmentFailure("a held job is left", got=last_line(done.stderr), remedy=" ".join(command))
    return needed
