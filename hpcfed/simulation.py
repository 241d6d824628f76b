"""A federated run's state, and one round of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.elementary import quotient
from hpcfed.arithmetic.sums import norm_from, squared_norm
from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.client.work import are_ones, common_to_all, effective_steps_and_factors, skip_correction
from hpcfed.cohort import Cohort
from hpcfed.errors import Diverged, EnvironmentFailure, InputError
from hpcfed.local_round import RoundPlan, Training, reported_names
from hpcfed.parts import Parts
from hpcfed.ranks.platform.malloc import return_freed_memory
from hpcfed.ranks.world import PATIENCE
from hpcfed.reduce.bounded import BoundedMagnitudes
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.checks import check_range, check_repeated, check_same, check_sums
from hpcfed.reduce.slots import DONE, SKIPPED, Sums
from hpcfed.reduce.squares import Squares
from hpcfed.reduce.state_hash import StateHash
from hpcfed.reduce.units import Magnitudes, Units, counts_of, exact_terms, suffice, units_for
from hpcfed.rng import Purpose
from hpcfed.sentinel import Check, Sentinel, Suspicion
from hpcfed.server import Server
from hpcfed.types import DELTA, MOVED, Means, Request, RoundContext, ServerUpdate, State
from hpcfed.updates import PartContext
from hpcfed.updates._layout import layout_of

ROBUST_EXCHANGES = "robust_allreduces"
"""Allreduces of a robust mean, in the record's column ``method``."""


@dataclass(frozen=True)
class RoundResult:
    """Result of one round; identical on all ranks except `seconds`. Defaults are those of a round without clients."""

    cohort: Cohort
    means: Means
    """Of the scalars; the vectors' are not kept."""
    requests: Request
    """Requests of any rank to all."""
    written: int
    """Round of the last checkpoint of which every rank's part is on disk."""
    seconds: dict[str, float]
    state_hash: StateHash
    """Of the model and the server's state after the round."""
    units: Mapping[str, float] | None
    """The finest unit of each vector's sum; None where sums have none."""
    never_drawn: int | None
    """Clients whose private part is still the initial one; None without private parts."""
    vectors: tuple[str, ...] = ()
    """Names of the vectors that clients report."""
    num_sent: int = 0
    """Number of clients who sent theirs, also if they were too few for a masked sum to be opened."""
    server_lr: float | None = None
    local_loss: float | None = None
    gradients: int = 0
    skipped: list[int] = field(default_factory=list)
    """Clients whose training failed, left out of the round."""
    imbalance: float = 1.0
    attempts: int = 1
    """1, or 2 if the predicted units did not fit the updates."""
    update_hashes: np.ndarray | None = None
    """Of each client's update, (S,) uint64, where the recipe asks for them; 0 for a skipped one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The method's own numbers."""
    checks: int = 0
    """Clients that the sentinel had trained once more."""
    suspicions: Sequence[Suspicion] = ()
    """Those whose updates differ."""
    updates: Mapping[int, Tensor] = field(default_factory=dict)
    """Δ_i of each client, (d,), as its mean has it, where they are kept; without skipped ones."""
    delta: Tensor | None = None
    """The mean that the server's step has used, (d,), float64, likewise."""

    @property
    def hash(self) -> str:
        """The hash as recorded: 64 bits, hexadecimal."""
        return str(self.state_hash)


class Simulation:
    """The replicated server, and the clients that this rank trains.

    Args:
        parts: of the run.
        keeps_updates: whether results have the clients' updates, by an Allreduce more; the same on every rank.

    Attributes:
        touched: (N,) bool, clients that have a state of their own; the same on every rank.
        buffers: the module's averaged buffers; the same on every rank.
        magnitudes: how large the reported vectors were, from which a round's units follow; the same on every rank.
    """

    def __init__(self, parts: Parts, *, keeps_updates: bool = False):
        self._parts, self._keeps_updates = parts, keeps_updates
        self._world = parts.world
        self._device, self._dtype = parts.model.vector.device, parts.model.vector.dtype
        self._is_exact = parts.reduction == "exact"
        self._is_bounded = parts.chain.privacy is not None and parts.chain.privacy.is_central
        self.buffers = AveragedBuffers(parts.model)
        self._buffer = RoundBuffer(
            parts.model.vector.numel(),
            self._dtype,
            self._device,
            parts.world,
            kind=parts.reduction,
            sum_on_device=parts.sum_on_device,
            hashes_updates=parts.hashes_updates,
            watched=parts.sentinel != "off",
            others=self.buffers.entries,
            arithmetic=parts.arithmetic,
            home=parts.server_home,
            mixed=parts.devices.are_mixed,
            graphs=parts.engine.graphs,
            keeps_vectors=keeps_updates or parts.chain.robust is not None,
            masked=parts.masks is not None,
        )
        self._squares, self._layout = Squares(parts.engine.graphs), layout_of(parts.model)
        self._initial_buffers = self.buffers.state
        self.touched = np.zeros(parts.federation.num_clients, dtype=bool)
        self._training = Training(parts, self._buffer, self.buffers)
        self._sentinel = Sentinel(parts, self.buffers, is_on=parts.sentinel != "off")
        self._server = Server(parts.method, parts.initial_w, parts.server_home, parts.evaluate_model, self._squares)
        self._begin()

    def _begin(self) -> None:
        entries, privacy = self._parts.model.vector.numel(), self._parts.chain.privacy
        self.magnitudes = Magnitudes(entries, self._dtype, self.buffers.entries)
        if self._is_bounded and privacy is not None:
            self.magnitudes = BoundedMagnitudes(
                entries, self._dtype, lambda name: privacy.bound(name, self._clip), self._parts.federation.num_clients
            )
        self.touched[:] = privacy is not None and self._parts.method.local.stateful  # or it would tell who took part
        self._hashed: _Hashed | None = None

    @property
    def w(self) -> Tensor:
        """The server's model, (d,) in the run's dtype on the host; the same on every rank."""
        return self._server.w

    @w.setter
    def w(self, w: Tensor) -> None:
        self._server.w = w

    @property
    def server(self) -> State:
        """The server method's state, on the host; the same on every rank."""
        return self._server.state

    @property
    def shared(self) -> State:
        """The method's shared state, on the host; the same on every rank."""
        return self._server.shared

    def begin_again(self) -> None:
        """Go back to before the first round."""
        self._server.begin()
        self._begin()
        self._parts.clients.forget([*self._parts.clients])
        self.buffers.restore(self._initial_buffers)

    def round(self, round: int, *, requests: Request = Request.NOTHING, written: int = 0) -> RoundResult:
        """Train a round, counted from 1: local work, the one Allreduce, the server's step.

        If the predicted units do not fit the updates, the cohort is trained and reduced a second time. Requests and
        saved rounds of all ranks are in the result.

        A cohort whose members are all left out (``cohort.without``) leaves the model and all states as they are.

        Raises:
            Diverged: a client's update is not finite.
            EnvironmentFailure: a client's training raised, or the ranks' states differ, or a client that was trained
                twice reported two different updates.
        """
        if self._buffer.is_large:
            return_freed_memory()
        plan = self.plan(round)
        size = len(plan.cohort.clients)
        left = size if plan.dropped is None else int((~plan.dropped).sum())
        if not size or self._are_too_few(left):
            return self._round_without_clients(plan, left, requests, written)
        trained = self._train(plan, requests, written)
        cohort, sums = plan.cohort, trained.sums
        left = int((sums.status == DONE).sum())
        if self._are_too_few(left):  # others failed (on_bad_client: skip)
            return self._as_it_was(plan, left, sums.requests, sums.written, trained.seconds)
        updates = self._updates(plan, sums) if self._keeps_updates else {}
        reduced = time.perf_counter()
        (means, noted), clip = self._means(plan, sums), self._clip_as_recorded()
        update = self._step(means, plan)
        self.buffers.step(sums, _kept(cohort, sums))
        self.magnitudes.learn(sums.bounds)
        self._parts.clients.commit(trained.states)
        if self._parts.method.local.stateful:
            self.touched[cohort.clients[sums.status == DONE]] = True
        steps, local = int(sums.steps.sum()), sums.local_seconds
        return RoundResult(
            cohort=cohort,
            means=replace(means, vectors={}, delta_sq=self._server.delta_sq),
            vectors=tuple(means.vectors),
            num_sent=left,
            server_lr=update.server_lr,
            metrics={**update.metrics, **noted, **clip},
            local_loss=float(sums.loss_sum.sum()) / steps if steps else None,
            gradients=steps,
            requests=Request(int(np.bitwise_or.reduce(sums.requests))),
            skipped=cohort.clients[sums.status == SKIPPED].tolist(),
            written=int(sums.written.min()),
            seconds={**trained.seconds, "server": time.perf_counter() - reduced},
            imbalance=float(local.max() / local.mean()) if local.mean() > 0 else 1.0,
            units=self._finest(trained.units),
            state_hash=self._state_hash(),
            attempts=trained.attempts,
            update_hashes=sums.update_hashes,
            checks=trained.checks,
            suspicions=trained.suspicions,
            updates=updates,
            delta=means.delta if self._keeps_updates else None,
            never_drawn=self._never_drawn(),
        )

    def _train(self, plan: RoundPlan, requests: Request, written: int) -> _Trained:
        """Train a round's cohort and reduce what it reports, in the predicted units, or again in ones that fit.

        Raises:
            Diverged, EnvironmentFailure: as `round` does.
        """
        round, cohort, ranks, masks = plan.round, plan.cohort, plan.ranks, self._parts.masks
        vectors, _ = reported_names(self._parts.method, self.buffers, alike=plan.alike)
        counts = counts_of(vectors, cohort.counts, plan.factors)
        units: Mapping[str, Units] = self.magnitudes.predict(counts) if masks is None else masks.units(counts)
        checks = self._sentinel.draw(plan)
        sums, states, spent = self._attempt(plan, units, requests, written, checks)
        suspicions = self._compared(plan, checks, sums)
        self._parts.placement.learn(ranks, cohort.work, cohort.steps, sums.local_seconds - sums.idle_seconds)
        better = self._better_units(units, counts, sums, round)
        if better is None:
            return _Trained(sums, states, spent, units, len(checks), suspicions)
        first = replace(sums, vectors={})
        del sums  # whose vectors are large
        sums, states, again = self._attempt(plan, better, requests, written, [])
        if self._parts.repeats_bits:
            check_repeated(first, sums, round, cohort, ranks, self._parts.federation, self._world)
        elif self._better_units(better, counts, sums, round) is not None:
            what = f"round {round}: trained twice, clients reported updates of too different sizes"
            raise EnvironmentFailure(what, remedy="set deterministic: true")
        self.magnitudes.repeats += 1
        spent = {name: seconds + again.get(name, 0.0) for name, seconds in spent.items()}
        return _Trained(sums, states, spent, better, len(checks), suspicions, attempts=2)

    def _round_without_clients(self, plan: RoundPlan, left: int, requests: Request, written: int) -> RoundResult:
        """Return a round without training: one Allreduce of the ranks' requests and hashes.

        Raises:
            EnvironmentFailure: the ranks' states differ.
            Diverged: the model is not finite afterwards.
        """
        started = time.perf_counter()
        ranks = self._buffer.exchange(self._state_hash().value, requests=requests, written=written)
        check_same(ranks["hash"], plan.round, self._world)
        seconds = {"local": 0.0, "convert": 0.0, "wait": 0.0, "reduce": time.perf_counter() - started}
        return self._as_it_was(plan, left, ranks["requests"], ranks["written"], seconds)

    def _as_it_was(
        self, plan: RoundPlan, left: int, requests: np.ndarray, written: np.ndarray, seconds: Mapping[str, float]
    ) -> RoundResult:
        """Return a round without means: of no clients, or of `left`, too few for a masked sum to be opened.

        The model stays as it is; that of a private run whose cohorts are hidden takes a step along noise, as in any
        other round.

        Args:
            plan: of the round.
            left: number of clients who have sent.
            requests, written: of each rank, (P,).
            seconds: spent so far.

        Raises:
            Diverged: the model is not finite afterwards.
        """
        clip = self._clip_as_recorded()
        means, update = Means({}, math.nan, math.nan, 0.0, 0, plan.round, plan.lr, None), None
        units: Mapping[str, Units] = {}
        if not self._is_bounded or self._parts.masks is not None:
            self._server.stay()
        else:
            scalars = dict.fromkeys(self._parts.method.local.scalars, 0.0)
            means = replace(means, vectors=self._zeros(plan), scalars=scalars)
            units = self.magnitudes.predict(dict.fromkeys(means.vectors, np.empty(0)))  # before the step moves a clip
            means = self._parts.chain.after(means, self._parts.seed, self._clip)
            means = replace(means, delta_sq=self._norm(means.delta) if DELTA in means.vectors else math.nan)
            update = self._step(means, plan)
        return RoundResult(
            cohort=plan.cohort,
            means=replace(means, vectors={}),
            vectors=self._parts.method.reported(plan.alike),
            num_sent=left,
            server_lr=None if update is None else update.server_lr,
            metrics={} if update is None else {**update.metrics, **clip},
            requests=Request(int(np.bitwise_or.reduce(requests))),
            written=int(written.min()),
            skipped=plan.cohort.clients.tolist(),
            seconds={**seconds, "server": 0.0},
            state_hash=self._state_hash(),
            units=self._finest(units),
            never_drawn=self._never_drawn(),
        )

    def _are_too_few(self, left: int) -> bool:
        """Whether the clients that are left are fewer than a secure aggregation opens a sum of."""
        return self._parts.masks is not None and left < self._parts.masks.survivors

    @property
    def _clip(self) -> float | None:
        """C of the round, where a quantile moves it."""
        return self._parts.chain.clip_of(self.shared) if self._parts.chain.moves_clip else None

    def _clip_as_recorded(self) -> Mapping[str, float]:
        return {} if self._clip is None else {"clip": self._clip}

    def _zeros(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return 0 for each vector that clients would report, (d,), where the server is."""
        size, home = self._parts.model.vector.numel(), self._parts.server_home
        names = self._parts.method.reported(plan.alike)
        return {name: torch.zeros(size, dtype=torch.float64, device=home) for name in names}

    def _finest(self, units: Mapping[str, Units]) -> Mapping[str, float] | None:
        return {name: own[-1] for name, own in units.items()} if self._is_exact else None

    def _never_drawn(self) -> int | None:
        """Return the number of clients whose private part is still the initial one; None without private parts."""
        return int((self._parts.cohorts.present & ~self.touched).sum()) if self._parts.model.own else None

    def _compared(self, plan: RoundPlan, checks: Sequence[Check], sums: Sums) -> list[Suspicion]:
        """Return the checks whose hashes differ; none of a client that was skipped.

        Raises:
            EnvironmentFailure: there is one, and the recipe has ``sentinel: strict``.
        """
        found = []
        for check in checks:
            first, second = (0, 0) if sums.again is None else sums.again[check.place].tolist()
            if first and second and first != second:
                client, rank = int(plan.cohort.clients[check.place]), plan.ranks[check.place]
                hashes = f"{first:016x}", f"{second:016x}"
                found.append(Suspicion(plan.round, client, check.variant, rank, check.rank, *hashes))
        if found and self._parts.sentinel == "strict":
            remedy = "docs/bits.md says what to look at; sentinel: on goes on and records it"
            raise EnvironmentFailure(str(found[0]), remedy=remedy)
        return found

    def _attempt(
        self,
        plan: RoundPlan,
        units: Mapping[str, Units],
        requests: Request,
        written: int,
        checks: Sequence[Check],
    ) -> tuple[Sums, Mapping[int, State], Mapping[str, float]]:
        """Train a round's cohort and reduce what it reports, in these units.

        Returns:
            The sums, the next states of the clients trained here, and the seconds spent.

        Raises:
            Diverged, EnvironmentFailure: as `round` does.
        """
        round = plan.round
        _, scalars = reported_names(self._parts.method, self.buffers, alike=plan.alike)
        own = int(np.count_nonzero(np.equal(plan.ranks, self._world.rank)))
        watched = [check.place for check in checks]
        masks = None
        if self._parts.masks is not None:
            about = plan.cohort.clients.tolist(), plan.cohort.counts, plan.factors
            masks = self._parts.masks.of_round(round, *about)
        self._buffer.open(units, len(plan.cohort.clients), scalars, own, watched, masks)  # may wait for other ranks
        started = time.perf_counter()
        states, failure = self._training(plan)
        self._parts.watchdog.stage(f"round {round}: training, the device's last work")
        self._buffer.settle()  # a GPU has trained only then
        failure = failure or self._buffer.failure
        checked = self._sentinel(plan, checks, self._buffer, trains=failure is None)
        idle = self._training.moving_seconds + checked
        trained, packed = time.perf_counter(), self._buffer.seconds["pack"]
        self._parts.watchdog.stage(f"round {round}: waiting for other ranks", waits=True)
        with self._world.ends_within(PATIENCE, failure) if failure else nullcontext():
            sums = self._buffer.reduce(
                self._state_hash().value,
                trained - started,
                idle_seconds=idle,
                requests=requests,
                written=written,
            )
        failure = failure or self._buffer.failure
        reduced, local = time.perf_counter(), sums.local_seconds
        check_sums(sums, round, plan.cohort, plan.ranks, failure, self._parts.federation, self._world)
        waited = float(local.max() - local[self._world.rank])
        seconds = {
            "local": float(local.max()),
            "convert": packed,
            "wait": float((local.max() - local).mean()),
            "reduce": max(reduced - trained - waited, 0.0),
            **({"sentinel": checked} if checks else {}),
        }
        return sums, states, seconds

    def _better_units(
        self, units: Mapping[str, Units], counts: Mapping[str, np.ndarray], sums: Sums, round: int
    ) -> Mapping[str, Units] | None:
        """Return units that suit what the clients reported, where those that were used do not; else None."""
        if self._parts.masks is not None:
            return None
        if not self._is_exact or self._is_bounded:
            check_range(sums, counts, round, self._parts.reduction)
            return None
        entries = self.magnitudes.entries_of
        terms = {name: exact_terms(own, counts[name], entries(name)) for name, own in sums.bounds.items()}
        if all(suffice(units[name], own, self._dtype) for name, own in terms.items()):
            return None
        check_range(sums, counts, round, self._parts.reduction)
        return {name: units[name] if own is None else units_for(own, self._dtype) for name, own in terms.items()}

    def plan(self, round: int) -> RoundPlan:
        """Draw and place the round's cohort."""
        cohort = self._parts.cohorts.round(round)
        effective_steps, factors = effective_steps_and_factors(self._parts.method, self._parts.stepping, cohort, round)
        common, lr = common_to_all(effective_steps), self._parts.stepping.lr(round)
        w, shared = self._server.for_clients(self._device)
        return RoundPlan(
            round=round,
            lr=lr,
            cohort=cohort,
            ranks=self._parts.placement.place(cohort.clients, cohort.work, cohort.steps),
            places=range(len(cohort.clients)),
            effective_steps=effective_steps,
            common_effective_steps=common,
            factors=factors,
            alike=common is not None and are_ones(factors),
            w=self._parts.chain.received(w, self._layout, round, lr, self._parts.seed),
            shared=shared,
            touched=self.touched,
            dropped=None if self._parts.masks is None else self._parts.masks.dropped(round, len(cohort.clients)),
        )

    def _step(self, means: Means, plan: RoundPlan) -> ServerUpdate:
        """Take the server's step, and return it.

        Raises:
            Diverged: the model is not finite afterwards.
        """
        context = RoundContext(
            plan.round,
            plan.lr,
            None,
            plan.alike,
            seed=self._parts.seed,
            purpose=Purpose.SERVER_STEP,
            num_parameters=self._parts.model.num_parameters,
        )
        return self._server.step(means, context)

    def replicated(self) -> dict[str, Tensor]:
        """Return all that every rank holds alike after a round: what a checkpoint needs besides the clients' states."""
        touched = {"touched": torch.from_numpy(np.flatnonzero(self.touched))}
        buffers = {f"averaged.{name}": tensor for name, tensor in self.buffers.state.items()}
        return {**self._server.replicated(), **touched, **buffers}

    def restore(self, replicated: Mapping[str, Tensor], clients: Mapping[int, State]) -> None:
        """Go back to where `replicated` was taken; `clients` are the states of those at home here."""
        self._server.restore(replicated)
        self.buffers.restore({name: replicated[f"averaged.{name}"] for name in self.buffers.state})
        self.touched[:] = False
        self.touched[replicated["touched"].numpy()] = True
        for client, state in clients.items():
            self._parts.clients.commit({client: {name: tensor.to(self._device) for name, tensor in state.items()}})

    def evaluated(self) -> Tensor:
        """Return the model that ``evaluate.model`` names, after the last round, (d,) in the run's dtype.

        It lies where the server does.
        """
        return self._server.evaluated()

    def _means(self, plan: RoundPlan, sums: Sums) -> tuple[Means, Mapping[str, float]]:
        """Return the round's means, and numbers for the record on how they were made."""
        cohort, done, kept = plan.cohort, sums.status != SKIPPED, _kept(plan.cohort, sums)
        reported = {name: total for name, total in sums.vectors.items() if name not in self.buffers.entries}
        vectors: Mapping[str, Tensor] = (
            reported if kept == 1.0 else {name: quotient(total, kept) for name, total in reported.items()}
        )
        noted: dict[str, float] = {}
        if self._parts.chain.robust is not None:
            vectors, exchanges = self._robust_means(plan, sums, vectors)
            noted = {ROBUST_EXCHANGES: exchanges}
        factor = self._skip_correction(plan, done)
        if factor != 1.0 and DELTA in vectors:
            vectors = {**vectors, DELTA: vectors[DELTA] * factor}
        scalars = {name: sums.scalars[name] for name in self._parts.method.local.scalars}
        each = {name: np.where(done, own, math.nan) for name, own in scalars.items()}
        means = Means(
            vectors=vectors,
            mean_delta_sq=math.nan
            if DELTA not in vectors
            else float((cohort.shares * sums.delta_sq).sum()) / kept * factor * factor,
            delta_sq=math.nan,
            fraction=cohort.fraction * kept,
            cohort_size=int(done.sum()),
            round=plan.round,
            lr=plan.lr,
            effective_steps=plan.common_effective_steps,
            scalars={name: float((cohort.shares * own).sum()) / kept for name, own in scalars.items()},
            client_scalars=each if self._parts.method.client_scalars else {},
        )
        means = self._parts.chain.after(means, self._parts.seed, self._clip)
        if DELTA not in means.vectors or not self._server.needs_delta_sq:
            return means, noted
        return replace(means, delta_sq=self._norm(means.delta)), noted

    def _updates(self, plan: RoundPlan, sums: Sums) -> Mapping[int, Tensor]:
        """Return Δ_i of each client that was not skipped, on every rank."""
        self._parts.watchdog.stage(f"round {plan.round}: updates of all clients", waits=True)
        kept, size = self._buffer.kept, len(plan.cohort.clients)
        assert kept is not None
        rows = kept.gathered(DELTA, sums.vectors[DELTA], size, self._dtype)
        return {int(plan.cohort.clients[place]): rows[place] for place in np.flatnonzero(sums.status != SKIPPED)}

    def _robust_means(
        self, plan: RoundPlan, sums: Sums, means: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        """Return what takes the place of the vectors' means, and the number of Allreduces that it took."""
        cohort, kept, rule = plan.cohort, self._buffer.kept, self._parts.chain.robust
        counts = (sums.status != SKIPPED) & (cohort.shares > 0)
        assert kept is not None
        assert rule is not None
        if not counts.any():
            return means, 0
        self._parts.watchdog.stage(f"round {plan.round}: robust mean", waits=True)
        found, exchanges, places = dict(means), 0, np.flatnonzero(counts).tolist()
        rule.check_size(len(places), f"round {plan.round}: means")
        for name in (name for name in means if name != MOVED):
            bounds = sums.bounds[name] * np.abs(plan.factors) if name == DELTA else sums.bounds[name]
            about = places, cohort.shares[counts], bounds[counts], self._dtype
            vectors = kept.of(name, means[name], *about)
            context = PartContext(plan.round, plan.lr, self._parts.seed, 0)
            try:
                found[name] = rule.of(vectors, context).to(means[name].device)
            except InputError as error:
                raise InputError(f"round {plan.round}: {error}") from None
            exchanges += vectors.exchanges
        return found, exchanges

    def _norm(self, delta: Tensor) -> float:
        """Return ‖Δ̄‖², in the same bits wherever Δ̄ lies."""
        if delta.device.type == "cpu":
            return squared_norm(delta)
        return norm_from(self._squares(delta).cpu(), len(delta))

    def _skip_correction(self, plan: RoundPlan, done: np.ndarray) -> float:
        """Return the factor that normalises Δ̄ as if the skipped clients had not been drawn.

        Raises:
            Diverged: no one number does.
        """
        method, stepping = self._parts.method, self._parts.stepping
        factor = skip_correction(method, stepping, plan.cohort, plan.round, plan.factors, done)
        if factor is None:
            skipped = ", ".join(map(str, plan.cohort.clients[~done].tolist()))
            what = f"round {plan.round}: without client {skipped} the others' updates would have other factors"
            raise Diverged(f"{what}, each another", remedy="use on_bad_client: stop, or another normalize")
        return factor

    @property
    def hash(self) -> str:
        """Hash of w, server and shared state, averaged buffers and magnitudes: 64 bits, hexadecimal, as recorded."""
        return str(self._state_hash())

    def _state_hash(self) -> StateHash:
        """Return the hash of what must be the same on every rank.

        Taken twice a round: after the step for the record, and anew before the next Allreduce, so that damage to a
        rank's memory in between ends the round that it hit. Of a server on a GPU it is taken once, of its host copies,
        when it is asked for: damage to the GPU's memory is in the next one.
        """
        magnitudes, copies = repr(self.magnitudes.state()), (self._server.on_host(), self.buffers.state)
        known = self._hashed
        if known is not None and known.magnitudes == magnitudes and all(map(is_, known.copies, copies)):
            return known.hash
        found = StateHash(self.w, [self.server, self.shared, self.buffers.state], magnitudes)
        if self._parts.server_home.type == "cpu":
            _ = found.value
        else:
            self._hashed = _Hashed(copies, magnitudes, found)
        return found


class _Trained(NamedTuple):
    """A cohort's training, reduced; the fields of `RoundResult` of the same names, and the next states."""

    sums: Sums
    states: Mapping[int, State]
    seconds: Mapping[str, float]
    units: Mapping[str, Units]
    checks: int
    suspicions: Sequence[Suspicion]
    attempts: int = 1


class _Hashed(NamedTuple):
    """A hash of the state, and what it is of."""

    copies: tuple[State, ...]
    magnitudes: str
    hash: StateHash


def _kept(cohort: Cohort, sums: Sums) -> float:
    """Return the share of the cohort's weight not skipped: exactly 1 without skipped clients, or without any weight."""
    done = sums.status != SKIPPED
    return 1.0 if done.all() or not cohort.shares.any() else float(cohort.shares[done].sum())
