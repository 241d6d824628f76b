"""``hpcfed verify``: whether a run folder is what it says, by its files and by its rounds computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcfed.errors import Diverged, InputError
from hpcfed.provenance.beginning import begin_after
from hpcfed.provenance.differences import TOLERANCE, beyond, in_bits, largest, of_environments
from hpcfed.provenance.recorded import RecordedRun, placed_recipe, recorded
from hpcfed.provenance.verify.faults import data_faults, folder_faults
from hpcfed.provenance.verify.recompute import Comparing, Judge, Segment, compute, for_verification, scratch_folder
from hpcfed.provenance.verify.spot_check import drawn
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import Fault
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import read_mapping

AGREES, DIFFERS = 0, 1
"""Exit codes; 2 and 4 where verification cannot be done."""
MAX_LISTED = 4
"""Differing columns that are printed."""


@dataclass(frozen=True)
class Verification:
    """What to verify.

    Attributes:
        run: the run folder.
        rounds: how many to draw; None: all, from the first on.
        seed: of the draw.
        data, code: present places of the federation file and of the user's code, where they have moved.
        signers: "allowed signers" of ssh-keygen, one of whom must have signed.
        tolerance: relative difference of single rounds where this machine computes other bits; None: by ``dtype``.
    """

    run: Path
    rounds: int | None
    seed: int
    data: Path | None = None
    code: Path | None = None
    signers: Path | None = None
    tolerance: float | None = None


def verify(request: Verification, world: World, say: Callable[[str], None]) -> int:
    """Verify a run on all ranks; return the exit code, the same on every rank. `say` prints on rank 0.

    Raises:
        InputError: it cannot be verified: no run folder, no data, other code.
        EnvironmentFailure: a file or a rank failed.
    """
    run = request.run.resolve()
    if world.on_root(lambda: _has_faults(folder_faults(run, request.signers), say)):
        return _differs(say)
    recipe = world.on_root(lambda: placed_recipe(run, request.data, request.code))
    if world.on_root(lambda: _has_faults(data_faults(recipe), say)):
        return _differs(say)
    session = Recomputation(world.on_root(lambda: recorded(run, recipe)), world, say)
    segments, every = session.segments(request)
    for segment in [*segments, *session.last_state(segments)]:
        with session.again(segment, in_bits) as done:
            if not done.agrees:
                return session.parted(segment, done, request)
            if wrong := session.wrong_model(segment, done):
                say(str(wrong))
                return _differs(say)
    say(_verdict(session.recorded, segments, every, world.size))
    return AGREES


def _has_faults(findings: Iterator[Fault | str], say: Callable[[str], None]) -> bool:
    found = list(findings)
    for finding in found:
        say(str(finding))
    return any(isinstance(finding, Fault) for finding in found)


def _differs(say: Callable[[str], None]) -> int:
    say("differs: this is not what the run left")
    return DIFFERS


def _verdict(run: RecordedRun, segments: Sequence[Segment], every: bool, ranks: int) -> str:
    where = "on 1 rank" if ranks == 1 else f"on {ranks} ranks"
    if every:
        return f"verified: all {len(run.rows)} rounds, bit for bit, {where}"
    rounds = [round for segment in segments for round in range(segment.start + 1, segment.stop + 1)]
    return f"spot-checked: {_named(rounds)} of {len(run.rows)}, from recorded states, bit for bit, {where}"


def _named(rounds: Sequence[int]) -> str:
    shown = ", ".join(map(str, rounds[:20])) + (", …" if len(rounds) > 20 else "")
    return f"round {shown}" if len(rounds) == 1 else f"{len(rounds)} rounds ({shown})"


@dataclass(frozen=True)
class ComputedSegment:
    """A segment that was computed: where, by what it was compared, and whether it agrees."""

    folder: Path
    reporter: Comparing
    agrees: bool
    diverged: str = ""


class Recomputation:
    """Computes segments of a recorded run on all ranks."""

    def __init__(self, run: RecordedRun, world: World, say: Callable[[str], None]):
        self.recorded, self._world, self._say = run, world, say

    def segments(self, request: Verification) -> tuple[list[Segment], bool]:
        """Return the segments to compute, and whether they are all rounds of the run."""
        rounds = len(self.recorded.rows)
        if request.rounds is None or request.rounds >= rounds:
            return [Segment(0, rounds)], True
        return drawn(rounds, self.recorded.checkpoints, request.rounds, request.seed), False

    @contextmanager
    def again(self, segment: Segment, judge: Judge) -> Iterator[ComputedSegment]:
        """Compute a segment in a folder that lasts as long as the block."""
        run, world = self.recorded, self._world
        stop = None if self._ends(segment) else segment.stop
        with scratch_folder(world) as scratch:
            folder = scratch / "run"
            recipe = for_verification(run.recipe, folder)
            world.on_root(partial(begin_after, folder, run.folder, segment.start, recipe, linked=True))
            reporter = Comparing(run.rows, stop, judge, self._say)
            try:
                agrees, diverged = compute(recipe, folder, reporter, world, segment.stop), ""
            except Diverged as error:
                agrees, diverged = False, str(error)
            for remark in reporter.remarks:
                if "is damaged" in remark:
                    self._say(remark)
                    agrees = False
            yield ComputedSegment(folder, reporter, agrees, diverged)

    def _ends(self, segment: Segment) -> bool:
        """Whether the session may end by itself after the segment, and leave its models."""
        return self.recorded.finished and segment.stop == len(self.recorded.rows)

    def last_state(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return a segment without rounds that leaves the last recorded state's models, if no other leaves them."""
        last = len(self.recorded.rows)
        is_needed = self.recorded.finished and last in self.recorded.checkpoints
        return [Segment(last, last)] if is_needed and all(segment.stop < last for segment in segments) else []

    def wrong_model(self, segment: Segment, done: ComputedSegment) -> Fault | None:
        """Return what is wrong with the run's models, if the segment left others."""
        return self._world.on_root(lambda: self._compare_models(done.folder)) if self._ends(segment) else None

    def _compare_models(self, folder: Path) -> Fault | None:
        for name in MODELS:
            here, there = folder / name, self.recorded.folder / name
            if here.exists() != there.exists() or (here.exists() and here.read_bytes() != there.read_bytes()):
                return Fault(name, f"is not the model after round {len(self.recorded.rows)}")
        return None

    def parted(self, segment: Segment, done: ComputedSegment, request: Verification) -> int:
        """Say how a segment differs; where this machine computes other bits, compare single rounds; return the code."""
        if done.diverged:
            self._say(f"differs: {done.diverged}")
            return DIFFERS
        if not done.reporter.faults:  # a damaged checkpoint, which has been named
            return _differs(self._say)
        round, other = done.reporter.compared[-1], self._other_machine(done.folder)
        if not other:
            self._say(f"differs from round {round} (of rounds {segment.start + 1} to {segment.stop})")
            for fault in done.reporter.faults[:MAX_LISTED]:
                self._say(f"  {fault}")
            return DIFFERS
        self._say(f"this machine computes other bits: {'; '.join(other)}")
        return self._within(request)

    def _other_machine(self, folder: Path) -> list[str]:
        here = self._world.on_root(lambda: read_mapping(folder / "environment.json"))
        return list(of_environments(self.recorded.environment, here))

    def _within(self, request: Verification) -> int:
        """Compare single rounds, each from its recorded state, within the tolerance; return the exit code."""
        run = self.recorded
        tolerance = request.tolerance or TOLERANCE[run.recipe.dtype]
        starts = [0, *(round for round in run.checkpoints if round < len(run.rows))]
        if request.rounds is not None:
            starts = [segment.start for segment in self.segments(request)[0]]
        worst = 0.0

        def judge(row: Any, here: Any) -> Sequence[object]:
            nonlocal worst
            worst = max(worst, largest(row, here))
            return beyond(row, here, tolerance)

        for start in starts:
            with self.again(Segment(start, start + 1), judge) as done:
                if not done.agrees:
                    self._say(f"differs in round {start + 1}, by more than {tolerance:g}, from its recorded state")
                    for fault in done.reporter.faults[:MAX_LISTED]:
                        self._say(f"  {fault}")
                    return DIFFERS
        rounds = _named([start + 1 for start in starts])
        self._say(
            f"agrees within {tolerance:g}, not to the bit: {rounds}, each from its recorded state; at most {worst:.1e}"
        )
        return AGREES


def check_count(rounds: int) -> None:
    """Refuse a number of rounds below 1.

    Raises:
        InputError: it is.
    """
    if rounds < 1:
        raise InputError("--rounds", expected="at least 1", got=str(rounds), remedy="use --all for all of them")
