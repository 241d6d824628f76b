"""Run folders whose records grow: each look reads only what is new."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfed.errors import InputError
from hpcfed.report.read import RECIPE, RECORD, parse_row, read_json, read_recipe, run_status

RECENT = 20
"""Rounds whose mean time says how long the others will take."""
SILENCE = 60.0
"""Seconds without a round, beyond what rounds take, after which a run is told to be silent."""


def find_runs(folders: Sequence[Path]) -> list[Followed]:
    """Return the runs in the folders given; one that holds run folders stands for them.

    Raises:
        InputError: there is no run.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        try:
            inside = [folder] if (folder / RECIPE).is_file() else sorted(folder.iterdir())
        except OSError as error:
            raise InputError(
                error.strerror or "cannot be read", where=str(folder), remedy="name a run's output"
            ) from None
        runs = [run for run in inside if (run / RECIPE).is_file()]
        if not runs:
            what = f"{RECIPE} in it, or run folders"
            raise InputError("not a run folder", where=str(folder), expected=what, remedy="name a run's output")
        for run in runs:
            found.setdefault(run.resolve(), run)
    common = len({run.name for run in found.values()}) == len(found)
    return [Followed(run, run.name if common else str(run)) for run in found.values()]


@dataclass
class Followed:
    """A run folder as of the last `look`. T rounds are recorded; round t is entry t − 1 of every column."""

    folder: Path
    name: str
    columns: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0
    """How many there are to be, by the recipe."""
    status: str = "unfinished"
    silent: float = 0.0
    """Seconds since the record grew, where the run is not over."""
    _read: int = 0
    _recipe: int = 0

    @property
    def done(self) -> int:
        """How many rounds are recorded."""
        return len(self.columns.get("gradients", ()))

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self.status != "unfinished"

    def look(self) -> None:
        """Read what is new. A last line that is only half written is left for the next look.

        Raises:
            InputError: the folder is gone, or a file of it is damaged.
        """
        recipe, record = self.folder / RECIPE, self.folder / RECORD
        try:
            written = recipe.stat().st_mtime_ns
            if written != self._recipe:  # a run may go on with more rounds
                self.rounds, self._recipe = _rounds(read_recipe(recipe), recipe), written
            if record.exists():
                self._read_on(record)
                self.silent = max(0.0, time.time() - record.stat().st_mtime)
        except OSError as error:
            raise InputError(error.strerror or "cannot be read", where=str(self.folder)) from error
        self.status = run_status(read_json(self.folder / "result.json"), self.done) if self.done else "unfinished"

    def _read_on(self, record: Path) -> None:
        with record.open("rb") as file:
            if file.seek(0, 2) < self._read:  # a run that goes on from a checkpoint has cut its record
                self.columns, self._read = {}, 0
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            row = parse_row(line.decode("utf-8", errors="replace"), record, self.done + 1)
            for name, value in row.items():
                self.columns.setdefault(name, []).append(value)

    def last(self, name: str) -> float:
        """Return the last value that a column recorded, nan where there is none."""
        return next((value for value in reversed(self.columns.get(name, ())) if math.isfinite(value)), math.nan)

    def recent(self, name: str) -> float:
        """Return a column's mean over the last rounds, nan where nothing was recorded in them."""
        values = [value for value in self.columns.get(name, ())[-RECENT:] if math.isfinite(value)]
        return sum(values) / len(values) if values else math.nan

    def seconds_left(self) -> float:
        """Return how long the rounds that are left will take at the pace of the last ones; nan before there are any."""
        return max(self.rounds - self.done, 0) * self.recent("seconds.total")

    def is_silent(self) -> bool:
        """Whether it has been longer than rounds take since the record grew."""
        pace = self.recent("seconds.total")
        return not self.is_over and self.silent > SILENCE + (20 * pace if math.isfinite(pace) else 0)


def _rounds(recipe: Mapping[str, Any], path: Path) -> int:
    rounds = recipe.get("rounds")
    if not isinstance(rounds, int):
        raise InputError("rounds", where=str(path), expected="a whole number", got=repr(rounds))
    return rounds
