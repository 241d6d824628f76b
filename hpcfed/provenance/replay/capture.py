"""Repeated training of selected clients of a round: keeps their updates and shows their steps to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.client.solver import Engine, Expected, StepCallback, Task
from hpcfed.cohort import members
from hpcfed.errors import RAISED
from hpcfed.local_round import RoundPlan, Training, reported_names
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import answer, check_refusals
from hpcfed.reduce.update_hash import HashKeeper
from hpcfed.reduce.weighted_update import WeightedUpdate
from hpcfed.types import LocalResult


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


class _ReportKeeper(HashKeeper):
    """Keeps a copy of each update, too, by the client's place."""

    def __init__(self, names: Sequence[str], scalars: Sequence[str]):
        super().__init__(names, scalars)
        self.kept: dict[int, WeightedUpdate] = {}

    def add(self, update: WeightedUpdate, *, skips: bool = False) -> bool:
        copies = {name: update.vectors[name].detach().clone() for name in self.names}
        scalars = {name: float(update.scalars[name]) for name in self.scalars}
        self.kept[update.place] = update._replace(vectors=copies, scalars=scalars, loss_sum=float(update.loss_sum))
        return super().add(update)


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

    def expect(self, members: Callable[[], Iterable[Expected]]) -> None:
        """Do nothing: one round is replayed."""


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
    keeper = _ReportKeeper(*reported_names(parts.method, averaged, alike=plan.alike))
    engine = _WatchedEngine(parts.engine, watch)
    training = Training(replace(parts, engine=engine, skips_bad=False), keeper, averaged)
    own = sorted(places)
    _, failure = training(_part_of(plan, own))
    if failure is not None:
        raise failure
    check_refusals(parts.model.vector.device)
    found = {}
    for place, hash in keeper.hashes:
        client, kept = int(plan.cohort.clients[own[place]]), keeper.kept[place]
        about = kept.vectors, kept.scalars, float(kept.loss_sum), kept.steps
        found[client] = ClientReport(*about, engine.tasks[client], hash)
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
        keeper = HashKeeper(*reported_names(parts.method, averaged, alike=plan.alike))
        training = Training(replace(parts, skips_bad=False), keeper, averaged)
        try:
            training.train_tile(_part_of(plan, tile), range(len(tile)), {})
        except RAISED as error:
            answer(error)
            found.append([])
            continue
        check_refusals(parts.model.vector.device)
        found.append([hash for _, hash in sorted(keeper.hashes)])
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
