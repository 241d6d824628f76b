"""Signals that ask a run to stop: the first stops it at the end of the round, the second at once.

Python runs a signal's handler between two bytecode instructions, so not while a rank waits inside MPI. Every signal's
number is therefore also written to a pipe on arrival, and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hpcfed.errors import EnvironmentFailure
from hpcfed.ranks.early import take_noted
from hpcfed.ranks.threads import start
from hpcfed.ranks.world import World

ECHO = 1.0
"""Seconds in which a signal counts as a repetition of the first: launchers forward what a terminal sent to all."""
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGHUP arrives when a terminal is closed; under ``nohup`` it is ignored, and stays ignored."""


class Signals:
    """The first signal caught: its name, None before."""

    def __init__(self) -> None:
        self.name: str | None = None


_outermost: list[Signals] = []
"""The signals of the outermost `catch_signals` block: a sweep's, around those of its runs."""


@contextmanager
def catch_signals(world: World) -> Iterator[Signals]:
    """Record the first signal that asks to stop; end all ranks at the second. No effect outside the main thread.

    A nested block shares the outer block's signals, past ones included; the outermost takes over those that were noted
    before it (`hpcfed.ranks.early`).
    """
    caught = _outermost[0] if _outermost else Signals()
    if _outermost or threading.current_thread() is not threading.main_thread():
        yield caught
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        listener = start(threading.Thread(target=_listen, args=(reading, caught, world), name="signals", daemon=True))
    except EnvironmentFailure:
        os.close(reading)
        os.close(writing)
        raise
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _noted_elsewhere) for number in ASKING if number not in ignored}
    _outermost.append(caught)
    if early := bytes(take_noted()):
        os.write(writing, early[:1])
    try:
        yield caught
    finally:
        _outermost.clear()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by a library in C
        os.close(writing)
        listener.join()


def _noted_elsewhere(number: int, frame: FrameType | None) -> None:
    """Keep a signal from ending the process; its number is on its way through the pipe."""


def _listen(reading: int, caught: Signals, world: World) -> None:
    since = 0.0
    while numbers := os.read(reading, 1):
        if numbers[0] not in ASKING:
            continue
        name = signal.Signals(numbers[0]).name
        if caught.name is None:
            caught.name, since = name, time.monotonic()
        elif time.monotonic() - since > ECHO:
            world.end_at_once(
                128 + numbers[0], f"hpcfed: {name} after {caught.name}: leaving at once, rank {world.rank}"
            )
    os.close(reading)
