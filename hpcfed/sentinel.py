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


class _Drawn(NamedTuple):
    """A round's members with work.

    Attributes:
        places: in the cohort, in the order drawn, (n,).
        kinds, kind_of: the different kinds, and the index of each place's, (n,).
        left: places that have no check in this round, (n,) bool.
    """

    places: np.ndarray
    kinds: Sequence[tuple[int, int, int]]
    kind_of: np.ndarray
    left: np.ndarray


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
        drawn = self._drawn(plan, stream(self._parts.seed, Purpose.SENTINEL, plan.round).permutation(work))
        # Each client once, since its slot has room for one hash.
        return [self._one(plan, drawn) for _ in range(min(count, len(work)))]

    def _one(self, plan: RoundPlan, drawn: _Drawn) -> Check:
        """Return a check of the first place left whose kind has not been checked yet, else of the first one left."""
        variant = self._variants[self._turn % len(self._variants)]
        self._turn += 1
        is_new = np.array([(variant, *kind) not in self._seen for kind in drawn.kinds])
        fits = drawn.left & is_new[drawn.kind_of]
        at = int((fits if fits.any() else drawn.left).argmax())
        drawn.left[at] = False
        self._seen.add((variant, *drawn.kinds[drawn.kind_of[at]]))
        place = int(drawn.places[at])
        rank = plan.ranks[place]
        if variant == "rank":
            rank = (rank + 1 + self._turn // len(self._variants)) % self._parts.world.size
            rank = rank if rank != plan.ranks[place] else (rank + 1) % self._parts.world.size
        return Check(place, variant, rank)

    def _drawn(self, plan: RoundPlan, places: np.ndarray) -> _Drawn:
        """Return places in the order drawn, (n,), each with its kind.

        A kind is what a library might round by: the last minibatch's samples, tiles that are full or not, and the rank.
        Of a tile that is not full, how many clients are in it.
        """
        cohort, size = plan.cohort, self._parts.world.size
        ranks = np.asarray(plan.ranks, np.int64)
        width = np.maximum(1, cohort.work[places] // np.maximum(1, cohort.steps[places]))
        last = self._parts.federation.sizes[cohort.clients[places]] % width
        found, kind_of = np.unique(last * size + ranks[places], return_inverse=True)
        last_tile = np.bincount(ranks, minlength=size) % self._parts.engine.tile
        kinds = [(key // size, int(last_tile[key % size]), key % size) for key in found.tolist()]
        return _Drawn(places, kinds, kind_of, np.full(len(places), True))

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
