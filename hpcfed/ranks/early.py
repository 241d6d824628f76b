"""SIGUSR1 before a run can stop for it: noted while a program starts, and between and after its runs.

SLURM's early signal may come at any time, and its default action ends the process. A program can begin with this
module, which imports almost nothing.
"""

from __future__ import annotations

import signal
from types import FrameType

_noted: list[int] = []


def note_signals() -> None:
    """Note SIGUSR1 from now on, in place of ending the process; `take_noted` returns it."""
    signal.signal(signal.SIGUSR1, _note)


def end_noting() -> None:
    """Give SIGUSR1 its default action again, which ends the process if one has been noted."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    for number in take_noted():
        signal.raise_signal(number)


def ignore_signals() -> None:
    """Ignore SIGUSR1, so that a process that ends keeps its exit code: Python ends with the default actions."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def take_noted() -> list[int]:
    """Return the numbers of the signals noted since the last call."""
    taken, _noted[:] = list(_noted), []
    return taken


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
