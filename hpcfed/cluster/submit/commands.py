"""Calls of a scheduler's commands, with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError

PATIENCE = 60.0
"""Seconds for a scheduler to answer; a busy one takes several."""


def call(
    command: Sequence[str], scheduler: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command; return its exit code and output.

    Args:
        scheduler: its name, for messages.
        env: the command's environment; None for that of this process.

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
    """Return the last line of a command's output that is not a hint at its help; ``no message`` if there is none."""
    lines = [line for line in text.strip().splitlines() if not line.startswith('Try "')]
    return (lines or ["no message"])[-1]


Call = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def begin(make_room: Callable[[], bool], call: Call, release: Sequence[str], cancel: Sequence[str]) -> bool:
    """Call `make_room` while a job is held, then release the job if it is needed, else cancel it.

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
