"""Progress of a run, printed by rank 0: a live line on a terminal, at most one plain line every 10 s elsewhere.

If it cannot be written, the run goes on without it (`hpcfed.io.output`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from hpcfed.io.output import Output
from hpcfed.io.pace import QUIET_SECONDS, clock

if TYPE_CHECKING:
    from rich.progress import Progress


class Reporter:
    """Prints the progress of a run, round by round.

    Args:
        name, rounds: the run's name and number of rounds.
        speaks: whether this rank prints; True on one rank alone.
        live: whether to show a live line on a terminal. False under a launcher: some give every rank a pseudo-terminal
            and write its output to a file.
        stream: where to print; None: standard output. After a failed write nothing more is printed.
    """

    def __init__(self, name: str, rounds: int, *, speaks: bool, live: bool, stream: TextIO | None = None):
        self._stream = Output(stream or sys.stdout)
        self._name, self._rounds = name, rounds
        self._speaks = speaks
        self._spoke = time.monotonic()
        self._done, self._elapsed = 0, 0.0
        self._scores: dict[str, float] = {}
        self._live = self._bar() if speaks and live and self._stream.isatty() else None

    def __enter__(self) -> Reporter:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a round, from its row of the record."""
        if not self._speaks:
            return
        self.count(row)
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=row["round"], what=self._describe(row), speed=self._speed())
        elif row["round"] in (1, self._rounds) or now - self._spoke >= QUIET_SECONDS:
            self._spoke = now
            self._say(self.line(row))

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a round without showing it: its time, and its scores if it was evaluated."""
        self._done += 1
        self._elapsed += row["seconds"]["total"]
        self._scores |= {key: row[key] for key in ("test_loss", "test_accuracy") if row[key] is not None}

    def line(self, row: Mapping[str, Any]) -> str:
        """Return the line of the round last counted: its number, losses, speed and the time left."""
        left = (self._rounds - row["round"]) * self._elapsed / self._done
        return (
            f"{self._name}: round {row['round']}/{self._rounds}  {self._describe(row)}  "
            f"{self._speed()}  {clock(left)} left"
        )

    def say(self, text: str) -> None:
        """Print a line of text."""
        if self._speaks:
            self._say(text)

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _bar(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from hpcfed.io.console import Console

        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
        )
        self._task = progress.add_task(self._name, total=self._rounds, what="", speed="")
        return progress

    def _describe(self, row: Mapping[str, Any]) -> str:
        parts = []
        if row["server_lr"] is not None:
            parts.append(f"η_g {row['server_lr']:.3g}")
        if row["local_loss"] is not None:
            parts.append(f"local loss {row['local_loss']:.4g}")
        if "test_loss" in self._scores:
            parts.append(f"test loss {self._scores['test_loss']:.4g}")
        if "test_accuracy" in self._scores:
            parts.append(f"accuracy {100 * self._scores['test_accuracy']:.2f} %")
        return "  ".join(parts)

    def _speed(self) -> str:
        per_second = self._done / max(self._elapsed, 1e-9)
        return f"{per_second:.1f} rounds/s" if per_second >= 1 else f"{1 / per_second:.1f} s/round"
