"""Signs of life between the ranks: empty messages, from every rank to rank 0 and from rank 0 to every rank.

They go over a communicator of their own, from the watchdog's thread. `Pulse.tick` never waits for another rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from types import ModuleType
from typing import Any

ALIVE, AWAY = 1, 2
"""Tags: a sign of life; the last one for now."""


class Pulse:
    """This rank's end of the exchange.

    Args:
        mpi: ``mpi4py.MPI``.
        comm: of all ranks, used for nothing else.
        control: of all ranks, for `drain`.
    """

    def __init__(self, mpi: ModuleType, comm: Any, control: Any):
        self._mpi, self._comm, self._control = mpi, comm, control
        self._partners = range(1, comm.size) if comm.rank == 0 else range(1)
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

    def drain(self) -> None:
        """Receive what is still on its way, so that nothing is left when MPI ends; collective, after `pause`."""
        by_root = self._control.scatter([self._sent[rank] for rank in range(self._control.size)])
        to_root = self._control.gather(self._sent[0])
        for partner in self._partners:
            while self._received[partner] < (by_root if to_root is None else to_root[partner]):
                self._receive(partner, self._mpi.ANY_TAG)
        self._mpi.Request.Waitall([one for pending in self._pending.values() for one in pending])
        self._pending = {partner: [] for partner in self._partners}
        self._away.clear()

    def _exchange(self) -> None:
        for partner in self._partners:
            self._pending[partner] = [one for one in self._pending[partner] if not one.Test()]
            if not self._pending[partner]:  # else the last one has not left: there is no link
                self._send(partner, ALIVE)
        status = self._mpi.Status()
        while self._comm.Iprobe(status=status):
            self._receive(status.source, status.tag)

    def _send(self, partner: int, tag: int) -> None:
        self._pending[partner].append(self._comm.Isend(bytearray(), partner, tag))
        self._sent[partner] += 1

    def _receive(self, source: int, tag: int) -> None:
        status = self._mpi.Status()
        self._comm.Recv(bytearray(), source, tag, status)
        self._received[source] += 1
        self._silence[source] = 0.0
        (self._away.add if status.tag == AWAY else self._away.discard)(source)
