"""A line now and then on what is being read or written, where it takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcfed.io.pace import Pace

PERIOD = 2.0
"""Seconds from one line to the next, and before the first."""
_say: Callable[[str], None] | None = None
_pace = Pace()
_stage = ""


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[None]:
    """Have `step` say what is done."""
    global _say, _pace, _stage
    _say, _pace, _stage = say, Pace(PERIOD), ""
    try:
        yield
    finally:
        _say = None


def step(what: str, done: int | None = None, total: int | None = None) -> None:
    """Say `what` with how much of it is done, and the time left of a known total, if anybody listens and the last line
    is old enough."""
    global _stage
    if _say is None:
        return
    if what != _stage and total is not None:
        _stage = what
        _pace.begin(done or 0)
    if _pace.is_due():
        of = "" if total is None else f" of {total:,}"
        much = "" if done is None else f": {done:,}{of}"
        _say(f"{what}{much}{'' if done is None or total is None else _pace.left(done, total)}")
