"""Commands of a scheduler, called with a deadline."""

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
    """Run a command and return how it ended.

    Raises:
        InputError: it is not installed here.
        EnvironmentFailure: the scheduler does not answer.
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
    """Return the last line of a command's output, hints at its help left out."""
    lines = [line for line in text.strip().splitlines() if not line.startswith('Try "')]
    return (lines or ["no message"])[-1]


Call = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def begin(make_room: Callable[[], bool], call: Call, release: Sequence[str], cancel: Sequence[str]) -> bool:
    """Make room for a held job, then release it; if nothing is left to do, cancel it and return False.

    Args:
        make_room: as of `Scheduler.submit`.
        call: runs a command of the scheduler.
        release, cancel: the commands; an empty one leaves the job held.

    Raises:
        EnvironmentFailure: the scheduler refuses.
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
