"""The buffer of a training round: all updates, scalars and flags of its ranks, in one Allreduce.

    [ vectors: words × entries of each  |  cohort slots: S × client_slot(V, K)  |  rank slots: P × RANK_SLOT ]

The vectors are exact sums in int64 (`hpcfed.reduce.exact`), each in as many words as its range needs, or float32 ones
(`hpcfed.reduce.fast`). A slot has fields of 8 bytes; it is written by one rank and left 0 by all others, so its sum as
int64 is what that rank wrote: integers as they are, float64 as their bit patterns. Every rank thus knows every client's
scalars and every rank's hash exactly, in either kind of sum.

Large vectors may go another way than that Allreduce (`hpcfed.reduce.memory`). Client states that move, evaluations and
checkpoints communicate separately.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import cast

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.errors import HpcfedError
from hpcfed.ranks.accelerators import check_refusals, is_fault
from hpcfed.ranks.devices import fault
from hpcfed.ranks.graphs import Graphs
from hpcfed.ranks.world import World
from hpcfed.reduce.exact import ExactSum
from hpcfed.reduce.fast import FastSum
from hpcfed.reduce.finite import Unread, check_own, failures, unread
from hpcfed.reduce.kept import KeptVectors
from hpcfed.reduce.masked import MaskedSum
from hpcfed.reduce.masks import NUMBERS, RoundMasks
from hpcfed.reduce.memory import HOST, SumMemory, Totals
from hpcfed.reduce.rows import Number, Numbers, Words, read_together, rows_of
from hpcfed.reduce.slots import DONE, FAILED, RANK_SLOT, SKIPPED, Sums, client_slot
from hpcfed.reduce.units import Units
from hpcfed.reduce.update_hash import hash_of_update
from hpcfed.reduce.weighted_update import WeightedUpdate
from hpcfed.types import DELTA, MOVED, State

KINDS: Mapping[str, type[ExactSum] | type[FastSum]] = {"exact": ExactSum, "fast": FastSum}
"""By the recipe's ``reduction``."""


class RoundBuffer:
    """The buffer of a round: filled client by client, reduced once, read by all.

    Args:
        num_entries: d.
        dtype: of the vectors to come.
        others: entries of vectors that are not of d, by name.
        device: where they will lie, and where the sums are kept until they are reduced.
        world: the ranks.
        kind: of the sums, ``exact`` or ``fast``.
        sum_on_device: sums the device's memory over ranks; None: MPI sums a copy on the host, in page-locked memory.
        hashes_updates: whether the hash of each client's update travels in its slot.
        watched: whether slots have room for the hashes that the sentinel compares.
        arithmetic: of norms, in exact sums.
        home: where the sums over ranks are wanted: the host, or the device, on all ranks alike.
        mixed: whether some ranks have a GPU, and others none; then `home` is the host, and nothing `sum_on_device`.
        graphs: records the adding of tiles on a device, in exact sums.
        keeps_vectors: whether updates are kept beside their sum.
        masked: whether rounds have masks: slots then tell of clients whether they sent, and no more.

    Attributes:
        kept: those of the open round; None where none are.
        is_torn: whether an update was added in part: the round cannot go on.
        failure: why this rank takes no part in the open round's reduction, or a client of it may not; None if all do.
        seconds: what this rank has spent on the open round: in `add` (``pack``), in the Allreduce, waiting for other
            ranks included (``allreduce``), and on turning its result into float64 (``unpack``).
    """

    def __init__(
        self,
        num_entries: int,
        dtype: torch.dtype,
        device: torch.device,
        world: World,
        *,
        kind: str = "exact",
        sum_on_device: Callable[[Tensor], None] | None = None,
        hashes_updates: bool = False,
        watched: bool = False,
        others: Mapping[str, int] | None = None,
        arithmetic: Arithmetic = LIBRARIES,
        home: torch.device = HOST,
        mixed: bool = False,
        graphs: Graphs | None = None,
        keeps_vectors: bool = False,
        masked: bool = False,
    ):
        self._extra = NUMBERS if masked else 0
        self._masked: MaskedSum | None = None
        self.kept = KeptVectors(world) if keeps_vectors else None
        self._hashes_updates, self._watched = hashes_updates, watched
        self._to_check: frozenset[int] = frozenset()
        self._num_entries, self._others = num_entries, others or {}
        self._dtype, self._device, self._world = dtype, device, world
        self._kind = KINDS[kind]
        self._new_sum = partial(ExactSum, arithmetic=arithmetic, graphs=graphs) if kind == "exact" else FastSum
        self._memory = SumMemory(self._kind.word, device, world, sum_on_device, home, mixed=mixed, whole=masked)
        self._most_words = 0
        self._sums: Totals = {}
        self._units: Mapping[str, Units] = {}
        self._scalars: tuple[str, ...] = ()
        self._layout: tuple[object, ...] = ()
        self._at_once = min(rows_of(entries, device) for entries in (num_entries, *self._others.values()))
        self._waiting = list[WeightedUpdate]()
        self._unread: list[tuple[list[WeightedUpdate], list[tuple[Numbers, Numbers]]]] = []
        self._own_parts = list[Unread]()
        self.is_torn = False
        self.failure: HpcfedError | None = None
        self._slots = np.empty(0, np.int64)
        self._clients = self._ranks = np.empty(0, RANK_SLOT)
        self._status = self._slots
        self.seconds: dict[str, float] = {}

    def open(
        self,
        units: Mapping[str, Units],
        cohort_size: int,
        scalars: Sequence[str] = (),
        expected: int = 1,
        to_check: Iterable[int] = (),
        masks: RoundMasks | None = None,
    ) -> None:
        """Start sums of 0 for a round of S clients that report vectors and scalars of these names, in these units.

        `expected` is the number of updates that this rank is predicted to add: sums subtract their rounding constants
        in advance. The updates of the places `to_check` are hashed for the sentinel. `masks` are the round's.
        """
        entries = {name: self.entries_of(name) for name in units}
        self._masked = None if masks is None else MaskedSum(masks, entries)
        self._to_check = frozenset(to_check)
        layout = tuple(units), [self._kind.words_of(own) for own in units.values()], cohort_size, tuple(scalars)
        if layout == self._layout:
            self._slots.fill(0)
        else:
            self._lay_out(*layout)
            self._layout = layout
        self._units = units
        if tuple(self._sums) != layout[0]:
            parts = zip(units, self._memory.parts, strict=True)
            self._sums = {name: self._new_sum(part, units[name]) for name, part in parts}
        for (name, total), part in zip(self._sums.items(), self._memory.parts, strict=True):
            total.begin(part, units[name], cohort_size, expected)
        self._waiting.clear()
        self._unread.clear()
        self._own_parts.clear()
        if self.kept is not None:
            self.kept.begin([name for name in units if name not in self._others and name != MOVED])
        self.is_torn, self.failure = False, None
        self.seconds = self._memory.seconds = {"pack": 0.0, "allreduce": 0.0, "unpack": 0.0}

    def _lay_out(self, names: Sequence[str], each: list[int], cohort_size: int, scalars: tuple[str, ...]) -> None:
        """Make room for vectors of so many words an entry, and for the slots of S clients with these scalars."""
        self._scalars = scalars
        _, clients, ranks = self.sizes(each, cohort_size, len(scalars), names)
        if max(each) < self._most_words:  # a first round's, whose words were more
            self._memory.free()
            self._sums = {}
        self._most_words = max(each)
        self._memory.lay_out(
            [(words, self.entries_of(name)) for words, name in zip(each, names, strict=True)],
            clients + ranks + self._extra,
        )
        self._slots = np.zeros((clients + ranks) // self._kind.slot_words + self._extra, np.int64)
        first_of_ranks = clients // self._kind.slot_words
        self._clients = self._slots[:first_of_ranks].view(self._client_slot(len(each), len(scalars)))
        self._ranks = self._slots[first_of_ranks : len(self._slots) - self._extra].view(RANK_SLOT)
        self._status = self._clients["status"]

    def _client_slot(self, num_vectors: int, num_scalars: int) -> np.dtype[np.void]:
        return client_slot(num_vectors, num_scalars, hashed=self._hashes_updates, watched=self._watched)

    @property
    def is_large(self) -> bool:
        """Whether the sums of the last open round had memory of their own, each word's."""
        return self._memory.is_large

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors of the open round."""
        return tuple(self._sums)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The scalars of the open round."""
        return self._scalars

    def entries_of(self, name: str) -> int:
        """Return the length of a vector."""
        return self._others.get(name, self._num_entries)

    def sizes(
        self, words: Sequence[int], cohort_size: int, num_scalars: int = 0, names: Sequence[str] | None = None
    ) -> tuple[int, int, int]:
        """Return the sizes of the buffer's three sections in words: sums, slots of clients, slots of ranks.

        Args:
            words: of an entry, of each vector.
            cohort_size: S.
            num_scalars: of a client.
            names: of the vectors; by default all have d entries.
        """
        entries = [self._num_entries] * len(words) if names is None else map(self.entries_of, names)
        client = self._client_slot(len(words), num_scalars)
        slots = cohort_size * client.itemsize, self._world.size * RANK_SLOT.itemsize
        of_clients, of_ranks = (self._kind.slot_words * num_bytes // 8 for num_bytes in slots)
        return sum(map(mul, words, entries)), of_clients, of_ranks

    def add(self, update: WeightedUpdate, *, skips: bool = False) -> bool:
        """Add one client's update, and fill the slot of its place; see `Updates`."""
        place, weight, vectors = update.place, update.weight, update.vectors
        if skips:
            largest_entries = (float(vectors[name].abs().max()) for name in self._sums)
            if not all(map(math.isfinite, (*self._ordered(update), *largest_entries))):
                self.skip(place)
                return False
        if self._masked is not None:
            self._masked.check(vectors, update.loss_sum)
        started = time.perf_counter()
        self.is_torn = True  # until the update is added whole
        if self._at_once > 1:
            for name, total in self._sums.items():
                total.rows.put(len(self._waiting), vectors[name])
            self._waiting.append(update.without_vectors())
            if len(self._waiting) == self._at_once:
                self._add_waiting()
        else:
            added = [
                total.add(vectors[name], weight * update.factor if name == DELTA else weight)
                for name, total in self._sums.items()
            ]
            pairs = [(_several(squared), _several(largest)) for squared, largest in added]
            self._fill([update.without_vectors()], pairs)
        self._hash(update)
        self._keep(update)
        self._status[place] = DONE
        self.is_torn = False
        self.seconds["pack"] += time.perf_counter() - started
        return True

    def add_tile(self, updates: Sequence[WeightedUpdate]) -> None:
        """Add the updates of a tile; see `Updates`."""
        if self._at_once == 1 or len(self._sums) > 1 or self._masked is not None:
            for update in updates:
                self.add(update)
            return
        started, left = time.perf_counter(), list(updates)
        self.is_torn = bool(left)
        while left:
            row = len(self._waiting)
            some, left = left[: self._at_once - row], left[self._at_once - row :]
            for total in self._sums.values():
                total.rows.put_all(row, [update.vectors[DELTA] for update in some])
            for update in some:
                self._waiting.append(update.without_vectors())
                self._hash(update)
                self._keep(update)
            if len(self._waiting) == self._at_once:
                self._add_waiting()
            self._status[[update.place for update in some]] = DONE
        self.is_torn = False
        self.seconds["pack"] += time.perf_counter() - started

    def _ordered(self, update: WeightedUpdate) -> list[float]:
        """Return the scalars of an update in the round's order."""
        return [float(update.scalars[name]) for name in self._scalars]

    def _keep(self, update: WeightedUpdate) -> None:
        """Keep an update where they are kept, Δ_i as its sum has it."""
        if self.kept is not None:
            for name, vector in update.vectors.items():
                self.kept.keep(update.place, name, vector, update.factor if name == DELTA else 1.0)

    def _hash(self, update: WeightedUpdate) -> None:
        """Write the hash of an update where it is wanted."""
        place = update.place
        if self._hashes_updates or place in self._to_check:
            found = hash_of_update(update.vectors, self.names, self._ordered(update))
            if self._hashes_updates:
                self._clients["hash"][place] = found
            if place in self._to_check:
                self._clients["again"][place, 0] = found

    def check(self, place: int, others: Sequence[int]) -> None:
        """Write the hash that the update of a place has when it is trained once more: of several one that differs."""
        own = int(self._clients["again"][place, 0])  # 0 where another rank has trained it
        self._clients["again"][place, 1] = next((other for other in others if other != own), others[0])

    def _add_waiting(self) -> None:
        """Add the waiting updates to the sums."""
        if not self._waiting:
            return
        weights = np.array([update.weight for update in self._waiting])
        factors = np.array([update.factor for update in self._waiting])
        added = [total.add_rows(weights * factors if name == DELTA else weights) for name, total in self._sums.items()]
        self._fill(list(self._waiting), added)
        self._waiting.clear()

    def _fill(self, updates: list[WeightedUpdate], added: list[tuple[Numbers, Numbers]]) -> None:
        """Write the scalars of updates into their slots; a device's are kept for one copy before the reduction."""
        if self._device.type == "cpu":
            self._write(updates, added)
        else:
            self._unread.append((updates, added))

    def _read_back(self) -> None:
        """Fill in the scalars that wait; those on a device come in one copy."""
        there = [
            number
            for updates, added in self._unread
            for number in (*(one for pair in added for one in pair), *(update.loss_sum for update in updates))
            if isinstance(number, Tensor)
        ]
        pieces = iter(read_together([*there, *(own.sums for own in self._own_parts)]))
        for updates, added in self._unread:
            pairs = [tuple(next(pieces) if isinstance(one, Tensor) else one for one in pair) for pair in added]
            losses = [next(pieces)[0] if isinstance(each.loss_sum, Tensor) else each.loss_sum for each in updates]
            self._write([each._replace(loss_sum=loss) for each, loss in zip(updates, losses, strict=True)], pairs)
        for place, failure in failures(self._own_parts, pieces):
            self._status[place] = FAILED
            self.failure = self.failure or failure
        self._unread.clear()
        self._own_parts.clear()

    def check_own(self, place: int, own: State, where: Callable[[], str], *, at_once: bool = False) -> None:
        """Refuse a private part that is not finite, a device's in `settle`, by its one wait; see `Updates`."""
        if self._device.type == "cpu" or at_once:
            check_own(own)
        else:
            self._own_parts.append(unread(place, own, where))

    def _write(self, updates: Sequence[WeightedUpdate], added: Sequence[Sequence[Numbers]]) -> None:
        """Write the scalars of updates (n,), from the squared norms and largest entries, (n,), of each vector."""
        if self._masked is not None:
            self._add_numbers(self._masked, updates, dict(zip(self._sums, added, strict=True)))
            return
        slots, places = self._clients, [update.place for update in updates]
        slots["loss_sum"][places] = [update.loss_sum for update in updates]
        slots["steps"][places] = [update.steps for update in updates]
        if self._scalars:
            slots["scalars"][places] = [self._ordered(update) for update in updates]
        for number, (name, (squared, largest)) in enumerate(zip(self._sums, added, strict=True)):
            slots["bounds"][places, number] = largest
            if name == DELTA:
                slots["delta_sq"][places] = squared * np.square([update.factor for update in updates])

    @staticmethod
    def _add_numbers(
        masked: MaskedSum, updates: Sequence[WeightedUpdate], added: Mapping[str, Sequence[Numbers]]
    ) -> None:
        """Add the squared norms, losses and steps of updates to the numbers that are masked."""
        squares = np.asarray(added[DELTA][0]) if DELTA in added else np.zeros(len(updates))
        for update, square in zip(updates, squares.tolist(), strict=True):
            masked.add(abs(update.weight) * update.factor**2, square, float(update.loss_sum), update.steps)

    def _sent(self) -> list[int]:
        """Return the places of the clients whose updates are in the sums, as far as the slots tell."""
        return np.flatnonzero(self._status == DONE).tolist()

    def is_filled(self, place: int) -> bool:
        """Whether the client at this place has been added, skipped or failed."""
        return bool(self._status[place])

    def skip(self, place: int) -> None:
        """Leave the client at this place out of the round."""
        self._status[place] = SKIPPED

    def fail(self, place: int) -> None:
        """Mark the client at this place as one that could not be trained, which ends the run."""
        self._status[place] = FAILED

    def abandon(self, failure: HpcfedError) -> None:
        """Take part in the open round's reduction without this rank's device, which can do nothing more."""
        self.failure = failure

    def settle(self) -> None:
        """Add the updates that wait, and wait until a device has trained and added all that it was asked for."""
        if self.failure is not None:
            return
        started = time.perf_counter()
        try:
            self._add_waiting()
            self.seconds["pack"] += time.perf_counter() - started
            self._read_back()
            check_refusals(self._device)
        except RuntimeError as error:  # the first wait after the clients' work: here a device's errors show
            if not is_fault(error):
                raise
            self.abandon(fault(error, f"rank {self._world.rank} on {self._world.hosts[self._world.rank]}"))
            self._status[self._status == DONE] = FAILED

    def reduce(
        self,
        state_hash: int,
        local_seconds: float,
        *,
        idle_seconds: float = 0.0,
        requests: int = 0,
        written: int = 0,
    ) -> Sums:
        """Sum the buffer over all ranks: the round's one Allreduce.

        Raises:
            HpcfedError: this rank's device failed, and sums do not go through MPI.
        """
        self.settle()
        self._ranks[self._world.rank] = state_hash, requests, written, local_seconds, idle_seconds
        if self._masked is not None:
            sums = [cast("ExactSum", total).integers[0] for total in self._sums.values()]
            self._slots[-NUMBERS:] = self._masked.mask(self._sent(), sums)
        self._kind.write_slots(self._slots, self._memory.tail)
        summed = self._memory.reduce(self._sums, self._read, self.failure)
        if not self._sums:  # which large ones leave behind
            self._layout = ()
        self._kind.read_slots(self._memory.tail, self._slots)
        return self._result(summed)

    def _result(self, summed: Mapping[str, Tensor]) -> Sums:
        """Return the sums of the vectors, and what all ranks wrote into the slots."""
        clients, ranks = self._clients.copy(), self._ranks.copy()
        if self._masked is not None:
            self._spread(self._masked.numbers(self._slots[-NUMBERS:]), clients)
        return Sums(
            vectors=summed,
            bounds={name: clients["bounds"][:, number] for number, name in enumerate(summed)},
            status=clients["status"],
            delta_sq=clients["delta_sq"],
            loss_sum=clients["loss_sum"],
            steps=clients["steps"],
            hashes=ranks["hash"],
            requests=ranks["requests"],
            written=ranks["written"],
            local_seconds=ranks["local_seconds"],
            idle_seconds=ranks["idle_seconds"],
            scalars={name: clients["scalars"][:, number] for number, name in enumerate(self._scalars)},
            update_hashes=clients["hash"] if self._hashes_updates else None,
            again=clients["again"] if self._watched else None,
        )

    @staticmethod
    def _spread(numbers: tuple[float, float, int], clients: np.ndarray) -> None:
        """Write the sums of the masked numbers as if each client had the mean, of squared norms the weighted one."""
        square, loss, steps = numbers
        clients["delta_sq"], clients["loss_sum"] = square / len(clients), loss / len(clients)
        clients["steps"][0] = steps

    def exchange(self, state_hash: int, *, requests: int = 0, written: int = 0) -> np.ndarray:
        """Exchange the ranks' flags alone, in a round that nobody trains: one Allreduce; return `RANK_SLOT`s, (P,)."""
        ranks = np.zeros(self._world.size, RANK_SLOT)
        ranks[self._world.rank] = state_hash, requests, written, 0.0, 0.0
        self._world.sum_in_place(ranks.view(np.int64))
        return ranks

    def _read(self, name: str, words: Words, out: Tensor) -> None:
        """Write a vector's sum over |S|, or a part of it, from its words, (words, n), as float64, (n,)."""
        if self._masked is not None:
            if not self._masked.is_open:
                self._kind.read_slots(self._memory.tail, self._slots)
                self._masked.open(self._sent())
            self._masked.unmask(name, words[0])
        self._kind.read(words, self._units[name], len(self._clients), out)


def _several(number: Number) -> Numbers:
    """Return a scalar as (1,)."""
    return number.unsqueeze(0) if isinstance(number, Tensor) else np.array([number])
