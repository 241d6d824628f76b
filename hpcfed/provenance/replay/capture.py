"""Repeated training of selected clients of a round: keeps their updates and shows their steps to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from torch import Tensor

from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.client.solver import Engine, StepCallback, Task
from hpcfed.cohort import members
from hpcfed.errors import RAISED, HpcfedError
from hpcfed.local_round import RoundPlan, Training
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import answer, check_refusals
from hpcfed.reduce.buffer import RoundBuffer, TileUpdate
from hpcfed.reduce.finite import check_own
from hpcfed.reduce.rows import Number
from hpcfed.reduce.update_hash import hash_of_update
from hpcfed.types import DELTA, LocalResult, State


@dataclass(frozen=True)
class ClientReport:
    """A client's update, as the server receives it.

    Attributes:
        vectors, scalars: the reported vectors and scalars, by name; averaged buffers are among the vectors.
        loss_sum: sum of the losses of the client's steps.
        steps: number of steps that the client took.
        task: the client's training task: samples, terms added to the gradient, and number of steps.
        hash: 64-bit hash of the update, as in ``update-hashes.bin``.
    """

    vectors: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    loss_sum: float
    steps: int
    task: Task
    hash: int


class _ReportKeeper:
    """Substitute for a `RoundBuffer` that keeps a copy of each update instead of adding it to the round's sum."""

    is_torn = False

    def __init__(self, parts: Parts, plan: RoundPlan, averaged: AveragedBuffers):
        self.names = (*parts.method.reported(plan.alike), *averaged.entries)
        self.scalars = (*parts.method.local.scalars, *averaged.scalars)
        self.kept: dict[int, tuple[dict[str, Tensor], dict[str, float], float, int]] = {}

    def add(
        self,
        place: int,
        weight: float,
        vectors: Mapping[str, Tensor],
        *,
        scalars: Mapping[str, float],
        loss_sum: Number,
        steps: int,
        **_: object,  # of the sum
    ) -> bool:
        """Keep an update; see `RoundBuffer.add`."""
        copies = {name: vectors[name].detach().clone() for name in self.names}
        self.kept[place] = copies, {name: float(scalars[name]) for name in self.scalars}, float(loss_sum), steps
        return True

    def add_tile(self, updates: Sequence[TileUpdate]) -> None:
        """Keep the updates of a tile; see `RoundBuffer.add_tile`."""
        for place, _, _, loss_sum, steps, scalars, delta in updates:
            self.add(place, 0.0, {DELTA: delta}, scalars=scalars, loss_sum=loss_sum, steps=steps)

    def hash(self, place: int) -> int:
        """Return the hash, as in ``update-hashes.bin``, of the update of the client at index `place` of the cohort."""
        vectors, scalars, _, _ = self.kept[place]
        return hash_of_update(vectors, self.names, list(scalars.values()))

    def check_own(self, place: int, own: State, where: Callable[[], str], *, at_once: bool = False) -> None:
        """Refuse a private part that is not finite; see `RoundBuffer.check_own`."""
        check_own(own)

    def is_filled(self, place: int) -> bool:
        """Whether the update of the client at index `place` of the cohort has been kept."""
        return place in self.kept

    def skip(self, place: int) -> None:
        """Do nothing: a client that is left out has no update to keep; see `RoundBuffer.skip`."""

    def fail(self, place: int) -> None:
        """Do nothing: `Training` returns the failure; see `RoundBuffer.fail`."""

    def abandon(self, failure: HpcfedError) -> None:
        """Do nothing: `Training` returns the device's failure; see `RoundBuffer.abandon`."""


class SolveProbe(Protocol):
    """Observer of the local training of clients."""

    def begin(self, task: Task, w: Tensor) -> None:
        """Called before a client trains on its task; `w`, (d,), is the server's model."""
        ...

    def __call__(self, client: int, number: int, y: Tensor) -> None:
        """Called after step `number` of a client, from 1, with its iterate `y`, (d,); see `StepCallback`."""
        ...


class _WatchedEngine:
    """Wrapper of an engine that keeps its tasks and shows each step to a probe; does not observe personal models."""

    def __init__(self, engine: Engine, watch: SolveProbe | None):
        self._engine, self._watch = engine, watch
        self.tile, self.fixed_slots, self.graphs = engine.tile, engine.fixed_slots, engine.graphs
        self.tasks: dict[int, Task] = {}

    def solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> Iterator[LocalResult]:
        """Train clients; see `Engine`."""
        if any(task.personal for task in tasks):
            return self._engine.solve(w, tasks, round)
        for task in tasks:
            self.tasks[task.client] = task
            if self._watch is not None:
                self._watch.begin(task, w)
        return self._engine.solve(w, tasks, round, self._watch)


def reports_of(
    parts: Parts, plan: RoundPlan, places: Sequence[int], watch: SolveProbe | None = None
) -> dict[int, ClientReport]:
    """Train some clients of a planned round again; return client number → update.

    Args:
        parts: parts of the simulation that made the plan.
        plan: the plan of the round.
        places: the clients, as indices into the cohort.
        watch: observer of each step, or None.

    Raises:
        Diverged, EnvironmentFailure, InputError: the training of a client failed.
    """
    averaged = AveragedBuffers(parts.model)
    updates, engine = _ReportKeeper(parts, plan, averaged), _WatchedEngine(parts.engine, watch)
    training = Training(replace(parts, engine=engine, skips_bad=False), cast(RoundBuffer, updates), averaged)
    own = sorted(places)
    _, failure = training(_part_of(plan, own))
    if failure is not None:
        raise failure
    check_refusals(parts.model.vector.device)
    found = {}
    for place, (vectors, scalars, loss_sum, steps) in updates.kept.items():
        client = int(plan.cohort.clients[own[place]])
        found[client] = ClientReport(vectors, scalars, loss_sum, steps, engine.tasks[client], updates.hash(place))
    return found


def hashes_in_tiles(parts: Parts, plan: RoundPlan, tiles: Sequence[Sequence[int]]) -> list[list[int]]:
    """Train clients of a planned round in tiles; return each tile's hashes of updates, [] for a tile that failed.

    Args:
        parts: parts of the simulation that made the plan.
        plan: the plan of the round.
        tiles: groups of clients to train together, as indices into the cohort; an index may recur, even in one tile.
    """
    averaged = AveragedBuffers(parts.model)
    found: list[list[int]] = []
    for tile in tiles:
        updates = _ReportKeeper(parts, plan, averaged)
        training = Training(replace(parts, skips_bad=False), cast(RoundBuffer, updates), averaged)
        try:
            training.train_tile(_part_of(plan, tile), range(len(tile)), {})
        except RAISED as error:
            answer(error)
            found.append([])
            continue
        check_refusals(parts.model.vector.device)
        found.append([updates.hash(place) for place in range(len(tile))])
    return found


def _part_of(plan: RoundPlan, places: Sequence[int]) -> RoundPlan:
    """Return the plan reduced to the clients at these indices of its cohort: trained on this rank, none dropped."""
    cohort = plan.cohort
    part = members(cohort, list(places))
    return replace(
        plan,
        cohort=part,
        ranks=[0] * len(places),
        places=[plan.places[place] for place in places],
        effective_steps=[plan.effective_steps[place] for place in places],
        factors=plan.factors[list(places)],
        dropped=None,
    )
