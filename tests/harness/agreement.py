"""Agreement between the ranks of a test session, and its end when a rank no longer answers.

Ranks exchange outcomes on a communicator of their own, point to point, so that every rank can name those it waits for.
A watch covers each phase of each test: when it expires, every rank says where it is, and the session ends with `STUCK`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from typing import Any

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # RuntimeError: mpi4py is there, an MPI library is not
    MPI = None  # type: ignore[assignment]

STUCK = 97
"""Exit code of a session in which a rank did not come back."""
LAST_WORDS = 2.0
"""Seconds between a rank's message and the end of the job, so that every rank's message is seen."""


class Ranks:
    """The ranks that run this session together; one without a launcher or MPI."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup() if MPI else None
        self.rank: int = self.comm.rank if self.comm else 0
        self.size: int = self.comm.size if self.comm else 1
        self._missing: list[int] = []
        self._story = ""
        self._timer: threading.Timer | None = None
        self._stderr = 2

    def keep_stderr(self) -> None:
        """Remember where messages go; to be called while pytest is not capturing."""
        self._stderr = os.dup(2)

    def watch(self, what: str, seconds: float) -> None:
        """End the session if the next `watch` or `unwatch` of this rank is not reached within `seconds`."""
        self.unwatch()
        self._timer = threading.Timer(seconds, self._expire, (what, seconds))
        self._timer.daemon = True
        self._timer.start()
        # A call that keeps Python's lock keeps the timer from running too; this needs no lock, but exits with code 1.
        faulthandler.dump_traceback_later(seconds + 2 * LAST_WORDS, exit=True, file=self._stderr)

    def unwatch(self) -> None:
        """End the watch."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def exchange(self, value: Any, *, story: str = "") -> list[Any]:
        """Return every rank's value, by rank; under a watch, because another rank may never come.

        Args:
            value: what this rank has to say.
            story: what to print if another rank does not come: why this rank failed, say.
        """
        if self.comm is None or self.size == 1:
            return [value]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [self.comm.isend(value, dest=rank) for rank in others]
        values = {self.rank: value}
        self._story, self._missing = story, others
        while self._missing:
            for rank in self._missing:
                if self.comm.iprobe(source=rank):
                    values[rank] = self.comm.recv(source=rank)
            self._missing = [rank for rank in others if rank not in values]
            time.sleep(0.0005)
        MPI.Request.waitall(sent)
        return [values[rank] for rank in range(self.size)]

    def give_up(self, message: str) -> None:
        """Say why, and end the processes of all ranks with exit code `STUCK`; called from any thread."""
        text = "".join(f"rank {self.rank}: {line}\n" for line in message.splitlines())
        os.write(self._stderr, f"\n{text}".encode(errors="replace"))
        time.sleep(LAST_WORDS)
        if self.comm is not None:
            self.comm.Abort(STUCK)
        os._exit(STUCK)

    def _expire(self, what: str, seconds: float) -> None:
        if self._missing:
            message = f"{what}: ranks {self._missing} did not finish it within {seconds:g} s\n{self._story}"
        else:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            stack = "".join(traceback.format_stack(frame, limit=8))
            message = f"{what}: not finished within {seconds:g} s; this rank is here:\n{stack}"
        self.give_up(message)
