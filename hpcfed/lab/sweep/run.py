"""The execution of a sweep: groups of ranks pull runs, one after another, until none is left or the job must stop."""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hpcfed.config.load import dump_yaml, read_yaml
from hpcfed.config.user_code.modules import forget, outdated, run_begins
from hpcfed.errors import Busy, Diverged, EnvironmentFailure, HpcfedError, InputError, Stopped, counted, first_of
from hpcfed.io.atomic import write_whole
from hpcfed.io.output import Output
from hpcfed.io.pace import QUIET_SECONDS, clock
from hpcfed.lab.sweep.claims import POLL, RETRYABLE, Claims, RunState
from hpcfed.lab.sweep.plan import Plan, Unit
from hpcfed.ranks.devices import DeviceSlot, take_device_slot
from hpcfed.ranks.signals import Signals, catch_signals
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import refuse_changed
from hpcfed.run_folder.files import CLIENTS
from hpcfed.run_folder.folder import RunFolder, refuse_both
from hpcfed.run_folder.progress import Reporter
from hpcfed.run_folder.rounds import RECORD

T = TypeVar("T")

ENDINGS: dict[type[HpcfedError], str] = {
    Diverged: "diverged",
    Busy: "busy",
    InputError: "refused",
    EnvironmentFailure: "failed",
    Stopped: "stopped",
}
"""Class of a run's error → recorded ending; an error counts as its nearest base class listed here."""
OF_A_SWEEP = {
    *("claims", "runs", "figures", "sweep.yaml", "results.csv", "results.parquet", "summary.csv", "summary.tex"),
    *("contributions.csv", "contributions.html", "values.csv"),
}
"""Names of the files and folders in a sweep's folder."""


@dataclass(frozen=True)
class Redo:
    """Treatment of existing runs that have no result, or differ from those that the sweep would run now.

    Attributes:
        retry: whether refused, failed and lost runs are tried again.
        fresh: whether runs of another recipe or other code are moved aside and started anew.
        accept_code: whether runs continue although the user's code has changed.
    """

    retry: bool = False
    fresh: bool = False
    accept_code: bool = False


def run_sweep(
    plan: Plan,
    world: World,
    groups: int | None = None,
    *,
    quiet: bool = False,
    redo: Redo | None = None,
    waits: bool = False,
) -> bool:
    """Run the unfinished runs of a sweep; called on every rank.

    Args:
        plan: the same on every rank.
        world: all ranks of the job.
        groups: number of groups of ranks, each training one run at a time; None: as many as ranks, or as runs if fewer.
        quiet: whether rank 0 prints no progress.
        redo: treatment of existing runs; None: an error if a run is of another recipe or other code.
        waits: whether to wait also for runs that other live jobs hold, if the caller needs every result.

    Returns:
        Whether unfinished runs are left: because a signal or the time limit ended this job or, with `waits`, because
        another program uses their folders.

    Raises:
        InputError: there are more groups than ranks; or see `prepare`.
    """
    with world.united():
        groups = min(world.size, len(plan.units)) if groups is None else groups
        group = world.split(groups)
        session = world.on_root(lambda: uuid.uuid4().hex[:12])
        claims, redo = Claims(plan.folder, session), redo or Redo()
        forget(world.on_root(lambda: outdated(plan.units[0].recipe.python_path)))
        world.on_root(lambda: prepare(plan, claims, redo))
        wanted = sorted({unit.recipe.device for unit in plan.units})
        left = world.on_root(lambda: not is_decided(plan, claims))
        device_slots = {str(device): take_device_slot(device, world) for device in wanted if left}
        progress = SweepProgress(plan, claims, world, groups, speaks=world.is_root and not quiet)
        with catch_signals(world) as caught:
            progress.begin()
            if left:
                _Group(plan, claims, group, device_slots, caught, progress).pull_all(waits=waits)
            progress.wait_for_others(caught)
        stopped = any(world.gather(caught.name is not None or (group.is_root and claims.asked_to_stop())))
        world.on_root(lambda: _files(plan, claims.forget_stop))
        return (stopped or waits) and world.on_root(lambda: not is_decided(plan, claims))


def run_states(plan: Plan, claims: Claims) -> dict[str, RunState]:
    """Return run name → state, for all runs of the sweep."""
    return _files(plan, lambda: claims.look([(unit.name, unit.digest) for unit in plan.units]))


def is_decided(plan: Plan, claims: Claims) -> bool:
    """Return whether all runs of the sweep have ended for good."""
    return all(one.decided for one in run_states(plan, claims).values())


def finished(states: Mapping[str, RunState]) -> set[str]:
    """Return the names of the runs that have finished."""
    return {name for name, one in states.items() if one.claim.ending == "finished"}


def states_until_stable(plan: Plan, claims: Claims) -> Iterator[dict[str, RunState]]:
    """Yield the states of all runs to a caller that writes results, and again if other jobs end runs meanwhile.

    Otherwise the caller could overwrite another job's result files that cover more runs. While other jobs hold runs,
    states are not yielded again, since those jobs write the results later.
    """
    seen = None
    while True:
        now = run_states(plan, claims)
        endings = {name: one.claim.ending for name, one in now.items()}
        if endings == seen or (seen is not None and any(one.held and one.vouched for one in now.values())):
            return
        yield now
        seen = endings


def prepare(plan: Plan, claims: Claims, redo: Redo) -> None:
    """Make the sweep's folder, check its content, apply `redo`, and write ``sweep.yaml``. On rank 0 only.

    Raises:
        InputError: the folder holds files that are not a sweep's, a sweep over other keys, a run of another recipe or
            other code, or a finished run whose record was changed; or the folder cannot be written.
    """
    refuse_both(redo.fresh, redo.accept_code)
    _open_folder(plan)
    states = run_states(plan, claims)
    anew: set[str] = set()
    lost: list[str] = []
    for unit in plan.units:
        if not states[unit.name].held:
            try:
                if not _check(unit, states[unit.name], redo.accept_code):
                    lost.append(unit.name)
            except InputError:
                if run_states(plan, claims)[unit.name].held:  # another job has just started to write there
                    continue
                if not redo.fresh:
                    raise
                RunFolder(unit.recipe.output).set_aside()
                anew.add(unit.name)
    about: dict[str, Any] = {"sweep": plan.name, "runs": len(plan.units)}
    about["grids"] = {grid.key: [value.label for value in grid.values] for grid in plan.grids}
    about["seeds"] = list(dict.fromkeys(unit.seed for unit in plan.units))

    def write() -> None:
        write_whole(plan.folder / "sweep.yaml", dump_yaml(about))
        for unit in plan.units:
            decided, ending = states[unit.name].decided, states[unit.name].claim.ending
            if (redo.retry and ending in RETRYABLE) or (unit.name in {*anew, *lost} and decided):
                claims.reopen(unit.name, unit.digest, states[unit.name])

    _files(plan, write)
    if lost:
        line = f"trained again, since the results were removed: {first_of(lost, 3)}"
        print(f"{plan.name}: {line}", file=Output(sys.stderr), flush=True)


def _open_folder(plan: Plan) -> None:
    """Make the sweep's folder, and check its content.

    Raises:
        InputError: it cannot be used, or holds files that are not a sweep's, or a sweep over other keys.
    """
    where, remedy = str(plan.folder), "choose --output"
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in plan.folder.iterdir() if not path.name.startswith(".")}
    except OSError as error:
        got = error.strerror or str(error)
        raise InputError("the folder cannot be used", where=where, got=got, remedy=remedy) from None
    foreign = sorted(present - OF_A_SWEEP)
    if foreign or (present and "sweep.yaml" not in present):
        got = ", ".join((foreign or sorted(present))[:3])
        raise InputError("the folder holds files that are not a sweep's", where=where, got=got, remedy=remedy)
    if present:
        _check_keys(plan)


def _check_keys(plan: Plan) -> None:
    """Check that the grids in the folder's ``sweep.yaml`` have the plan's keys: its tables have one set of columns.

    Raises:
        InputError: the keys differ.
    """
    grids = read_yaml(plan.folder / "sweep.yaml", "sweep", "grids").get("grids")
    there, here = (set(grids) if isinstance(grids, dict) else set()), {grid.key for grid in plan.grids}
    if there != here:
        expected, got = (", ".join(sorted(keys)) or "none" for keys in (there, here))
        remedy = "a sweep over other keys needs another --output"
        raise InputError(
            "the keys of the folder's sweep", where=str(plan.folder), expected=expected, got=got, remedy=remedy
        )


def _check(unit: Unit, state: RunState, accept_code: bool) -> bool:
    """Check that a unit's existing folder holds its run; return False if the run has finished and its result is gone.

    Raises:
        InputError: the run is of another recipe or other code, or has finished and its record lacks rounds or differs
            from its certificate.
    """
    folder, has_finished = RunFolder(unit.recipe.output), state.decided and state.claim.ending == "finished"
    if not folder.path.exists():
        return not has_finished
    if accept_code:
        folder.accept_code(unit.recipe)
    if state.decided:
        folder.check_code(unit.recipe)
        if state.claim.ending in ("finished", "diverged"):  # the claim is of this recipe; the folder may not be
            folder.refuse_other_result(unit.recipe)
    if has_finished and folder.has_result():
        refuse_changed(folder.path, RECORD, CLIENTS)
        return True
    if has_finished or not state.decided:
        folder.is_finished(unit.recipe)
    return not has_finished


@dataclass
class SweepProgress:
    """The progress of a sweep in all groups and jobs, in plain lines; `speaks`: whether this process prints them."""

    plan: Plan
    claims: Claims
    world: World
    groups: int
    speaks: bool
    _began: float = field(default_factory=time.monotonic)
    _spoke: float = 0.0
    _decided: int = 0
    _shown: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """Print the numbers of runs, of runs done, of ranks and groups, and remarks on the plan."""
        if not self.speaks:
            return
        counts = self._counts()
        self._decided, self._spoke = counts["decided"], time.monotonic()
        size = f"{counted(self.world.size, 'rank')} in {counted(self.groups, 'group')}"
        runs = f"{self.plan} = {counted(len(self.plan.units), 'run')}, {counts['decided']} done"
        self._say(f"{runs}; {size}; {self.plan.folder}")
        for line in self.plan.unlike():
            self._say(line)

    def show(self, run: str = "", *, now: bool = False, if_changed: bool = False) -> None:
        """Print how many runs are done, how they ended, the estimated time left, and `run`, a line on one run.

        Print at most once in `QUIET_SECONDS` unless `now`; with `if_changed`, only if the counts have changed.
        """
        if not self.speaks or (not now and time.monotonic() - self._spoke < QUIET_SECONDS):
            return
        self._spoke = time.monotonic()
        counts = self._counts()
        if if_changed and counts == self._shown:
            return
        self._shown = counts
        others = [f"{counts[kind]} {kind}" for kind in ("diverged", *RETRYABLE) if counts[kind]]
        line = f"{counts['decided']}/{len(self.plan.units)} runs done" + (f" ({', '.join(others)})" if others else "")
        done, rest = counts["decided"] - self._decided, len(self.plan.units) - counts["decided"]
        if done and rest:
            line += f", {counts['held']} going on, {clock((time.monotonic() - self._began) / done * rest)} left"
        self._say(f"{line}; {run}" if run else line)

    def wait_for_others(self, caught: Signals) -> None:
        """Keep printing progress until the other groups of this job have ended their runs, or a signal comes."""
        while self.speaks and any(s.held and s.vouched for s in self._own().values()) and caught.name is None:
            time.sleep(POLL)
            self.show()

    def _say(self, text: str) -> None:
        print(f"{self.plan.name}: {text}", file=Output(sys.stdout), flush=True)

    def _own(self) -> dict[str, RunState]:
        states = run_states(self.plan, self.claims)
        return {name: one for name, one in states.items() if one.claim.session == self.claims.session}

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for state in run_states(self.plan, self.claims).values():
            counts["decided"] += state.decided
            counts["held"] += state.held
            counts[state.claim.ending or ""] += state.decided
        return counts


class _Between(Reporter):
    """Reporter of a sweep's run that also prints the sweep's progress, and stops the run if another group must stop."""

    def __init__(self, unit: Unit, progress: SweepProgress, caught: Signals, *, listens: bool):
        super().__init__(unit.name, unit.recipe.rounds, speaks=False, live=False)
        self._progress, self._caught, self._listens, self._looked = progress, caught, listens, time.monotonic()

    def update(self, row: Mapping[str, Any]) -> None:
        if self._progress.speaks:
            self.count(row)
            self._progress.show(self.line(row))
        if self._listens and self._caught.name is None and time.monotonic() - self._looked >= POLL:
            self._looked = time.monotonic()
            if self._progress.claims.asked_to_stop():
                self._caught.name = "a signal to another group"


@dataclass(frozen=True)
class _Group:
    """A group of ranks of this job that trains runs of a sweep, one at a time.

    Attributes:
        plan, claims: of the sweep.
        world: the group's ranks.
        device_slots: a recipe's ``device`` → this rank's slot on it.
        caught: signals that this rank received.
        progress: the progress of all groups.
    """

    plan: Plan
    claims: Claims
    world: World
    device_slots: Mapping[str, DeviceSlot]
    caught: Signals
    progress: SweepProgress

    def pull_all(self, *, waits: bool) -> None:
        """Run one unit after another, until none is left or the job must stop."""
        avoided: set[str] = set()  # runs whose folder another job uses although its claim seemed dead

        while (taken := self._on_root(lambda: self._next(avoided, waits=waits))) is not None:
            unit, number = taken
            began = time.monotonic()
            ending, message = self._run(unit, number)
            if ending == "busy":
                avoided.add(unit.name)
            end = partial(self.claims.end, unit.name, number, ending, message, time.monotonic() - began)
            self._on_root(end)
            self.progress.show(now=True)
            if ending == "stopped" or any(self.world.gather(self.caught.name is not None)):
                self._on_root(self.claims.ask_to_stop)

    def _on_root(self, function: Callable[[], T]) -> T:
        return self.world.on_root(partial(_files, self.plan, function))

    def _next(self, avoided: set[str], *, waits: bool) -> tuple[Unit, int] | None:
        """Claim the next run; return it and the claim's number, or None if there is no run, or this job is to stop.

        If no run is open, wait while a holder may be dead; with `waits`, also while live jobs hold runs.
        """
        while self.caught.name is None and not self.claims.asked_to_stop():
            states = run_states(self.plan, self.claims)
            for unit in self.plan.units:
                if states[unit.name].open and unit.name not in avoided:
                    number = self.claims.take(unit.name, unit.digest, states[unit.name])
                    if number is not None:
                        return unit, number
            if not any(one.held and (waits or not one.vouched) for one in states.values()):
                return None
            self.progress.show(if_changed=True)
            time.sleep(POLL)
        if self.caught.name is not None:
            self.claims.ask_to_stop()
        return None

    def _run(self, unit: Unit, number: int) -> tuple[str, str]:
        """Run one unit on all ranks of the group; return its ending and error message."""
        from hpcfed.loop import training

        folder, recipe, world = RunFolder(unit.recipe.output), unit.recipe, self.world
        beating = self.claims.held(unit.name, number, world.end_at_once) if world.is_root else nullcontext()
        between = _Between(unit, self.progress, self.caught, listens=world.is_root)
        run_begins()
        try:
            with beating, world.united(), between as reporter:
                if not world.on_root(lambda: folder.is_finished(recipe)):
                    for _ in training(recipe, folder, reporter, world, self.device_slots[recipe.device]):
                        pass
        except HpcfedError as error:
            ending = next((ENDINGS[kind] for kind in type(error).__mro__ if kind in ENDINGS), None)
            if ending is None:  # a defect on another rank
                raise
            return ending, str(error)
        return "finished", ""


def _files(plan: Plan, function: Callable[[], T]) -> T:
    """Call a function that reads or writes the sweep's files.

    Raises:
        EnvironmentFailure: the file system refuses.
    """
    try:
        return function()
    except OSError as error:
        raise EnvironmentFailure("cannot be used", where=str(plan.folder), got=error.strerror or str(error)) from None
