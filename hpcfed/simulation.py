"""A federated run's state, and one round of it."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from hpcfed.averaging import evaluated_model
from hpcfed.checks import check_report, check_step, differing
from hpcfed.client.solver import LocalSolver
from hpcfed.client.states import ClientStates
from hpcfed.cohort import Cohort, Cohorts
from hpcfed.data.format import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import Diverged, EnvironmentFailure, HpcfedError
from hpcfed.flat import FlatModel
from hpcfed.placement import spread
from hpcfed.reduce.exact import range_of
from hpcfed.reduce.fused import FAILED, RoundBuffer, Sums
from hpcfed.types import Means, Method, State, Who
from hpcfed.world import PATIENCE, World

log = logging.getLogger("hpcfed")


@dataclass(frozen=True)
class Parts:
    """What a simulation is put together from (see `hpcfed.setup`)."""

    method: Method
    federation: Federation
    model: FlatModel
    solver: LocalSolver
    shards: Shards
    cohorts: Cohorts
    home: np.ndarray
    """Home rank of each client, (N,)."""
    spread: bool
    """Whether a round's cohort may leave home."""
    clients: ClientStates
    """States of the clients at home here, as far as they have taken part."""
    evaluate_model: str
    world: World


@dataclass(frozen=True)
class Outcome:
    """What one round came to; the same on every rank, but for the seconds."""

    cohort: Cohort
    means: Means
    server_lr: float | None
    local_loss: float | None
    gradients: int
    stop: bool
    """Whether a rank asked all to stop after this round."""
    seconds: dict[str, float]
    imbalance: float


@dataclass(frozen=True)
class _Work:
    """What is known of a cohort's work before it is done: ‖a_i‖₁ of each member, by what factor each Δ_i counts, and
    the ‖a‖₁ that all have in common, if they do; None where not asked for."""

    displacements: list[float | None]
    factors: np.ndarray
    common: float | None


class Simulation:
    """The replicated server, and the clients that this rank trains.

    Attributes:
        w: the server's model, (d,) in the run's dtype on the host; the same on every rank.
        server: the server method's state; the same on every rank.
        shared: what the server keeps for the clients; the same on every rank.
    """

    def __init__(self, parts: Parts):
        self._parts = parts
        self._world = parts.world
        self._device, self._dtype = parts.model.vector.device, parts.model.vector.dtype
        self._buffer = RoundBuffer(parts.model.vector.numel(), self._dtype, self._device, parts.world)
        self.w: Tensor = parts.model.vector.detach().to("cpu", copy=True)
        self.server: State = parts.method.server.begin(self.w.double())
        self.shared: State = parts.method.local.begin_shared(self.w.double())
        self._previous = self._mean_delta = self.w
        self._initial = self.w.to(self._device, copy=True)

    def round(self, round: int, *, stop: bool = False) -> Outcome:
        """Train a round, counted from 1: local work, the one Allreduce, the server's step.

        `stop`, from any rank, reaches all ranks' `Outcome`.

        Raises:
            Diverged: a client's update is not finite, or the sums left their range.
            EnvironmentFailure: a client's training raised, or the ranks' states differ.
        """
        started = time.perf_counter()
        cohort = self._parts.cohorts.round(round)
        ranks = self._place(cohort)
        work = self._work(round, cohort)
        self._buffer.open(self._parts.method.local.vectors(work.common is not None), len(cohort.clients))
        states, failure = self._train(round, cohort, ranks, work)
        trained = time.perf_counter()
        with self._world.ends_within(PATIENCE, f"hpcfed: {failure}") if failure else nullcontext():
            sums = self._buffer.reduce(self._hash(), trained - started, stop=stop)
        reduced = time.perf_counter()
        self._check(round, cohort, ranks, sums, failure)
        means = self._means(round, cohort, sums, work)
        stepped = self._parts.method.server.step(self.w.double(), self.server, means)
        check_step(self._parts.method.name, stepped, self.w)
        self.shared = self._parts.method.local.share(self.shared, means)
        self._previous, self._mean_delta = self.w, means.delta
        self.w, self.server = stepped.w.to(self._dtype), stepped.state
        self._parts.clients.commit(states)
        if not math.isfinite(float(self.w.sum())):
            raise Diverged(f"round {round}: the server's model is not finite", remedy=_LOWER)
        local = sums.local_seconds
        waited = float(local.max() - local[self._world.rank])
        steps = int(sums.steps.sum())
        return Outcome(
            cohort=cohort,
            means=means,
            server_lr=stepped.server_lr,
            local_loss=float(sums.loss_sum.sum()) / steps if steps else None,
            gradients=steps,
            stop=bool(sums.stops.any()),
            seconds={
                "local": float(local.max()),
                "wait": float((local.max() - local).mean()),
                "reduce": max(reduced - trained - waited, 0.0),
                "server": time.perf_counter() - reduced,
            },
            imbalance=float(local.max() / local.mean()) if local.mean() > 0 else 1.0,
        )

    def evaluated(self) -> Tensor:
        """Return the model that ``evaluate.model`` names, after the last round, (d,) in the run's dtype."""
        which = self._parts.evaluate_model
        return evaluated_model(which, self.w, self._previous, self._mean_delta, self.shared).to(self._dtype)

    def _place(self, cohort: Cohort) -> list[int]:
        """Return the rank of each cohort member, (S,)."""
        home = self._parts.home[cohort.clients].tolist()
        if not self._parts.spread or self._world.size == 1:
            return home
        return spread(cohort.work.tolist(), home, self._world.size)

    def _work(self, round: int, cohort: Cohort) -> _Work:
        """Return what every rank knows of the cohort's work before it is done."""
        method, size = self._parts.method, len(cohort.clients)
        if not method.uses_displacement:
            return _Work([None] * size, np.ones(size), None)
        displacements = [
            self._parts.solver.displacement(steps, guessed, round=round, mu=method.local.strength)
            for steps, guessed in zip(cohort.steps.tolist(), cohort.guessed.tolist(), strict=True)
        ]
        known = np.array(displacements, dtype=np.float64)
        factors = np.ones(size)
        if method.normalize is not None:
            factors = method.normalize.factors(known, cohort.steps, cohort.shares, method.local.strength)
        common = displacements[0] if len(set(displacements)) == 1 else None
        return _Work(displacements, factors, common)

    def _train(
        self, round: int, cohort: Cohort, ranks: list[int], work: _Work
    ) -> tuple[dict[int, State], HpcfedError | None]:
        """Train this rank's members of the cohort; return their next states, and what went wrong, if anything."""
        states: dict[int, State] = {}
        w = self.w.to(self._device)
        shared = {name: tensor.to(self._device, self._dtype) for name, tensor in self.shared.items()}
        for place, (client, rank) in enumerate(zip(cohort.clients.tolist(), ranks, strict=True)):
            if rank != self._world.rank:
                continue
            try:
                told = self._train_client(round, place, client, cohort, w, shared, work)
            except Exception as error:  # whatever a user's model, a device or a data file raises must reach all ranks
                self._buffer.fail(place)
                return {}, self._explain(error, round, client)
            if told is not None:
                states[client] = told
        return states, None

    def _train_client(
        self, round: int, place: int, client: int, cohort: Cohort, w: Tensor, shared: State, work: _Work
    ) -> State | None:
        """Train one client, add its report to the buffer, and return its next state."""
        method, sizes = self._parts.method.local, self._parts.federation.sizes
        who = Who(client, int(sizes[client]), float(sizes.mean()))
        state = self._parts.clients.get(client) or method.begin(self._initial)
        local = self._parts.solver.solve(
            w,
            self._parts.shards.client(client),
            method.tilt(w, shared, state, who),
            steps=int(cohort.steps[place]),
            guessed=float(cohort.guessed[place]),
            round=round,
            client=client,
        )
        told = method.report(replace(local, displacement=work.displacements[place]), w, shared, state, who)
        check_report(self._parts.method.name, told, self._buffer.names, local.delta)
        self._buffer.add(
            place,
            float(cohort.shares[place]),
            told.vectors,
            factor=float(work.factors[place]),
            loss_sum=local.loss_sum,
            steps=local.steps,
        )
        return told.state

    def _means(self, round: int, cohort: Cohort, sums: Sums, work: _Work) -> Means:
        first = next(iter(sums.vectors.values()))
        return Means(
            vectors=sums.vectors,
            mean_delta_sq=float((cohort.shares * sums.delta_sq).sum()),
            delta_sq=float(torch.dot(first, first)),
            fraction=cohort.fraction,
            cohort_size=len(cohort.clients),
            round=round,
            lr=self._parts.solver.lr(round),
            displacement=work.common,
        )

    def _hash(self) -> int:
        """Hash of all that must be the same on every rank, as a signed 64-bit integer."""
        digest = xxhash.xxh3_64(self.w.numpy().data)
        for state in (self.server, self.shared):
            for name in sorted(state):
                digest.update(state[name].numpy().tobytes() if state[name].dim() == 0 else state[name].numpy().data)
        return int(np.uint64(digest.intdigest()).view(np.int64))

    def _explain(self, error: Exception, round: int, client: int) -> HpcfedError:
        """Write the traceback to this rank's log, and return the line that all ranks will end with."""
        place = f"{self._whereabouts(round, client)}, rank {self._world.rank} on {self._world.hosts[self._world.rank]}"
        log.error("%s: training raised", place, exc_info=error)
        if isinstance(error, HpcfedError):
            return type(error)(f"{place}: {error}")
        what = f"{place}: {type(error).__name__}: {error}"
        return EnvironmentFailure(what, remedy=f"see the run folder's logs/rank-{self._world.rank}.log")

    def _whereabouts(self, round: int, client: int) -> str:
        return f"round {round}, client {client} ({self._parts.federation.client_name(client)})"

    def _check(self, round: int, cohort: Cohort, ranks: list[int], sums: Sums, failure: HpcfedError | None) -> None:
        """Raise, on every rank alike, what makes this round's sums unusable."""
        if len(set(sums.hashes.tolist())) > 1:
            raise EnvironmentFailure(
                f"round {round}: the ranks no longer hold the same model",
                got=differing(sums.hashes, self._world.hosts),
                remedy="suspect that host's memory or its software; run 'hpcfed doctor' on it",
            )
        failed = np.flatnonzero(sums.status == FAILED)
        if len(failed):
            raise self._world.broadcast(failure, root=ranks[failed[0]]) or EnvironmentFailure("a rank failed")
        bad = np.flatnonzero(~np.isfinite(sums.largest))
        if len(bad):
            client = int(cohort.clients[bad[0]])
            place = f"{self._whereabouts(round, client)}, rank {ranks[bad[0]]}"
            raise Diverged(f"{place}: its update is not finite after {sums.steps[bad[0]]} steps", remedy=_LOWER)
        if sums.largest.sum() >= range_of(self._dtype):
            client = int(cohort.clients[np.argmax(sums.largest)])
            raise Diverged(
                f"{self._whereabouts(round, client)}: updates leave the range of the exact sums",
                expected=f"magnitudes below {range_of(self._dtype):.0f} in total",
                got=f"{sums.largest.sum():.3g}",
                remedy=_LOWER,
            )


_LOWER = "lower local.lr, or set local.clip_norm"
