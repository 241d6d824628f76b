"""The sentinel: now and then a client is trained once more elsewhere, and both updates are compared.

That a client's bits do not depend on its slot, its neighbours and its rank follows from how tiles are made, as far as
libraries round by shapes and alignments alone. What is left of belief in them is watched while a run goes on: an
addressed draw of clients is trained again

    slots        in every slot of a tile at once, beside copies of itself
    alone        in a tile without neighbours
    rank         alone, on another rank, to which its state goes along as a copy

in turn, and the hashes of both updates travel in the round's own Allreduce. This takes at most `BUDGET` of the tiles
that are trained, the first round of a process apart, whose checks are one of each variant. It changes no bit of a run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.client.state_store import ClientStates
from hpcfed.errors import RAISED
from hpcfed.local_round import RoundPlan, Training, reported_names
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import answer, upload
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.update_hash import HashKeeper
from hpcfed.rng import Purpose, stream
from hpcfed.types import State

log = logging.getLogger("hpcfed")

BUDGET = 0.01
"""Checks in relation to the tiles trained, after the first round."""
VARIANTS = ("slots", "alone", "rank")


class Check(NamedTuple):
    """A client that is trained once more.

    Attributes:
        place: in the round's cohort.
        variant: one of `VARIANTS`.
        rank: where.
    """

    place: int
    variant: str
    rank: int


@dataclass(frozen=True)
class Suspicion:
    """A client whose update was another when it was trained once more.

    Attributes:
        round, client, variant: which, and how.
        rank, other_rank: that trained it for the round, and once more.
        hash, other_hash: of the updates.
    """

    round: int
    client: int
    variant: str
    rank: int
    other_rank: int
    hash: str
    other_hash: str

    def __str__(self) -> str:
        how = {
            "slots": "in other slots of a tile",
            "alone": "in a tile without neighbours",
            "rank": f"on rank {self.other_rank}, not {self.rank}",
        }[self.variant]
        hashes = f"{self.hash} and {self.other_hash}"
        return f"round {self.round}: the update of client {self.client} was another {how} ({hashes})"


class Sentinel:
    """Draws checks, and makes those of this rank; the same draw on every rank.

    Args:
        parts: of the simulation.
        averaged: the module's averaged buffers.
        is_on: whether anything is checked.
    """

    def __init__(self, parts: Parts, averaged: AveragedBuffers, *, is_on: bool):
        self._parts, self._averaged, self._is_on = parts, averaged, is_on
        self._tiles, self._checks, self._turn = 0.0, 0, 0  # trained and made after the first round, and variants so far
        self._seen: set[tuple[Any, ...]] = set()
        self._begun = False
        engine = parts.engine
        elsewhere = parts.world.size > 1 and parts.devices.are_alike  # of another device, bits are others
        can = {"slots": engine.tile > 1 and not engine.fixed_slots, "alone": True, "rank": elsewhere}
        self._variants = [variant for variant in VARIANTS if can[variant]]

    def draw(self, plan: RoundPlan) -> list[Check]:
        """Return the checks of a planned round."""
        if not self._is_on:
            return []
        if not self._begun:
            self._begun, count = True, len(self._variants)
        else:
            counts = np.bincount(plan.ranks, minlength=self._parts.world.size)
            self._tiles += float(np.ceil(counts / self._parts.engine.tile).sum())
            count = int(BUDGET * self._tiles) - self._checks
            self._checks += count
        if not count:
            return []
        work = np.flatnonzero(plan.cohort.steps > 0)
        left = stream(self._parts.seed, Purpose.SENTINEL, plan.round).permutation(work).tolist()
        checks: list[Check] = []
        while len(checks) < count and left:  # each client once, since its slot has room for one hash
            checks.append(self._one(plan, left))
            left.remove(checks[-1].place)
        return checks

    def _one(self, plan: RoundPlan, places: Sequence[int]) -> Check:
        """Return a check of the first of some places whose kind has not been checked yet, else of the first."""
        variant = self._variants[self._turn % len(self._variants)]
        self._turn += 1
        kinds = {place: (variant, *self._kind(plan, place)) for place in places}
        place = next((place for place in places if kinds[place] not in self._seen), places[0])
        self._seen.add(kinds[place])
        rank = plan.ranks[place]
        if variant == "rank":
            rank = (rank + 1 + self._turn // len(self._variants)) % self._parts.world.size
            rank = rank if rank != plan.ranks[place] else (rank + 1) % self._parts.world.size
        return Check(place, variant, rank)

    def _kind(self, plan: RoundPlan, place: int) -> tuple[int, int, int]:
        """Return what a library might round by: the last minibatch's samples, tiles that are full or not, and the rank.

        Of a tile that is not full, how many clients are in it.
        """
        size = int(self._parts.federation.sizes[plan.cohort.clients[place]])
        width = max(1, int(plan.cohort.work[place] // max(1, plan.cohort.steps[place])))
        on_rank = int(np.count_nonzero(np.equal(plan.ranks, plan.ranks[place])))
        return size % width, on_rank % self._parts.engine.tile, plan.ranks[place]

    def __call__(self, plan: RoundPlan, checks: Sequence[Check], buffer: RoundBuffer, *, trains: bool) -> float:
        """Make this rank's checks, and put the hashes into the buffer; return the seconds that it took.

        Called on every rank, after training: states go between ranks. Without `trains`, since training failed here,
        nothing is trained again.
        """
        started = time.perf_counter()
        own = self._parts.world.rank
        for check in checks:
            state = self._state_of(plan, check)
            if check.rank == own and trains:
                client = int(plan.cohort.clients[check.place])
                self._parts.watchdog.stage(f"round {plan.round}, client {client}: training it once more (sentinel)")
                try:
                    buffer.check(check.place, self._trained_again(plan, check, state))
                except RAISED as error:  # the round stands without it
                    answer(error)
                    log.warning("round %d, client %d: not trained once more", plan.round, client, exc_info=error)
        return time.perf_counter() - started if checks else 0.0

    def _state_of(self, plan: RoundPlan, check: Check) -> State | None:
        """Return a copy of the client's state, from the rank that trained it; None elsewhere, or if it has none."""
        parts, client, trained = self._parts, int(plan.cohort.clients[check.place]), plan.ranks[check.place]
        method, own = parts.method.local, parts.world.rank
        if not method.stateful or not plan.touched[client]:
            return None
        if check.rank == trained:
            return _copied(parts.clients.get(client)) if check.rank == own else None
        example = method.begin(parts.initial_w)
        if own == trained:
            state = parts.clients.get(client) or example
            parts.world.exchange([(state[name].cpu().contiguous(), check.rank) for name in sorted(example)], [])()
        elif own == check.rank:
            state = {name: torch.empty(example[name].shape, dtype=example[name].dtype) for name in sorted(example)}
            parts.world.exchange([], [(tensor, trained) for tensor in state.values()])()
            return {name: upload(tensor, example[name].device) for name, tensor in state.items()}
        return None

    def _trained_again(self, plan: RoundPlan, check: Check, state: State | None) -> list[int]:
        """Train a client once more; return the hash of each update."""
        keeper = HashKeeper(*reported_names(self._parts.method, self._averaged, alike=plan.alike))
        states = _OneState(self._parts.clients, int(plan.cohort.clients[check.place]), state)
        parts = replace(self._parts, clients=cast(ClientStates, states), skips_bad=False)
        copies = self._parts.engine.tile if check.variant == "slots" else 1
        Training(parts, keeper, self._averaged).train_tile(plan, [check.place] * copies, {})
        return [found for _, found in keeper.hashes]


class _OneState:
    """The clients' states, one of which is a copy."""

    def __init__(self, states: ClientStates, client: int, state: State | None):
        self._states, self._client, self._state = states, client, state

    def get(self, client: int) -> State | None:
        """Return a client's state."""
        return self._state if client == self._client else self._states.get(client)


def _copied(state: State | None) -> State | None:
    return None if state is None else {name: tensor.clone() for name, tensor in state.items()}
