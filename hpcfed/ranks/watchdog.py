"""Watchdog that ends a stalled run: on each rank a thread monitors the main thread's progress."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcfed.errors import EnvironmentFailure, sentence
from hpcfed.ranks.threads import start
from hpcfed.ranks.world import World

log = logging.getLogger("hpcfed")

WAITING = 10
"""Factor by which waiting for other ranks may take longer than work on one client: they may have many clients."""


class Watchdog:
    """Time limit on the current stage of this rank's main thread.

    Args:
        limit: seconds that one client's training, or one evaluation, may take; None for no limit.
        world: the ranks, all ended when the limit is exceeded.
    """

    def __init__(self, limit: float | None, world: World):
        self._limit, self._world = limit, world
        self._stage, self._since, self._allowed = "", time.monotonic(), float("inf")
        self._done = threading.Event()

    def stage(self, what: str, *, waits: bool = False) -> None:
        """Begin a stage; `waits`: whether it depends on other ranks."""
        if self._limit is not None:
            self._stage, self._since, self._allowed = what, time.monotonic(), self._limit * (WAITING if waits else 1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        if self._limit is None:
            yield
            return
        self._done.clear()
        thread = start(threading.Thread(target=self._watch, args=(self._limit,), name="watchdog", daemon=True))
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _watch(self, limit: float) -> None:
        while not self._done.wait(min(limit / 4, 5.0)):
            stage, took = self._stage, time.monotonic() - self._since
            if took > self._allowed:
                self._end(stage, took)

    def _end(self, stage: str, took: float) -> None:
        where = f"rank {self._world.rank} on {self._world.hosts[self._world.rank]}"
        log.error("%s: nothing moves", stage)
        for handler in log.handlers:
            if isinstance(handler, logging.FileHandler) and handler.stream is not None:
                faulthandler.dump_traceback(handler.stream, all_threads=True)
        said = sentence(
            f"{stage}, {where}: nothing moved for {took:.0f} s",
            remedy=f"see logs/rank-{self._world.rank}.log for the stack; raise 'watchdog' if it only is slow",
        )
        self._world.end_at_once(EnvironmentFailure.exit_code, f"hpcfed: {said}")
