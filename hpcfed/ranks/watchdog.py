"""Watchdog that ends a stalled run: on each rank a thread monitors the main thread's progress and other ranks' life.

In the rounds every stage has a time limit. Before the first and after the last a rank may rightly take long, to read a
large file or to import from a slow folder; there the ranks exchange signs of life (`hpcfed.ranks.pulse`), and the run
ends if one stays silent. In the rounds only the main thread calls MPI, which may be summing a GPU's memory.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpcfed.errors import EnvironmentFailure, sentence
from hpcfed.ranks.threads import start
from hpcfed.ranks.world import World

log = logging.getLogger("hpcfed")

WAITING = 10
"""Factor by which waiting for other ranks may take longer than work on one client: they may have many clients."""
MIN_STAGE_LIMIT = 3600.0
"""Seconds that a stage outside of the rounds may take at least, however short the limit is."""
MIN_SILENCE = 10.0
"""Seconds that a rank may be silent at least: a library that is being loaded stops all threads of Python."""
UNKNOWN = 1800.0
"""The limit until the recipe is known: its default."""
SPEAKS_AFTER = 1.0
"""Seconds by which each rank speaks later than the one before, so that the first one's line stands alone."""


class Watchdog:
    """Time limits on this rank's main thread, and on the silence of other ranks outside of the rounds.

    Args:
        world: the ranks, all ended when a limit is exceeded.

    Attributes:
        limit: seconds that one client's training may take, and that a rank may be silent; None for no limit.
    """

    def __init__(self, world: World, limit: float | None = UNKNOWN):
        self.limit, self._world, self._pulse = limit, world, world.pulse
        self._in_rounds = False
        self._done = threading.Event()
        self._done.set()
        self.stage("start")

    def stage(self, what: str, *, waits: bool = False) -> None:
        """Begin a stage; `waits`: whether it depends on other ranks."""
        self._now = what, time.monotonic(), waits, self._in_rounds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs, on all ranks; a block inside of it is watched already."""
        if not self._done.is_set():
            yield
            return
        self.stage("start")
        self._done.clear()
        with self._exchanging():
            thread = start(threading.Thread(target=self._watch, name="watchdog", daemon=True))
            try:
                yield
            finally:
                self._done.set()
                thread.join()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Watch nothing while the block runs, as long as it may take: the user's own code between rounds."""
        limit, self.limit = self.limit, None
        try:
            yield
        finally:
            self.stage("between rounds")
            self.limit = limit

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """Watch the block as rounds: by the limits of stages alone."""
        if self._pulse is not None:
            self._pulse.pause()
        self._in_rounds = True
        self.stage("the first round", waits=True)
        try:
            yield
        finally:
            self._in_rounds = False
            self.stage("end")
            if self._pulse is not None and not self._done.is_set():
                self._pulse.resume()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        if self._pulse is None:
            yield
            return
        self._pulse.resume()
        try:
            yield
        finally:
            self._pulse.pause()
        self._pulse.drain()  # not after an error, which other ranks may not have met

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._done.wait(period := self._period()):
            now = time.monotonic()
            if self._pulse is not None:
                self._pulse.tick(min(now - before, 2 * period))  # a suspended process received no heartbeats
            before = now
            if self.limit is not None:
                self._check(self.limit)

    def _check(self, limit: float) -> None:
        stage, since, waits, in_rounds = self._now
        took = time.monotonic() - since
        if took > (limit * (WAITING if waits else 1) if in_rounds else max(limit * WAITING, MIN_STAGE_LIMIT)):
            self._end(stage, f"nothing moved for {took:.0f} s", "raise 'watchdog' if it only is slow")
        patience = max(limit, MIN_SILENCE)
        if self._pulse is not None and (silent := self._pulse.silent(patience, max(limit * WAITING, patience))):
            what = f"no sign of life from {self._named([*silent])} for {min(silent.values()):.0f} s"
            self._end(stage, what, "check that host and the network; then give the same command again")

    def _period(self) -> float:
        """Return the seconds between two looks."""
        limit = UNKNOWN if self.limit is None else self.limit
        return min(limit / 4 if self._in_rounds else max(limit, MIN_SILENCE) / 20, 5.0)

    def _named(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"rank {ranks[0]} on {self._world.hosts[ranks[0]]}{more}"

    def _end(self, stage: str, what: str, remedy: str) -> None:
        """End all ranks, after the stack was written to this one's log, if it has one yet."""
        rank, files = self._world.rank, [one for one in log.handlers if isinstance(one, logging.FileHandler)]
        if files:
            log.error("%s: %s", stage, what)
            remedy = f"see logs/rank-{rank}.log for the stack; {remedy}"
        for file in files:
            if file.stream is not None:  # else it could not be opened
                faulthandler.dump_traceback(file.stream, all_threads=True)
        time.sleep(min(rank, 10) * SPEAKS_AFTER)
        said = sentence(f"{stage}, {self._named([rank])}: {what}", remedy=remedy)
        self._world.end_at_once(EnvironmentFailure.exit_code, f"hpcfed: {said}")
