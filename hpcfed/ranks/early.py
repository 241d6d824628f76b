"""Signals while a program starts.

SIGUSR1 before a run can stop for it is noted while a program starts, and between and after its runs. SLURM's early
signal may come at any time, and its default action ends the process. A program can begin with this module, which
imports almost nothing.
"""

from __future__ import annotations

import os
import signal
import sys
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


def interrupt_imports() -> None:
    """Have SIGINT end the process at once during an import: by an exception there, libraries in C end with SIGABRT, or
    go on half loaded. Elsewhere it raises KeyboardInterrupt as always.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    where = frame
    while where is not None and "mpi4py.MPI" not in sys.modules:
        if where.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"hpcfed: interrupted\n")
            os._exit(128 + number)
        where = where.f_back
    raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
