"""Watchdog that ends a stalled run: on each rank a thread monitors the main thread's progress and other ranks' life.

The ranks exchange signs of life (`hpcfed.ranks.pulse`), and the run ends if one stays silent: it was killed or stopped,
or its host or link is down. A rank that shows life may still be stuck: every stage of a round has a time limit. Before
the first round and after the last a rank may rightly take long, to read a large file or to import from a slow folder.

All times are sums of this thread's own, short waits, so that the time for which a process was suspended counts neither
against it nor against others.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from hpcfed.errors import EnvironmentFailure, HpcfedError, sentence
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
"""The limit until the recipe is known, and for ``auto`` until the first round has shown how long one takes."""
LEAST, OF_A_ROUND = 300.0, 10
"""Seconds of the limit ``auto`` in the rounds: at least, and as a multiple of the longest round so far."""
DRAINS_WITHIN = 5.0
"""Seconds for the other ranks to end an exchange, too, after an error, which they may not have met."""
WRITES_WITHIN = 5.0
"""Seconds for a stack to be written to a log, whose file server may be what is stuck."""
SPEAKS_AFTER = 1.0
"""Seconds by which each rank speaks later than the one before, so that the first one's line stands alone."""


class Watchdog:
    """Time limits on this rank's main thread, and on the silence of other ranks.

    Args:
        world: the ranks, all ended when a limit is exceeded.

    Attributes:
        limit: seconds that one client's training may take, and that a rank may be silent; None for no limit, ``auto``
            for `LEAST` and `OF_A_ROUND`.
    """

    def __init__(self, world: World, limit: float | Literal["auto"] | None = "auto"):
        self.limit, self._world, self._pulse = limit, world, world.pulse
        self._in_rounds, self._longest = False, 0.0
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
        limit, self.limit, began = self.limit, None, time.monotonic()
        try:
            yield
        finally:
            self.stage("between rounds")
            self.limit = limit
            self._began += time.monotonic() - began  # it is no part of a round

    @contextmanager
    def rounds(self, *, signs: bool = True) -> Iterator[None]:
        """Watch the block as rounds.

        Args:
            signs: whether this thread may call MPI, too; it may not where MPI sums a GPU's memory meanwhile.
        """
        pulse = None if signs else self._pulse
        if pulse is not None:
            pulse.pause()
        self._in_rounds, self._longest, self._began = True, 0.0, time.monotonic()
        self.stage("the first round", waits=True)
        try:
            yield
        finally:
            self._in_rounds = False
            self.stage("end")
            if pulse is not None and not self._done.is_set():
                pulse.resume()

    def round_done(self) -> None:
        """Note the end of a round, whose duration the limit ``auto`` follows."""
        now = time.monotonic()
        self._longest, self._began = max(self._longest, now - self._began), now

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        if self._pulse is None:
            yield
            return
        self._pulse.resume()
        try:
            yield
        except HpcfedError:
            self._pulse.pause()
            self._pulse.drain(DRAINS_WITHIN)
            raise
        except BaseException:
            self._pulse.pause()
            raise
        self._pulse.pause()
        self._pulse.drain()

    def _watch(self) -> None:
        before, stage, took = time.monotonic(), self._now, 0.0
        while not self._done.wait(period := self._period()):
            now = time.monotonic()
            passed, before = min(now - before, 2 * period), now
            if self._pulse is not None:
                self._pulse.tick(passed)
            if self._now is stage:
                took += passed
            else:
                stage = self._now
                took = min(passed, now - stage[1])
            if self.limit is not None:
                self._check(took, *stage)

    def _check(self, took: float, what: str, since: float, waits: bool, in_rounds: bool) -> None:
        """End the run if a stage that has taken so many seconds, or another rank's silence, is too long."""
        work, silence = self._limits()
        most = work * (WAITING if waits else 1) if in_rounds else max(work * WAITING, MIN_STAGE_LIMIT)
        if took > most and waits:
            silence /= 2  # who has not shown life for so long is missing
        if self._pulse is not None and (silent := self._pulse.silent(silence, max(work * WAITING, silence))):
            missing = f"no sign of life from {self._named([*silent])} for {min(silent.values()):.0f} s"
            self._end(what, missing, "check that host and the network; then give the same command again")
        elif took > most:
            self._end(what, f"nothing moved for {took:.0f} s", "raise 'watchdog' if it only is slow")

    def _limits(self) -> tuple[float, float]:
        """Return the seconds that a client's training may take, and that a rank may be silent."""
        if self.limit is None:
            return UNKNOWN, MIN_SILENCE  # not checked: it shows life as often as any
        if self.limit != "auto":
            return self.limit, max(self.limit, MIN_SILENCE)
        if not (self._in_rounds and self._longest):
            return UNKNOWN, UNKNOWN
        return max(LEAST, OF_A_ROUND * self._longest), LEAST

    def _period(self) -> float:
        """Return the seconds between two looks."""
        work, silence = self._limits()
        return min(work / 4 if self._in_rounds else silence / 20, silence / 20, 5.0)

    def _named(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"rank {ranks[0]} on {self._world.hosts[ranks[0]]}{more}"

    def _end(self, stage: str, what: str, remedy: str) -> None:
        """End all ranks, after the stack was written to this one's log, if it has one yet."""
        rank, files = self._world.rank, [one for one in log.handlers if isinstance(one, logging.FileHandler)]

        def write() -> None:
            log.error("%s: %s", stage, what)
            for file in files:
                if file.stream is not None:  # else it could not be opened
                    faulthandler.dump_traceback(file.stream, all_threads=True)

        if files:
            writer = start(threading.Thread(target=write, name="stack", daemon=True))
            writer.join(WRITES_WITHIN)
            if writer.is_alive():
                remedy = f"its log, {files[0].baseFilename}, cannot be written either: look at that file system"
            else:
                remedy = f"see logs/rank-{rank}.log for the stack; {remedy}"
        time.sleep(min(rank, 10) * SPEAKS_AFTER)
        said = sentence(f"{stage}, {self._named([rank])}: {what}", remedy=remedy)
        self._world.end_at_once(EnvironmentFailure.exit_code, f"hpcfed: {said}")
