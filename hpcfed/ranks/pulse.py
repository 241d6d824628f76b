"""Signs of life between the ranks: empty messages between neighbours in a tree of all ranks.

Rank r exchanges them with rank (r − 1) // 2 and with ranks 2r + 1 and 2r + 2, so that no rank has more than three
partners, however many ranks there are. They go over a communicator of their own, from the watchdog's thread.
`Pulse.tick` never waits for another rank.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from contextlib import suppress
from types import ModuleType
from typing import Any

ALIVE, AWAY, COUNT = 1, 2, 3
"""Tags: a sign of life; the last one for now; the number of those sent."""
POLL = 0.001
"""Seconds between two looks at what has arrived."""


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks with which a rank exchanges signs of life."""
    above = [(rank - 1) // 2] if rank else []
    return above + [below for below in (2 * rank + 1, 2 * rank + 2) if below < size]


class Pulse:
    """This rank's end of the exchange.

    Args:
        mpi: ``mpi4py.MPI``.
        comm: of all ranks, used for nothing else.
        control: of all ranks, for `drain`.
    """

    def __init__(self, mpi: ModuleType, comm: Any, control: Any):
        self._mpi, self._comm, self._control = mpi, comm, control
        self._partners = neighbours(comm.rank, comm.size)
        self._silence = dict.fromkeys(self._partners, 0.0)
        self._away: set[int] = set()
        self._pending: dict[int, list[Any]] = {partner: [] for partner in self._partners}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._open, self._lock = False, threading.Lock()

    def resume(self) -> None:
        """Begin to exchange signs of life, at silences of 0."""
        with self._lock:
            self._silence, self._open = dict.fromkeys(self._partners, 0.0), True
        self.tick(0.0)

    def pause(self) -> None:
        """Tell the others that no sign of life follows until `resume`; no MPI call does, from another thread."""
        with self._lock:
            self._open = False
            with suppress(self._mpi.Exception):
                for partner in self._partners:
                    self._send(partner, AWAY)

    def tick(self, seconds: float) -> None:
        """Send and receive signs of life, `seconds` after the last time; does nothing while paused."""
        with self._lock:
            if not self._open:
                return
            for partner in self._partners:
                self._silence[partner] += seconds
            with suppress(self._mpi.Exception):  # of a rank that is lost, which stays silent
                self._exchange()

    def silent(self, limit: float, away: float) -> dict[int, float]:
        """Return the silence of each overdue rank in seconds, by own ticks; `away` is the limit of ranks that pause."""
        with self._lock:
            limits = {partner: away if partner in self._away else limit for partner in self._partners if self._open}
            return {partner: self._silence[partner] for partner in limits if self._silence[partner] > limits[partner]}

    def drain(self, seconds: float = math.inf) -> None:
        """Receive what is still on its way, so that nothing is left when MPI ends; on all ranks, after `pause`.

        Args:
            seconds: after which a partner that does not do so, too, is left.
        """
        deadline, left = time.monotonic() + seconds, set(self._partners)
        counts = {partner: bytearray(8) for partner in self._partners}
        sends = [
            self._control.Isend(self._sent[partner].to_bytes(8, "little"), partner, COUNT) for partner in self._partners
        ]
        arriving = {partner: self._control.Irecv(counts[partner], partner, COUNT) for partner in self._partners}
        known: set[int] = set()
        while left and time.monotonic() < deadline:
            known |= {partner for partner in left - known if arriving[partner].Test()}
            self._receive_all()
            # More, where a partner is done here and shows life in the next run.
            left -= {one for one in known if self._received[one] >= int.from_bytes(counts[one], "little")}
            if left:
                time.sleep(POLL)
        for partner in left - known:
            arriving[partner].Cancel()
        if not left:
            self._mpi.Request.Waitall([*sends, *(one for pending in self._pending.values() for one in pending)])
        self._pending = {partner: [] for partner in self._partners}
        self._away.clear()

    def _exchange(self) -> None:
        for partner in self._partners:
            self._pending[partner] = [one for one in self._pending[partner] if not one.Test()]
            if not self._pending[partner]:  # else the last one has not left: there is no link
                self._send(partner, ALIVE)
        self._receive_all()

    def _send(self, partner: int, tag: int) -> None:
        self._pending[partner].append(self._comm.Isend(bytearray(), partner, tag))
        self._sent[partner] += 1

    def _receive_all(self) -> None:
        status = self._mpi.Status()
        while self._comm.Iprobe(status=status):
            self._receive(status.source, status.tag)

    def _receive(self, source: int, tag: int) -> None:
        status = self._mpi.Status()
        self._comm.Recv(bytearray(), source, tag, status)
        self._received[source] += 1
        self._silence[source] = 0.0
        (self._away.add if status.tag == AWAY else self._away.discard)(source)
