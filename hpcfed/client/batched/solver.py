"""Many clients at once on one device, in tiles: their parameters stacked, each with its own data, work and tilt.

A client's bits do not depend on the others of its tile, on its rank, or on how many clients that rank has: all tensors
of a tile have the same shape and alignment, whoever is in it (`hpcfed.client.batched.tiles`). They differ from the
sequential engine's, which adds in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.augment import augmented
from hpcfed.client.batched.device import DeviceTile
from hpcfed.client.batched.direct import DirectDescent
from hpcfed.client.batched.draws import Draws
from hpcfed.client.batched.gradients import Perceptron, StackedNetwork
from hpcfed.client.batched.operators.network import OperatorNetwork
from hpcfed.client.batched.steps import Descent, DeviceDescent, FlatDescent, FusedDescent
from hpcfed.client.batched.tiles import Stacks, rounded, width_step
from hpcfed.client.precision import computing
from hpcfed.client.shorts import short_steps
from hpcfed.client.solver import Expected, StepCallback, Stepping, Task, start_of
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.config.user_code.generators import seed_generators
from hpcfed.data.cache import ALIGNED, Resident
from hpcfed.models.flat import PARAMETERS, FlatModel
from hpcfed.ranks.accelerators import upload
from hpcfed.ranks.graphs import Graphs
from hpcfed.rng import Purpose, stream, torch_seed
from hpcfed.types import LocalResult, State

GATHERED_BYTES = 1 << 24
"""Minibatches are gathered together up to this size, all slots' together."""
TOGETHER = 1 << 20
"""Bytes of minibatches up to which those of all slots are gathered in one call, where that is one copy more."""
PADDED, COPIES = 2, 3
"""Numbers of the room in which samples have rounded widths, after those of x and y, and of what is gathered in one."""


class StackedSolver:
    """Trains the clients of a tile step by step, all together.

    Args:
        model, section: what is trained, and how (the recipe's ``local``).
        network: its loss and gradients for stacked clients.
        seed: the recipe's ``seed.batches``.
        tile: R. A tile of one client trains it where the model lies, with minibatches of the client's own sizes.
        width: samples of a minibatch that is not short, which tiles of more than one client have room for.
        most_steps: of a client in a round; minibatches of more steps are never gathered at once.
        elsewhere: whether tilts have an offset or a radius.
        averages: whether the loss of a minibatch is an average over its samples.
        draws: whether the network draws random numbers; they come from the client's stream, in a tile of one.
        arithmetic: the recipe's ``bits``.
        graphs: records the work of a tile on a device; None on a CPU.
        precision: the recipe's: float32 or, on a device, tf32.

    Attributes:
        tile: R.
        fixed_slots: whether a client's slot follows from its place in the cohort.
    """

    def __init__(
        self,
        model: FlatModel,
        network: StackedNetwork,
        section: LocalSection,
        seed: int,
        *,
        tile: int,
        width: int,
        most_steps: int,
        elsewhere: bool = False,
        averages: bool = True,
        draws: bool = False,
        arithmetic: Arithmetic = LIBRARIES,
        graphs: Graphs | None = None,
        precision: str = "float32",
    ):
        self.tile, self.fixed_slots = tile, network.fixed_slots and tile > 1
        self._model, self._section, self._width, self._network = model, section, width, network
        self._seed, self._draws, self._averages, self._most_steps = seed, draws, averages, max(1, most_steps)
        self._stepping = Stepping(section)
        self._width_step = 1
        num_keys = network.keys if isinstance(network, OperatorNetwork) else 0
        self._step_draws = Draws(section, seed, tile, width, num_keys)
        if tile == 1:  # Δ takes the gradient's place
            stacks, self._deltas = Stacks.in_place(model, model.trained), model.grad.unsqueeze(0)
        else:
            shapes = [view.shape for view in model.trained_views(model.trained).values()]
            step = width_step(width, model.vector.element_size())
            self._width_step = step if isinstance(network, Perceptron) else 1
            stacks = Stacks(model, tile, network.rooms(shapes, step))
            self._deltas = model.vector.new_zeros(tile, model.vector.numel())
        plain = section.optimizer == "sgd" and not section.momentum and section.clip_norm is None
        self._descent: Descent
        recorded: DeviceDescent
        if isinstance(network, Perceptron) and plain and not elsewhere:
            self._descent = recorded = FusedDescent(network, model, section, stacks)
        elif isinstance(network, OperatorNetwork) and plain and not elsewhere and graphs is None:
            self._descent = DirectDescent(network, section, stacks)
        else:
            self._descent = recorded = FlatDescent(network, model, section, stacks, arithmetic)
        self._arithmetic = arithmetic
        self._rooms: dict[int, Tensor] = {}
        self._on_device: DeviceTile | None = None
        products = computing(precision, model.vector.device)  # refused here on a CPU, too, which has no use for it
        self.graphs = graphs
        if graphs is not None:
            self._on_device = DeviceTile(
                recorded,
                self._deltas,
                section,
                graphs,
                width=width,
                most_steps=most_steps,
                averages=averages,
                width_step=self._width_step,
                computing=products,
            )

    def solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> Iterator[LocalResult]:
        """Train clients, those in a row that fit into a tile together; see `Engine`."""
        for tile in self._in_tiles(tasks):
            yield from self._solve(w, tile, round, on_step)

    def expect(self, members: Callable[[], Iterable[Expected]]) -> None:
        """Make the draws of the next round's first tile; see `Engine`. Those of others are made beside its work."""
        if self._on_device is not None:
            self._step_draws.make_ahead(islice(members(), self.tile))

    def _in_tiles(self, tasks: Sequence[Task]) -> Iterator[list[Task]]:
        """Cut tasks into tiles in their order: R at most, of one μ, and of different slots where these are fixed."""
        tile: list[Task] = []
        for task in tasks:
            taken = self.fixed_slots and any((task.place - other.place) % self.tile == 0 for other in tile)
            if tile and (len(tile) == self.tile or task.tilt.mu != tile[0].tilt.mu or taken):
                yield tile
                tile = []
            tile.append(task)
        if tile:
            yield tile

    @torch.no_grad()
    def _solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> list[LocalResult]:
        """Train clients of equal μ in one tile; the Δ of each lies in the solver's memory until the next call."""
        lr, slots = self._stepping.lr(round), self._slots_of(tasks)
        of_slot = dict(zip(slots, map(self._stepping.joined, tasks), strict=True))
        self._model.forget()
        if self._draws:
            address = self._seed, Purpose.DROPOUT, round, tasks[0].client
            seed_generators(w.device, *address)
            self._model.seed(torch_seed(*address))
        if self._on_device is not None:
            return self._solve_on(self._on_device, w, of_slot, round, on_step)
        mu = tasks[0].tilt.mu
        descent = self._pulled if mu and self._model.private is not None else self._descent
        self._fill(descent.stacks, of_slot, w)
        descent.begin(of_slot, w, lr, mu)
        orders, sizes, drawn_keys = self._step_draws.of_tile(of_slot, round)
        losses = w.new_zeros(self.tile, sizes.shape[1])
        short = short_steps(sizes, self._width, self._averages, w) if self.tile > 1 else [None] * sizes.shape[1]
        own = self._end(descent, 0, of_slot, w, None)
        keys = None if drawn_keys is None else torch.from_numpy(drawn_keys)
        for first, (x, y) in self._batches(of_slot, orders, sizes, round):
            for begin, end in self._between_ends(first, first + x.shape[1], of_slot, singly=on_step is not None):
                part = slice(begin - first, end - first)
                of_steps = None if keys is None else keys[:, begin:end]
                descent.take_steps(x[:, part], y[:, part], short[begin:end], losses[:, begin:end], of_steps)
                if on_step is not None:
                    self._show(descent, of_slot, end, on_step)
                own |= self._end(descent, end, of_slot, w, on_step)
        sums = _sums(losses, [(slot, task.steps) for slot, task in of_slot.items()])
        return [
            LocalResult(self._deltas[slot], task.steps, loss_sum, lr, own=own.get(slot, {}))
            for (slot, task), loss_sum in zip(of_slot.items(), sums, strict=True)
        ]

    def _solve_on(
        self, device: DeviceTile, w: Tensor, of_slot: dict[int, Task], round: int, on_step: StepCallback | None
    ) -> list[LocalResult]:
        lr, (orders, sizes, keys) = self._stepping.lr(round), self._step_draws.of_tile(of_slot, round)
        shows = None if on_step is None else partial(self._show, self._descent, on_step=on_step)
        sums = device.train(w, of_slot, orders, sizes, lr, keys, shows)
        return [LocalResult(self._deltas[slot], task.steps, sums[slot], lr) for slot, task in of_slot.items()]

    def _slots_of(self, tasks: Sequence[Task]) -> list[int]:
        """Return each client's slot: its own, or those with the most steps first, so that clients end slot by slot."""
        if self.fixed_slots:
            return [task.place % self.tile for task in tasks]
        slots = [0] * len(tasks)
        for slot, place in enumerate(sorted(range(len(tasks)), key=lambda place: -tasks[place].steps)):
            slots[place] = slot
        return slots

    @cached_property
    def _pulled(self) -> Descent:
        """The descent for private parameters beside a μ, which pulls the shared ones alone."""
        if isinstance(self._descent, FlatDescent):
            return self._descent
        return FlatDescent(self._network, self._model, self._section, self._descent.stacks, self._arithmetic)

    def _fill(self, stacks: Stacks, of_slot: Mapping[int, Task], w: Tensor) -> None:
        """Set each slot to where its client starts."""
        stacks.fill(w)
        for slot, task in of_slot.items():
            start = start_of(task.tilt, w)
            if start is not w:
                stacks.put(slot, start)
        for slot in range(self.tile) if self._model.private is not None else ():
            own = of_slot[slot].own if slot in of_slot else self._model.own
            stacks.put_private(slot, own[PARAMETERS])

    def _end(
        self, descent: Descent, step: int, of_slot: dict[int, Task], w: Tensor, on_step: StepCallback | None
    ) -> dict[int, State]:
        """Take the guessed steps, and Δ, of the clients whose last step this was; return the private parts by slot."""
        ended = sorted(slot for slot, task in of_slot.items() if task.steps == step)
        for slot in ended:
            if of_slot[slot].guessed:
                descent.guess(slot, of_slot[slot].guessed, step)
                if on_step is not None:
                    self._show(descent, {slot: of_slot[slot]}, step, on_step)
        for first, last in _rows(ended):
            torch.sub(w, descent.take(first, last, self._deltas[first:last]), out=self._deltas[first:last])
        if self._model.private is None:
            return {}
        return {slot: {PARAMETERS: descent.take_private(slot)} for slot in ended}

    @staticmethod
    def _between_ends(first: int, last: int, of_slot: dict[int, Task], *, singly: bool) -> Iterator[tuple[int, int]]:
        """Yield the steps ``first:last`` in pieces after each of which a client may have ended."""
        ends = (
            range(first + 1, last) if singly else sorted({t.steps for t in of_slot.values() if first < t.steps < last})
        )
        begin = first
        for end in (*ends, last):
            yield begin, end
            begin = end

    def _show(self, descent: Descent, of_slot: Mapping[int, Task], step: int, on_step: StepCallback) -> None:
        """Show the iterates of the clients that took this step; the model has the private ones meanwhile."""
        private = self._model.private
        for slot, task in of_slot.items():
            if step > task.steps:
                continue
            iterate = descent.take(slot, slot + 1, self._model.vector.new_zeros(1, self._model.vector.numel()))[0]
            if private is None:
                on_step(task.client, step, iterate)
                continue
            kept = private.clone()
            private.copy_(descent.take_private(slot))
            on_step(task.client, step, iterate)
            private.copy_(kept)

    def masks(self, round: int, client: int, step: int, batch: int) -> list[Tensor]:
        """Return dropout's masks of a client's step, counted from 1, over a minibatch of so many samples."""
        if not isinstance(self._network, OperatorNetwork) or not self._network.keys:
            return []
        keys = self._step_draws.keys(round, client, step)[-1:]
        on_device = upload(torch.from_numpy(keys), self._model.vector.device)
        return self._network.masks_of(on_device, batch, self._model.vector.dtype)

    def _batches(
        self, of_slot: Mapping[int, Task], orders: Mapping[int, np.ndarray], sizes: np.ndarray, round: int
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield minibatches of S steps, x (R, S, B, …) and y (R, S, B, …), with the number of the first one.

        Slots without a client hold zeros, and those of clients that have taken all their steps arbitrary samples. A
        minibatch's alignment in lines of memory, and its stride, depend on its slot and step alone.
        """
        of_crops = {slot: self._crops_of(task, round) for slot, task in of_slot.items()}
        if self.tile == 1:
            yield from self._own_batches(of_slot[0], orders[0], sizes[0], of_crops[0])
            return
        steps, (x, y) = sizes.shape[1], next(iter(of_slot.values())).samples
        if not steps:
            return
        width, padded = math.prod(x.shape[1:]), rounded(math.prod(x.shape[1:]), self._width_step)
        a_step = max(1, self.tile * self._width * padded * x.element_size())
        chunk = min(self._most_steps, max(1, GATHERED_BYTES // a_step))  # whatever these clients' steps
        gathered = [
            self._room(number, part, self.tile, chunk, self._width, *part.shape[1:])
            for number, part in enumerate((x, y))
        ]
        x_room, y_room = gathered
        if padded != width:
            x_room = self._room(PADDED, x, self.tile, chunk, self._width, padded)
        if empty := [slot for slot in range(self.tile) if slot not in of_slot]:
            for room in {x_room, *gathered}:
                for first, last in _rows(empty):
                    room[first:last, :steps].zero_()
        own_columns = x_room.view(*x_room.shape[:3], -1)[..., :width]
        for first in range(0, steps, chunk):
            count = min(chunk, steps - first)
            working = [slot for slot, task in of_slot.items() if task.steps > first]
            visited = _visited([orders[slot][first : first + count] for slot in working], count)
            resident = [own for slot in working if isinstance(own := of_slot[slot].samples, Resident)]
            is_small = padded != width or visited.numel() * width * x.element_size() <= TOGETHER
            if is_small and len(resident) == len(working):
                self._gather_together(working, resident, visited, count, (own_columns, y_room))
            else:
                self._gather_singly({slot: of_slot[slot] for slot in working}, visited, first, count, gathered)
                if padded != width:
                    own_columns[:, :count].copy_(gathered[0][:, :count].flatten(3))
            for slot in working if self._section.augment is not None else ():
                last = min(first + count, of_slot[slot].steps)
                self._augment(own_columns[slot].unflatten(2, x.shape[1:]), sizes[slot, first:last], of_crops[slot])
            yield first, (x_room[:, :count], y_room[:, :count])

    def _crops_of(self, task: Task, round: int) -> np.random.Generator | None:
        """Return what a client's images are augmented by; None without augmentation."""
        return None if self._section.augment is None else stream(self._seed, Purpose.AUGMENT, round, task.client)

    def _augment(self, x: Tensor, sizes: np.ndarray, rng: np.random.Generator | None) -> None:
        """Change a client's minibatches (S, B, …), the first `sizes` samples of each, as the recipe says."""
        if self._section.augment is not None and rng is not None:
            for minibatch, size in zip(x, sizes.tolist(), strict=False):
                minibatch[:size] = augmented(minibatch[:size], self._section.augment, rng)

    def _gather_together(
        self,
        working: Sequence[int],
        resident: Sequence[Resident],
        visited: Tensor,
        count: int,
        rooms: tuple[Tensor, Tensor],
    ) -> None:
        """Write minibatches of `count` steps into x's and y's room, (R, steps, B, …), from the table of all clients."""
        visited.add_(torch.tensor([own.first for own in resident]).unsqueeze(1))
        places = upload(visited.flatten(), rooms[0].device)
        for number, (table, room) in enumerate(zip(resident[0].table, rooms, strict=True)):
            found = self._room(COPIES + number, table, len(places), *table.shape[1:])
            torch.index_select(table, 0, places, out=found)
            each = found.view(len(working), count, self._width, *room.shape[3:])
            row = 0
            for first, last in _rows(working):
                room[first:last, :count].copy_(each[row : row + last - first])
                row += last - first

    def _gather_singly(
        self, of_slot: Mapping[int, Task], visited: Tensor, first: int, count: int, rooms: Sequence[Tensor]
    ) -> None:
        """Write minibatches of up to `count` steps from `first` on into x's and y's room, from each client's samples.

        Visits after a client's last step are not gathered.
        """
        slots = [room.flatten(1, 2).unbind() for room in rooms]
        for (slot, task), places in zip(of_slot.items(), upload(visited, rooms[0].device).unbind(), strict=True):
            size = min(count, task.steps - first) * self._width
            for samples, own in zip(task.samples, slots, strict=True):
                torch.index_select(samples, 0, places[:size], out=own[slot][:size])

    def _own_batches(
        self, task: Task, order: np.ndarray, sizes: np.ndarray, of_crops: np.random.Generator | None
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield the minibatches of a client that is trained alone: those in a row that are of one size together."""
        x, y = task.samples
        if not task.steps:
            return
        if self._section.batch_size == "full":
            for step in range(task.steps):
                own = x[None, None] if of_crops is None else x[None, None].clone()
                self._augment(own[0], np.array([len(x)]), of_crops)
                yield step, (own, y[None, None])
            return
        width, first = order.shape[1], 0
        a_step = max(1, width * x[0].nbytes)
        whole = ALIGNED // math.gcd(ALIGNED, a_step)  # steps that fill lines
        most = max(whole, GATHERED_BYTES // a_step // whole * whole)
        while first < task.steps:
            other = np.flatnonzero(sizes[first : first + most] != sizes[first])
            count = int(other[0]) if len(other) else min(most, task.steps - first)
            size = int(sizes[first])
            places = upload(torch.from_numpy(np.ascontiguousarray(order[first : first + count, :size])), x.device)
            rooms = [self._room(number, part, 1, count, size, *part.shape[1:]) for number, part in enumerate((x, y))]
            for samples, room in zip((x, y), rooms, strict=True):
                torch.index_select(samples, 0, places.flatten(), out=room.flatten(0, 2))
            self._augment(rooms[0][0], sizes[first : first + count], of_crops)
            yield first, (rooms[0], rooms[1])
            first += count

    def _room(self, number: int, like: Tensor, *shape: int) -> Tensor:
        """Return memory for minibatches, the same in every round: 0, or what an earlier one left there."""
        entries = math.prod(shape)
        if number not in self._rooms or self._rooms[number].numel() < entries:
            self._rooms[number] = like.new_zeros(entries)
        return self._rooms[number][:entries].view(shape)


def _visited(orders: Sequence[np.ndarray], count: int) -> Tensor:
    """Return which samples several clients visit in `count` steps, (clients, visits); 0 after a client's last step."""
    visited = np.zeros((len(orders), count, orders[0].shape[1]), np.int64)
    for own, order in zip(visited, orders, strict=True):
        own[: len(order)] = order
    return torch.from_numpy(visited.reshape(len(orders), -1))


def _sums(losses: Tensor, steps: Sequence[tuple[int, int]]) -> list[float | Tensor]:
    """Return the sum of the losses (R, most steps) of some slots over the steps that each took.

    On a device they are scalars there, which nothing has waited for.
    """
    each = losses.double()
    if losses.device.type == "cpu":
        rows, counts = each.numpy(), {count for _, count in steps}
        if len(counts) == 1:  # in one call, whose sums of rows are those of each alone
            return rows[[slot for slot, _ in steps], : counts.pop()].sum(1).tolist()
        return [float(rows[slot, :count].sum()) for slot, count in steps]
    return [each[slot, :count].sum() for slot, count in steps]


def _rows(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first slot, and the one after the last, of slots in a row."""
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield slots[first], slots[place - 1] + 1
            first = place
