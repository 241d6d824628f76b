"""Run folders followed while their records grow: each look reads only the new lines."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfed.errors import InputError
from hpcfed.io.text import Malformed, lines_of, open_file
from hpcfed.lab.report.clients import Clients, read_clients
from hpcfed.lab.report.read import CLIENTS, RECIPE, SWEEP, read_json, read_recipe, run_folders, run_status
from hpcfed.run_folder.files import FEDERATION
from hpcfed.run_folder.rounds import RECORD, Columns, numbers_of, parse_rounds

RECENT_ROUNDS = 20
"""Number of last rounds whose mean time predicts the time left."""
EARLY_ENTRIES = ("logs", "checkpoints", FEDERATION)
"""Entries that a run's folder may have before its recipe."""
LARGEST_TABLE = 1 << 20
"""Bytes of the largest ``clients.csv`` that is read."""
MIN_SILENCE = 60.0
"""Seconds without a new round, beyond the usual time of a round, after which a run counts as silent."""


@dataclass
class Watch:
    """The watched folders and the runs in them; each `look` adds the runs that a sweep began after the last `look`."""

    folders: Sequence[Path]
    runs: list[WatchedRun] = field(default_factory=list)
    _begin_later: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all runs have ended and no more are to come.

        No more runs are expected of a sweep after `MIN_SILENCE` seconds without a new round in any of its runs.
        """
        return not self._begin_later and all(run.is_over for run in self.runs)

    def look(self, *, waits: bool = False) -> None:
        """Find runs and read their new lines; with `waits`, folders that do not exist or have no run yet are accepted.

        Raises:
            InputError: there is no run, or a run's file is damaged.
        """
        found = {run.folder.resolve(): run for run in self.runs}
        awaited = [folder for folder in self.folders if waits and is_awaited(folder)]
        sweeps = []
        for folder in (folder for folder in self.folders if folder not in awaited):
            inside = [found.setdefault(run.resolve(), WatchedRun(run, run.name)) for run in run_folders(folder)]
            sweeps += [inside] if len(inside) < _runs_of_sweep(folder) else []
        self.runs = list(found.values())
        for run in self.runs:
            run.look()
        self._begin_later = bool(awaited) or any(min(run.silent for run in inside) < MIN_SILENCE for inside in sweeps)
        if len({run.name for run in self.runs}) < len(self.runs):
            above = os.path.commonpath([run.folder.absolute().parent for run in self.runs])
            for run in self.runs:
                run.name = str(run.folder.absolute().relative_to(above))


def is_awaited(folder: Path) -> bool:
    """Whether a folder does not exist, or holds only entries that a run or a sweep makes before its first recipe."""
    if not folder.exists():
        return True
    if not folder.is_dir() or any((folder / name).exists() for name in (RECIPE, RECORD)):
        return False
    if (folder / SWEEP).is_file():
        return not any((folder / "runs").glob(f"**/{RECIPE}"))
    return all(child.name.startswith(".") or child.name in EARLY_ENTRIES for child in folder.iterdir())


def _runs_of_sweep(folder: Path) -> int:
    """Return the number of runs that a sweep will have; 0 for a folder without ``sweep.yaml``."""
    path = folder / SWEEP
    runs = read_recipe(path).get("runs") if path.is_file() else 0
    return runs if isinstance(runs, int) else 0


@dataclass
class WatchedRun:
    """The state of a run folder at the last `look`. Entry t − 1 of every column belongs to round t."""

    folder: Path
    name: str
    columns: Columns = field(default_factory=Columns)
    rounds: int = 0
    """Number of rounds that the recipe asks for."""
    status: str = "unfinished"
    silent: float = 0.0
    """Seconds since the record last grew."""
    clients: Clients | None = None
    """The last evaluation of clients; None without one, or if ``clients.csv`` exceeds `LARGEST_TABLE`."""
    _read: int = 0
    _file: int = 0
    _recipe: int = 0
    _table: int = 0

    @property
    def done(self) -> int:
        """Number of recorded rounds."""
        return self.columns.rounds

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, with any status."""
        return self.status != "unfinished"

    def look(self) -> None:
        """Update from the run's files; a half-written last line of the record is left for the next look.

        Raises:
            InputError: the folder is gone, or a file in it is damaged.
        """
        recipe, record = self.folder / RECIPE, self.folder / RECORD
        try:
            written = recipe.stat().st_mtime_ns
            if written != self._recipe:  # a run may be resumed with more rounds
                self.rounds, self._recipe = _rounds(read_recipe(recipe), recipe), written
            if record.exists():
                self._read_on(record)
                self.silent = max(0.0, time.time() - record.stat().st_mtime)
            self._read_clients(self.folder / CLIENTS)
        except OSError as error:
            raise InputError(error.strerror or "cannot be read", where=str(self.folder)) from error
        except Malformed as error:
            raise InputError(str(error), where=str(record), remedy="restore the run's own record") from None
        self.status = run_status(read_json(self.folder / "result.json"), self.done)

    def _read_on(self, record: Path) -> None:
        with open_file(record) as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._file or about.st_size < self._read:  # resuming has truncated the record
                self.columns, self._read, self._file = Columns(), 0, about.st_ino
            file.seek(self._read)
            whole = [line for line in lines_of(file) if line.endswith(b"\n")]
        self._read += sum(map(len, whole))
        for row in parse_rounds(whole, record, first=self.done + 1):
            self.columns.add(numbers_of(row, record))

    def _read_clients(self, table: Path) -> None:
        about = table.stat() if table.exists() else None
        if about is not None and about.st_mtime_ns != self._table and about.st_size <= LARGEST_TABLE:
            self.clients, self._table = read_clients(table), about.st_mtime_ns

    def last(self, name: str) -> float:
        """Return the last finite value of a column; nan if there is none."""
        return next((value for value in reversed(self.columns.get(name, ())) if math.isfinite(value)), math.nan)

    def recent(self, name: str) -> float:
        """Return a column's mean over the last `RECENT_ROUNDS` rounds; nan if none of them recorded it."""
        values = [value for value in self.columns.get(name, ())[-RECENT_ROUNDS:] if math.isfinite(value)]
        return sum(values) / len(values) if values else math.nan

    def seconds_left(self) -> float:
        """Return the seconds to the run's end at the pace of its last rounds; nan if these recorded no times."""
        return max(self.rounds - self.done, 0) * self.recent("seconds.total")

    def is_silent(self) -> bool:
        """Whether the run goes on, but its record has not grown for much longer than a round takes."""
        pace = self.recent("seconds.total")
        return not self.is_over and self.silent > MIN_SILENCE + (20 * pace if math.isfinite(pace) else 0)


def _rounds(recipe: Mapping[str, Any], path: Path) -> int:
    rounds = recipe.get("rounds")
    if not isinstance(rounds, int) or not 0 < rounds < 2**63:
        raise InputError("rounds", where=str(path), expected="a whole number of at least 1", got=repr(rounds)[:40])
    return rounds
