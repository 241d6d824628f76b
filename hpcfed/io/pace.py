"""Lines on long work: when the next one is due, and the time left."""

from __future__ import annotations

import time

QUIET_SECONDS = 10.0
"""Seconds from one line to the next, and before the first."""


class Pace:
    """The speed of work that goes on.

    Args:
        period: seconds between two lines.
    """

    def __init__(self, period: float = QUIET_SECONDS):
        self.period = period
        self.begin()
        self._spoke = self._began

    def begin(self, done: int = 0) -> None:
        """Begin with other work, some of which is done already."""
        self._began, self._first = time.monotonic(), done

    def is_due(self) -> bool:
        """Whether it is time for a line, which is then printed."""
        now = time.monotonic()
        if now - self._spoke < self.period:
            return False
        self._spoke = now
        return True

    def left(self, done: int, total: int) -> str:
        """Return the time left as a clause, ``, 1:30 left``; "" before anything is done."""
        if done <= self._first:
            return ""
        return f", {clock((time.monotonic() - self._began) / (done - self._first) * (total - done))} left"


def nobody(line: str) -> None:
    """Show no line."""


def clock(seconds: float) -> str:
    """Return a time as ``m:ss``, or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
