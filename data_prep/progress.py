"""A line now and then on what is being read, where it takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PERIOD = 2.0
"""Seconds from one line to the next, and before the first."""
_say: Callable[[str], None] | None = None
_next = 0.0


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[None]:
    """Have `step` say what is being read."""
    global _say, _next
    _say, _next = say, time.monotonic() + PERIOD
    try:
        yield
    finally:
        _say = None


def step(what: str) -> None:
    """Say `what`, if anybody listens and the last line is old enough."""
    global _next
    if _say is not None and time.monotonic() >= _next:
        _say(what)
        _next = time.monotonic() + PERIOD
