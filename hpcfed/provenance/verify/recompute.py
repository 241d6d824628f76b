"""Rounds of a recorded run, computed again in a folder of their own, and compared one by one while they run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.config.limits import Checkpoint, Stop
from hpcfed.config.recipe import Recipe
from hpcfed.errors import HpcfedError
from hpcfed.loop import train
from hpcfed.ranks.world import World
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.progress import QUIET_SECONDS, Reporter

Judge = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[object]]
"""From a recorded row and the one computed here to what is wrong with it."""


@dataclass(frozen=True)
class Segment:
    """Rounds ``start + 1 … stop``, computed from the state after round `start`: a checkpoint's, or w⁰."""

    start: int
    stop: int


class _Enough(HpcfedError):
    """The last round of a segment has been compared."""


class _Parted(HpcfedError):
    """A round is not as recorded."""


class Comparing(Reporter):
    """Compares each round with its row of the record, the same on every rank, and ends the session where they part.

    Args:
        rows: the record.
        stop: round after which to end the session; None: it ends by itself.
        judge: what is wrong with a round.
        say: prints a line on rank 0.

    Attributes:
        compared: rounds that were compared.
        faults: what was wrong with the last of them.
        remarks: what the session said.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], stop: int | None, judge: Judge, say: Callable[[str], None]):
        super().__init__("", len(rows), speaks=False, live=False)
        self._rows, self._stop, self._judge, self._print = rows, stop, judge, say
        self._told = time.monotonic()
        self.compared: list[int] = []
        self.faults: Sequence[object] = ()
        self.remarks: list[str] = []

    def update(self, row: Mapping[str, Any]) -> None:
        """Compare a round.

        Raises:
            _Enough, _Parted: the session ends here.
        """
        round = row["round"]
        self.compared.append(round)
        self.faults = self._judge(self._rows[round - 1], row)
        if self.faults:
            raise _Parted(f"round {round} is not as recorded")
        if round == self._stop:
            raise _Enough(f"round {round} is as recorded")
        if time.monotonic() - self._told >= QUIET_SECONDS:
            self._told = time.monotonic()
            self._print(f"round {round} of {len(self._rows)} is as recorded")

    def say(self, text: str) -> None:
        """Keep what the session says."""
        self.remarks.append(text)


@contextmanager
def scratch_folder(world: World) -> Iterator[Path]:
    """Yield an empty folder that all ranks can see, removed at the end: under $TMPDIR on one host, else here."""
    place = None if len(set(world.hosts)) == 1 else Path.cwd()
    folder = world.on_root(lambda: Path(tempfile.mkdtemp(prefix=".hpcfed-verify-", dir=place)))
    try:
        yield folder
    finally:
        if world.is_root:
            shutil.rmtree(folder, ignore_errors=True)


def for_verification(recipe: Recipe, output: Path) -> Recipe:
    """Return a recipe that computes the same rounds elsewhere: no checkpoints, observers or early end.

    A run that went on with another ``stop`` has rounds that its present one would not have reached.
    """
    changed = {"output": output, "checkpoint": Checkpoint(every=0), "observers": [], "stop": Stop()}
    return recipe.model_copy(update={**changed, "verify_data": False})


def compute(recipe: Recipe, folder: Path, reporter: Comparing, world: World, last: int) -> bool:
    """Train the recipe in a prepared folder up to round `last` while `reporter` compares; return whether the rounds are
    as recorded.

    Raises:
        Diverged, InputError, EnvironmentFailure: as training does.
    """
    try:
        train(recipe, RunFolder(folder, lasting=False), reporter, world, last=last)
    except _Parted:
        return False
    except _Enough:
        pass
    return True
