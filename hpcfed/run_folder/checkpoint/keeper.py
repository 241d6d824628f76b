"""The checkpoints of a run for the round loop: when one is due, its start, its validity, and the restart from one."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal

from hpcfed.config.limits import seconds_of, stretch_of
from hpcfed.config.recipe import Recipe
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.parts import Parts
from hpcfed.run_folder.checkpoint.layout import PAGE, layout_of_states
from hpcfed.run_folder.checkpoint.restore import CheckpointReader
from hpcfed.run_folder.checkpoint.writer import CheckpointWriter, Retention, Snapshot, remove_remains
from hpcfed.run_folder.code import FRESH
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.identity import identities, identity
from hpcfed.simulation import Simulation
from hpcfed.types import Request


class Checkpoints:
    """The checkpoints of one run.

    Args:
        recipe: its ``checkpoint``, and the keys that decide the result.
        folder: the run folder.
        parts, simulation: the state that is saved.

    Attributes:
        done: rounds restored from a checkpoint.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, parts: Parts, simulation: Simulation):
        self._recipe, self._parts, self._simulation, self._run = recipe, parts, simulation, folder
        self.done = 0
        session = parts.world.on_root(lambda: uuid.uuid4().hex[:8])  # unique in this folder
        self._folder = folder.path / "checkpoints"
        self._world = parts.world
        self._layout = layout_of_states(parts, simulation.w)
        self._states = recipe.checkpoint.num_states(recipe.rounds, self.bytes_at_most())
        self._writer = CheckpointWriter(
            self._folder,
            identity(recipe),
            Retention(recipe.checkpoint, self._states, recipe.rounds),
            self._layout,
            parts.clients,
            lambda: parts.method.local.begin(parts.initial_w),
            session,
            parts.world,
        )
        self._period = seconds_of(recipe.checkpoint.every)
        self._last = time.monotonic()
        self._saved_round = 0
        self._is_due = False

    @property
    def written(self) -> int:
        """Round of the last checkpoint of which this rank's part is written."""
        return self._writer.written

    @property
    def seconds(self) -> float:
        """Time that the last checkpoint took to write."""
        return self._writer.seconds

    def requests(self) -> Request:
        """Return this rank's requests to all: a checkpoint by rank 0's clock, or help after a failed write."""
        requests = Request.NOTHING if self._writer.failure is None else Request.HELP
        if self._period is not None and self._world.is_root and time.monotonic() - self._last >= self._period:
            requests |= Request.CHECKPOINT
        return requests

    def restore(self, say: Callable[[str], None]) -> tuple[int, Mapping[str, Any]]:
        """Restore the simulation from the newest whole checkpoint; return its round (0: none found) and progress.

        Raises:
            InputError: it is of another recipe, holds other states, or is beyond the recipe's last round.
        """
        names = self._simulation.replicated().keys()
        reader = CheckpointReader(self._folder, self._layout, self._parts.placement, self._world)
        found = reader.newest(identities(self._recipe), names, say)
        if found is None:
            return 0, {}
        if found.round > self._recipe.rounds:
            raise InputError(
                "rounds", expected=f"at least {found.round}, which are done", got=str(self._recipe.rounds),
                where=str(self._run.path), remedy=f"set rounds={found.round}; for a shorter run {FRESH}",
            )  # fmt: skip
        if not names <= found.replicated.keys() and found.round == self._recipe.rounds:
            raise InputError(
                f"the checkpoint of round {found.round} lacks what evaluate.model needs of it, and no round follows",
                where=str(self._run.path),
                remedy=f"leave evaluate.model as it was, or raise rounds; for a new run {FRESH}",
            )
        self._simulation.restore(found.replicated, found.clients)
        self._simulation.magnitudes.restore(found.progress["magnitudes"])
        self.done = self._saved_round = found.round
        return found.round, found.progress

    def prepare(self) -> str:
        """Create and clean the folder, check the disk space, and return a line on sizes. On rank 0 alone.

        Raises:
            InputError: the folder cannot be written.
            EnvironmentFailure: the disk has not enough room.
        """
        try:
            self._folder.mkdir(exist_ok=True)
            remove_remains(self._folder, self.done)
            with tempfile.TemporaryFile(dir=self._folder):  # raises if it cannot be written
                pass
            present = sum(path.stat().st_size for path in self._folder.iterdir())
            free = shutil.disk_usage(self._folder).free + present
        except OSError as error:
            what = error.strerror or str(error)
            raise InputError("checkpoints cannot be written", where=str(self._folder), got=what) from None
        each, copies = self.bytes_at_most(), self.most_kept() + 1
        if each * copies > free:
            raise EnvironmentFailure(
                "checkpoints do not fit",
                where=str(self._folder),
                expected=f"{decimal(each * copies)} for {copies} of up to {decimal(each)}",
                got=f"{decimal(free)} free",
                remedy="choose another output, or a smaller checkpoint.keep",
            )
        files = 3 if self._parts.method.local.stateful else 2
        when = "" if self._recipe.checkpoint.every else " at an early stop alone"
        return f"checkpoints{when}: up to {copies} of {decimal(each)} in {files} files each, {decimal(free)} free"

    def most_kept(self) -> int:
        """Return how many checkpoints are kept at most."""
        return self._recipe.checkpoint.most_kept(self._recipe.rounds) + self._states

    def bytes_at_most(self) -> int:
        """Return the largest size of a checkpoint: with a state of every client that can have taken part."""
        vectors = sum(tensor.nbytes for tensor in self._simulation.replicated().values())
        if not self._parts.method.local.stateful:
            return vectors
        return vectors + self._layout.bytes_of([self._parts.cohorts.most_participants]) + PAGE * self._world.size

    def after(
        self, round: int, requests: Request, written: int, progress: Mapping[str, Any], *, last: bool, early: bool
    ) -> None:
        """Act after a round: make the last checkpoint valid, begin the next if it is due.

        Args:
            round: t.
            requests: requests of any rank to all.
            written: round of the last checkpoint that all ranks have written.
            progress: plain JSON that `restore` returns.
            last: whether no round follows in this job.
            early: whether the job was asked to stop; then a checkpoint is due in any case.

        Raises:
            EnvironmentFailure: a checkpoint cannot be written, on any rank.
        """
        if Request.HELP in requests:
            self._raise_failure()
        self._settle(written)
        every = self._recipe.checkpoint.every
        if every == 0 and not early:
            return
        self._is_due |= last or Request.CHECKPOINT in requests or (isinstance(every, int) and round % every == 0)
        is_between = not self._is_due and self._begins_stretch(round)
        self._is_due |= is_between
        if last:
            self.finish()
        if self._is_due and (last or self._saved_round <= max(written, self.done)):  # the one before must be valid
            self._is_due = False
            self._last = time.monotonic()
            self._saved_round = round
            self._writer.start(self._snapshot(round, progress, is_between=is_between))
        if not last and self._begins_stretch(round + 1):  # whose reduction then says that this one is written
            self._writer.wait()

    def _begins_stretch(self, round: int) -> bool:
        """Whether one of the evenly spaced states is due after a round."""
        before, now = (stretch_of(one, self._recipe.rounds, self._states) for one in (round - 1, round))
        return now > before

    def _snapshot(self, round: int, progress: Mapping[str, Any], *, is_between: bool) -> Snapshot:
        simulation, touched = self._simulation, np.flatnonzero(self._simulation.touched)
        homes = self._parts.placement.home_of(touched)
        by_home = touched[np.argsort(homes, kind="stable")]
        return Snapshot(
            round,
            {**simulation.replicated(), "touched": torch.from_numpy(by_home)},
            by_home,
            np.bincount(homes, minlength=self._world.size).tolist(),
            self._parts.clients.snapshot(),
            {**progress, "magnitudes": simulation.magnitudes.state()},
            is_between,
        )

    def finish(self) -> None:
        """Wait until the last checkpoint is valid.

        Raises:
            EnvironmentFailure: it cannot be written, on any rank.
        """
        self._writer.wait()
        self._settle(min(self._world.gather(self._writer.written)))
        self._writer.wait_for_validity()
        self._raise_failure()

    def close(self) -> None:
        """Wait until nothing is written any more, whatever has ended the run."""
        self._writer.close()

    def _settle(self, written: int) -> None:
        if written == self._saved_round:
            self._writer.wait()  # ended already; releases the snapshot's states
        if self._writer.awaits(written):
            self._writer.settle(self._run)

    def _raise_failure(self) -> None:
        self._world.together(self._writer.raise_failure)
