"""A rank's share of a round: its members of the cohort are trained, tile by tile, and their updates added."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from hpcfed.algorithms._base import ClientRule
from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.client.batched.tiles import cut
from hpcfed.client.private_parts import private_part
from hpcfed.client.solver import Engine, Expected, Task
from hpcfed.client.state_transfer import Move, Moves
from hpcfed.cohort import Cohort
from hpcfed.config.user_code.blame import blamed, see_log
from hpcfed.errors import RAISED, Diverged, EnvironmentFailure, HpcfedError, InputError, goes_to_run_folder
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import answer, is_fault, is_full
from hpcfed.ranks.devices import fault
from hpcfed.reduce.checks import checked, client_label
from hpcfed.reduce.finite import LOWER
from hpcfed.reduce.weighted_update import Updates, WeightedUpdate
from hpcfed.rng import Purpose
from hpcfed.types import DELTA, ClientInfo, LocalResult, Method, RoundContext, State, TileMethod, Update

log = logging.getLogger("hpcfed")


@dataclass(frozen=True)
class RoundPlan:
    """Inputs of one round's training; identical on all ranks.

    Attributes:
        round, lr: its number, counted from 1, and its η_l.
        cohort: its clients, with their weights and steps.
        ranks: the rank of each member, (S,).
        places: of each member, (S,), in the cohort that was drawn.
        effective_steps: ‖a_i‖₁ of each member, (S,); None if not asked for, or if the client optimizer has none.
        common_effective_steps: the ‖a‖₁ that all members share, else None.
        factors: multiple of each Δ_i in the averages, (S,); 1 without a normalisation.
        alike: True if all members share one known ‖a_i‖₁ and no factor rescales a Δ_i.
        w: the server's model as clients unpack it, (d,) in the run's dtype on the device.
        shared: the method's shared state, likewise.
        touched: (N,) bool, clients that have a state of their own; the others' are the initial one.
        dropped: (S,) bool, members that drop out before they send; None without secure aggregation.
    """

    round: int
    lr: float
    cohort: Cohort
    ranks: Sequence[int]
    places: Sequence[int]
    effective_steps: Sequence[float | None]
    common_effective_steps: float | None
    factors: np.ndarray
    alike: bool
    w: Tensor
    shared: State
    touched: np.ndarray
    dropped: np.ndarray | None = None


class Member(NamedTuple):
    """A client of a tile.

    Attributes:
        place: its index in the plan's cohort; that of `task` is in the cohort that was drawn.
        task: its work.
        context: returns its `RoundContext` of a purpose.
        weight, factor, effective_steps: its entries of the plan's ``cohort.counts``, `factors` and `effective_steps`.
    """

    place: int
    task: Task
    context: Callable[[Purpose], RoundContext]
    weight: float
    factor: float
    effective_steps: float | None


class Training:
    """Trains clients on this rank, tile by tile.

    Args:
        parts: of the simulation.
        buffer: takes the updates.
        averaged: the module's averaged buffers, which are among them.

    Attributes:
        moving_seconds: what this rank has waited for clients' states in the last round.
    """

    def __init__(self, parts: Parts, buffer: Updates, averaged: AveragedBuffers):
        self._parts, self._buffer, self._averaged = parts, buffer, averaged
        self.moving_seconds = 0.0
        self._moves = Moves(parts.clients, lambda: parts.method.local.begin(parts.initial_w), parts.world)

    def __call__(self, plan: RoundPlan) -> tuple[Mapping[int, State], HpcfedError | None]:
        """Train this rank's members of the cohort; return their next states, and what went wrong, if anything."""
        states: dict[int, State] = {}
        self.moving_seconds = 0.0
        arriving = self._move(plan)
        self._parts.shards.expect(lambda: [member.client for member in self._next(plan.round)])
        try:
            failure = self._train(plan, arriving, states)
            if failure is None:
                self._parts.engine.expect(lambda: self._next(plan.round))
            return states, failure
        finally:
            self._await_states(plan.round)

    def _next(self, round: int) -> list[Expected]:
        """Return the clients of the next round that are at home here, those with the most steps first."""
        clients, steps = self._parts.cohorts.after(round)
        at_home = self._parts.placement.home_of(clients) == self._parts.world.rank
        clients, steps = clients[at_home], steps[at_home]
        sizes = self._parts.federation.sizes[clients]
        found = map(Expected, [round + 1] * len(clients), clients.tolist(), sizes.tolist(), steps.tolist())
        return sorted(found, key=lambda member: -member.steps)

    def _move(self, plan: RoundPlan) -> frozenset[int]:
        """Start the transfer of client states to the training ranks; return those expected here."""
        placement, clients = self._parts.placement, plan.cohort.clients
        if not (placement.balanced and self._parts.method.local.stateful):
            return frozenset()
        placed = zip(clients.tolist(), placement.home_of(clients).tolist(), plan.ranks, strict=True)
        moves = [Move(*move) for move in placed if move[1] != move[2] and plan.touched[move[0]]]
        placement.move(clients, plan.ranks)
        return self._moves.begin(moves)

    def _await_states(self, round: int) -> None:
        self._parts.watchdog.stage(f"round {round}: waiting for other ranks, for clients' states", waits=True)
        started = time.perf_counter()
        self._moves.finish()
        self.moving_seconds += time.perf_counter() - started

    def _train(self, plan: RoundPlan, arriving: frozenset[int], states: dict[int, State]) -> HpcfedError | None:
        clients, steps = plan.cohort.clients.tolist(), plan.cohort.steps.tolist()
        mine = [place for place, rank in enumerate(plan.ranks) if rank == self._parts.world.rank]
        if plan.dropped is not None:
            for place in (place for place in mine if plan.dropped[place]):
                self._buffer.skip(place)
            mine = [place for place in mine if not plan.dropped[place]]
        # Clients whose state is still on its way come last; those of equal steps end together.
        mine.sort(key=lambda place: (clients[place] in arriving, -steps[place]))
        tiles = deque(tiles_of(self._parts.engine, plan, mine))
        while tiles:
            tile = tiles.popleft()
            first = clients[tile[0]]  # by number: its name costs a read
            try:
                if any(clients[place] in arriving for place in tile):
                    self._await_states(plan.round)
                self._parts.watchdog.stage(f"round {plan.round}, client {first}: training")
                self.train_tile(plan, tile, states)
            except RAISED as error:  # errors of a user's model, a device or a data file must reach all ranks
                left = [place for place in tile if not self._buffer.is_filled(place)]
                torn = self._buffer.is_torn or not left  # some updates count already
                left = left or [tile[-1]]
                lasting = isinstance(error, InputError) or is_fault(error) or torn
                if len(left) > 1 and not lasting:  # each in a tile to itself, with the same bits, to find which fails
                    tiles.extendleft([place] for place in reversed(left))
                    continue
                explained = self._explain(error, plan.round, clients[left[0]])
                if is_fault(error):
                    self._buffer.abandon(explained)
                if not self._parts.skips_bad or lasting:
                    self._buffer.fail(left[0])
                    return explained
                self._buffer.skip(left[0])
        return None

    def train_tile(self, plan: RoundPlan, places: Sequence[int], states: dict[int, State]) -> None:
        """Train some clients, add their updates to the buffer, and their next states to `states`."""
        parts, buffer, members = self._parts, self._buffer, self._members(plan, places)
        names = parts.method.reported(plan.alike)
        joined: list[tuple[WeightedUpdate, int, State | None]] = []
        # All Δs of a tile are valid until the next tile.
        joins = len(members) > 1 and not parts.skips_bad and len({member.task.tilt.mu for member in members}) == 1
        sends = joins and bool(parts.chain.updates)
        reported = self._reported(plan, members, self._solved(plan, members), together=sends)
        for member, (local, report) in zip(members, reported, strict=True):
            client = member.task.client
            parts.model.check_threads()
            vectors, scalars = self._checked(plan, member, local, report, names)
            next_state = self._next_state(plan, member, local, report)  # before the sum: then it can be trained again
            update = WeightedUpdate(
                member.place, member.weight, vectors, local.loss_sum, local.steps, scalars, member.factor
            )
            if joins and vectors.keys() == {DELTA} and (sends or vectors[DELTA] is local.delta):
                joined.append((update, client, next_state))
                continue
            if not buffer.add(update, skips=parts.skips_bad):
                log.warning("%s: skipped, its update is not finite", client_label(parts.federation, plan.round, client))
                continue
            if next_state is not None:
                states[client] = next_state
        buffer.add_tile([update for update, _, _ in joined])
        states |= {client: state for _, client, state in joined if state is not None}

    def _members(self, plan: RoundPlan, places: Sequence[int]) -> list[Member]:
        """Return the clients at some places of the plan's cohort, each with its work."""
        parts, method, cohort = self._parts, self._parts.method.local, plan.cohort
        columns = cohort.clients, cohort.steps, cohort.guessed, cohort.counts, plan.factors
        clients, steps, guessed, counts, factors = (column[places].tolist() for column in columns)
        sizes, all_samples = parts.federation.sizes[clients].tolist(), parts.shards.clients(clients)
        members = []
        for row, (client, samples) in enumerate(zip(clients, all_samples, strict=True)):
            info = ClientInfo(client, sizes[row], parts.cohorts.mean_size)
            state = parts.clients.get(client) or method.begin(parts.initial_w)
            own = private_part(state)
            if parts.chain.updates:
                of_samples = RoundContext(plan.round, plan.lr, info, seed=parts.seed)
                samples = parts.chain.samples(samples, of_samples, parts.federation.num_classes)
            loss = parts.loss_of(client, plan.w, samples, own) if method.loss_at_w else None
            about = plan.round, plan.lr, info, plan.alike, loss, parts.seed
            context = partial(RoundContext, *about, num_parameters=parts.model.num_parameters)
            tilt = method.tilt(plan.w, plan.shared, state, context(Purpose.TILT))
            place = places[row]
            drawn = plan.places[place]
            task = Task(client, samples, tilt, steps[row], guessed[row], info, plan.shared, state, own, drawn)
            members.append(Member(place, task, context, counts[row], factors[row], plan.effective_steps[place]))
        return members

    def _solved(self, plan: RoundPlan, members: Sequence[Member]) -> Iterator[LocalResult]:
        """Yield each client's training, which may be done when it is asked for."""
        personal = self._personal(plan, members)
        tasks = [member.task for member in members]
        for row, local in enumerate(self._parts.engine.solve(plan.w, tasks, plan.round)):
            effective_steps = members[row].effective_steps
            known = local if effective_steps is None else replace(local, effective_steps=effective_steps)
            yield replace(known, personal=personal[row]) if personal else known

    def _personal(self, plan: RoundPlan, members: Sequence[Member]) -> list[Tensor]:
        """Return the last iterates of second solves, (d,) each, of methods with a personal model; else none."""
        if not self._parts.trains_personal:
            return []
        rule, second = cast("ClientRule", self._parts.method.local), []
        for member in members:
            tilt = rule.personal(plan.w, plan.shared, member.task.state, member.context(Purpose.PERSONAL))
            second.append(replace(member.task, tilt=tilt, guessed=0.0, personal=True))
        return [plan.w - local.delta for local in self._parts.engine.solve(plan.w, second, plan.round)]

    def _reported(
        self, plan: RoundPlan, members: Sequence[Member], solved: Iterable[LocalResult], *, together: bool
    ) -> Iterator[tuple[LocalResult, Update]]:
        """Yield each client's training with its update; `together`, all go through the parts of ``updates`` at once."""
        method = self._parts.method.local
        trained = (
            (local, member.task.state, member.context(Purpose.REPORT))
            for member, local in zip(members, solved, strict=True)
        )
        if not together:
            for local, state, context in trained:
                yield local, method.report(local, plan.w, plan.shared, state, context)
            return
        tile = list(trained)
        updates = cast("TileMethod", method).report_tile(tile, plan.w, plan.shared)
        yield from zip((local for local, _, _ in tile), updates, strict=True)

    def _checked(
        self, plan: RoundPlan, member: Member, local: LocalResult, update: Update, names: Sequence[str]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """Return a client's vectors and scalars, averaged buffers among them, checked, as its own part is."""
        name, method = self._parts.method.name, self._parts.method.local
        vectors, scalars = checked(name, update, names, method.scalars, local.delta)
        own = local.own if local.personal is None else {**local.own, "personal parameters": local.personal}
        if own:
            where = partial(self._where, plan.round, member.task.client)
            self._buffer.check_own(member.place, own, where, at_once=self._parts.skips_bad)
        if local.buffers:
            vectors = {**vectors, **self._averaged.changes(local.buffers)}
            scalars = {**scalars, **self._averaged.counts(local.buffers)}
        return vectors, scalars

    def _next_state(self, plan: RoundPlan, member: Member, local: LocalResult, update: Update) -> State | None:
        method, state = self._parts.method.local, member.task.state
        if not method.stateful:
            return None
        after = method.next_state(update, local, plan.w, plan.shared, state, member.context(Purpose.NEXT_STATE))
        return None if after is None else _apart_from(state, after)

    def _where(self, round: int, client: int) -> str:
        world = self._parts.world
        return f"{client_label(self._parts.federation, round, client)}, rank {world.rank} on {world.hosts[world.rank]}"

    def _explain(self, error: BaseException, round: int, client: int) -> HpcfedError:
        """Write the traceback to this rank's log, and return the line that all ranks will end with."""
        world, place = self._parts.world, self._where(round, client)
        log.error("%s: training raised", place, exc_info=error)
        if isinstance(error, HpcfedError):
            return type(error)(f"{place}: {error}")
        if is_full(error) and self._parts.engine.tile > 1:
            answer(error)
            what = f"the device's memory is full with tiles of {self._parts.engine.tile} clients (local.tile)"
            return EnvironmentFailure(what, where=place, remedy="use a smaller local.tile, which changes last bits")
        if is_fault(error):
            return fault(error, place)
        what, remedy = f"{type(error).__name__}: {error}", see_log(world)
        if failure := blamed(error, place, remedy):
            return failure
        if "overflow" in str(error):  # Python's, and torch's of a number that its type cannot hold
            return Diverged(what, where=place, remedy=LOWER)
        unseen = "a run of the recipe writes the traceback to its logs/"
        return EnvironmentFailure(what, where=place, remedy=remedy if goes_to_run_folder() else unseen)


def reported_names(
    method: Method, averaged: AveragedBuffers, *, alike: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the vectors and of the scalars that clients send in a round, averaged buffers among them."""
    return (*method.reported(alike), *averaged.entries), (*method.local.scalars, *averaged.scalars)


def tiles_of(engine: Engine, plan: RoundPlan, places: Sequence[int]) -> list[list[int]]:
    """Cut members at some places of the plan's cohort into tiles; slots follow from their places as drawn."""
    drawn = {plan.places[place]: place for place in places}
    tiles = cut(list(drawn), engine.tile, fixed_slots=engine.fixed_slots)
    return [[drawn[place] for place in tile] for tile in tiles]


def _apart_from(before: State, after: State) -> State:
    """Clone the tensors of a next state that alias the one before: the store reuses that memory."""
    stored = {tensor.untyped_storage()._cdata for tensor in before.values()}
    shared = {name for name, tensor in after.items() if tensor.untyped_storage()._cdata in stored}
    return {name: tensor.clone() if name in shared else tensor for name, tensor in after.items()}
