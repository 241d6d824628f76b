"""The round loop's clock: times each round, and decides whether this rank requests to stop or to save a checkpoint."""

from __future__ import annotations

import time

from hpcfed.config.limits import Stop
from hpcfed.errors import Stopped
from hpcfed.ranks.signals import Signals
from hpcfed.ranks.world import World
from hpcfed.run_folder.checkpoint.keeper import Checkpoints
from hpcfed.run_folder.stopping import Due, TimeLeft
from hpcfed.types import Request

ENDING_REQUESTS = Request.STOP | Request.TIME_IS_UP
"""Requests that end a run after the current round."""


class Clock:
    """Times a run's rounds, the first one from the construction on.

    Args:
        rule: the recipe's ``stop``.
        caught: signals that ask this rank to stop.
        checkpoints: says whether a checkpoint is due, and how long it takes to write one.
        world: all ranks of the run; rank 0's clock decides whether time is up.
    """

    def __init__(self, rule: Stop, caught: Signals, checkpoints: Checkpoints, world: World):
        self._time_left, self._caught = TimeLeft(rule), caught
        self._checkpoints, self._is_root = checkpoints, world.is_root
        self._began = self._trained = time.perf_counter()
        self._cpu = time.process_time()
        self._due: Due = (False, False, False)

    def requests(self, due: tuple[Due, Due]) -> Request:
        """Return this rank's requests for the round that begins; `due`: evaluations after it and after the next one."""
        self._due = due[0]
        requests = self._checkpoints.requests()
        if self._caught.name:
            requests |= Request.STOP
        if self._is_root and self._time_left.is_up(self._checkpoints.seconds, due):
            requests |= Request.TIME_IS_UP
        return requests

    def trained(self) -> None:
        """Note the end of a round's training: its evaluation begins."""
        self._trained = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Return the seconds of the round that ends here, by phase; time after this call counts for the next round."""
        began, cpu, self._began, self._cpu = self._began, self._cpu, time.perf_counter(), time.process_time()
        evaluated, total = self._began - self._trained, self._began - began
        self._time_left.add(total - evaluated, evaluated, self._due)
        return {"evaluate": evaluated, "total": total, "cpu": self._cpu - cpu}

    def stopped(self, name: str, round: int, requests: Request) -> Stopped:
        """Return the error to raise if `requests` end a run after a round; its message has the reason."""
        signal = self._caught.name or "a signal to another rank"
        why = f"{self._time_left.reason()} is near" if Request.TIME_IS_UP in requests else signal
        return Stopped(f"{name} stopped after round {round}: {why}", remedy="the same command goes on from there")
