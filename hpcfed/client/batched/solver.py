"""Many clients at once on one device: their parameters stacked, each with its own data, work and tilt.

A client's last bits do not depend on the clients stacked with it, where the products of the machine's libraries keep
them apart, which is tried out before the first round (`StackedSolver`). They differ from the sequential engine's, which
adds in another order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.batched.gradients import Perceptron, StackedNetwork
from hpcfed.client.batched.steps import Descent, EqualBatches, FlatDescent, FusedDescent
from hpcfed.client.solver import StepCallback, Stepping, Task, anchor_of, constant_of, start_of
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.config.user_code.generators import seed_generators
from hpcfed.data.batches import visits
from hpcfed.data.cache import ALIGNED, Samples
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.accelerators import accelerator, upload
from hpcfed.rng import Purpose, Streams
from hpcfed.types import LocalResult, Tilt

STACK_BYTES = 4 << 20
"""Parameters of the clients that are trained together on a CPU: what its caches still hold."""
MAX_GROUP = 256
"""Clients trained together at most."""
TRIED, STEPS = 63, 3
"""Samples in a minibatch of the group that is tried out, at most, and steps. Both are odd: a client's samples then
begin at every place of a vector register, which even numbers hide where the number of features is odd."""
_GROUP_INVARIANT: dict[Hashable, bool] = {}
"""Whether a client's result is independent of its group, as tried in this process."""
GATHERED_BYTES = 1 << 24
"""Minibatches are gathered together up to this size, all clients' together."""


class StackedSolver:
    """Trains the clients of a group step by step, all together.

    Args:
        model, section: what is trained, and how (the recipe's ``local``).
        network: its loss and gradients for stacked clients.
        seed: the recipe's ``seed.batches``.
        like: one sample, x (1, …) and y (1, …), in the run's shapes and types.
        movable: whether a cohort can be cut into groups before it is placed on ranks. Where it cannot, and the bits of
            a client depend on its group, clients are trained alone.
        elsewhere: whether tilts have an offset or a radius.
        most_samples: of any client in the federation, since the room of a minibatch must not depend on its group.
        draws: whether the network draws random numbers; they come from the stream of the group's first client.
        arithmetic: in portable one, clients' bits are their own by construction.
    """

    def __init__(
        self,
        model: FlatModel,
        network: StackedNetwork,
        section: LocalSection,
        seed: int,
        like: Samples,
        *,
        movable: bool,
        elsewhere: bool = False,
        most_samples: int | None = None,
        draws: bool = False,
        arithmetic: Arithmetic = LIBRARIES,
    ):
        self._model, self._section, self._elsewhere = model, section, elsewhere
        self._seed, self._draws = seed, draws
        self._most_samples = most_samples
        self._streams = Streams(seed, Purpose.BATCHES)
        self._stepping = Stepping(section)
        self.together = max(1, min(MAX_GROUP, _stack_bytes(model.vector.device) // model.vector.nbytes))
        alone = self.together == 1  # a large model: it is trained where it lies, and Δ takes its gradient's place
        self._delta = model.grad.unsqueeze(0) if alone else model.vector.new_zeros(self.together, model.vector.numel())
        plain = section.optimizer == "sgd" and not section.momentum and section.clip_norm is None
        self._descent: Descent
        if isinstance(network, Perceptron) and plain and not elsewhere:
            self._descent = FusedDescent(network, model, section, self.together)
        else:
            self._descent = FlatDescent(network, model, section, self.together, arithmetic)
        self._rooms: dict[int, Tensor] = {}
        self.group_size, self.placement_counts = 1, False
        if not arithmetic.portable and not (
            isinstance(network, Perceptron) and self._is_known_to_keep_clients_apart(network, like)
        ):
            self.placement_counts = True
            self.group_size, self.together = (self.together, self.together) if movable else (1, 1)

    def solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> Iterator[LocalResult]:
        """Train clients, those in a row that share a μ together; see `Engine`."""
        for _, alike in groupby(tasks, key=lambda task: task.tilt.mu):
            row = list(alike)
            for first in range(0, len(row), self.together):
                try:
                    yield from self._solve(w, row[first : first + self.together], round, on_step)
                except RuntimeError:  # a device's memory may be full: a smaller group then starts without these
                    self._rooms.clear()
                    raise

    @torch.no_grad()
    def _solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> list[LocalResult]:
        """Train clients of equal μ; the Δ of each lies in the solver's memory until the next call."""
        lr, mu, size = self._stepping.lr(round), tasks[0].tilt.mu, len(tasks)
        places = sorted(range(size), key=lambda place: _order(tasks[place]))
        rows = [tasks[place] for place in places]
        self._model.forget()
        if self._draws:
            seed_generators(w.device, self._seed, Purpose.DROPOUT, round, tasks[0].client)
        self._start(w, rows)
        pull = self._stepping.pull(mu)
        anchors = torch.stack([anchor_of(task.tilt, w) for task in rows]) if pull else None
        self._descent.begin(rows, _constants(w, rows, pull), anchors, lr, mu)
        orders, sizes = self._visits(rows, round)
        parts, losses = _parts(sizes), w.new_zeros(size, sizes.shape[1])
        batches = self._batches(rows, orders)
        for first, (x, y) in batches if on_step is None else _single(batches):
            last = first + x.shape[1]
            self._descent.take_steps(first, x, y, parts[first:last], losses[:, first:last])
            if on_step is not None:
                self._show(rows, last, on_step)
        self._descent.end()
        deltas = self._model.views(self._delta[:size]).values()
        for start, stack, delta in zip(self._model.views(w).values(), self._descent.parameters, deltas, strict=True):
            torch.sub(start, stack[:size], out=delta)
        each = zip(places, rows, self._delta[:size].unbind(), _sums(losses, rows), strict=True)
        of_place = {place: LocalResult(delta, task.steps, loss_sum, lr) for place, task, delta, loss_sum in each}
        return [of_place[place] for place in range(size)]

    def _start(self, w: Tensor, rows: Sequence[Task]) -> None:
        """Put every client where its training starts."""
        for stack, view in zip(self._descent.parameters, self._model.views(w).values(), strict=True):
            stack[: len(rows)].copy_(view)
        for row, task in enumerate(rows):
            start = start_of(task.tilt, w)
            if start is not w:
                for stack, view in zip(self._descent.parameters, self._model.views(start).values(), strict=True):
                    stack[row].copy_(view)

    def _show(self, rows: Sequence[Task], step: int, on_step: StepCallback) -> None:
        """Show the iterates of the clients that took this step."""
        for row, task in enumerate(rows):
            if step <= task.steps:
                iterate = torch.zeros_like(self._model.vector)
                views = self._model.views(iterate).values()
                for view, parameter in zip(views, self._descent.iterate(row), strict=True):
                    view.copy_(parameter)
                on_step(task.client, step, iterate)

    def _visits(self, rows: Sequence[Task], round: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Return which samples each client's minibatches hold, and how many, (R, most steps); 0 after its last."""
        counts = [task.samples[1].shape[0] for task in rows]
        batch_size = self._section.batch_size
        most = max(counts) if self._most_samples is None else self._most_samples
        width = max(counts) if batch_size == "full" else min(int(batch_size), most)
        orders, sizes = [], np.zeros((len(rows), max(task.steps for task in rows)), np.int64)
        for row, (task, count) in enumerate(zip(rows, counts, strict=True)):
            rng = self._streams.at(round, task.client)
            order, sizes[row, : task.steps] = visits(count, batch_size, task.steps, rng, width)
            orders.append(order)
        return orders, sizes

    def _batches(
        self, rows: Sequence[Task], orders: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield minibatches of S steps, x (R, S, B, …) and y (R, S, B, …), with the number of the first one.

        Rows beyond a minibatch's size, and of clients that have taken all their steps, hold arbitrary samples or zeros.
        A minibatch's alignment in vector registers depends on its step alone, not on the group.
        """
        steps, width = orders[0].shape
        if not steps:
            return
        x, y = rows[0].samples
        a_step, full = max(1, len(rows) * width * x[0].nbytes), self._section.batch_size == "full"
        whole = ALIGNED // math.gcd(ALIGNED, width * x[0].nbytes)  # steps that fill vector registers
        chunk = 1 if full else min(steps, max(whole, GATHERED_BYTES // a_step // whole * whole))
        together = [
            self._room(number, part, len(rows), chunk, width, *part.shape[1:]) for number, part in enumerate((x, y))
        ]
        slots = list(zip(*(part.flatten(1, 2).unbind() for part in together), strict=True))
        for first in range(0, steps, chunk):
            count = min(chunk, steps - first)
            if not (full and first):  # else all samples are the same ones in every step
                visited = upload(_visited(orders, first, count), x.device)
                for task, places, into in zip(rows, visited.unbind(), slots, strict=False):
                    own = min(count, task.steps - first)
                    if own < count:
                        places = places[: own * width]
                    for samples, slot in zip(task.samples, into, strict=True):
                        torch.index_select(samples, 0, places, out=slot if own == chunk else slot[: own * width])
            yield first, (together[0][:, :count], together[1][:, :count])

    def _room(self, number: int, like: Tensor, *shape: int) -> Tensor:
        """Return memory for minibatches, (R, …), the same in every round: 0, or what an earlier one left there."""
        rows, entries = shape[0], math.prod(shape[1:])
        aligned = -(-entries * like.element_size() // ALIGNED) * ALIGNED // like.element_size()
        if number not in self._rooms or self._rooms[number].numel() < rows * aligned:
            self._rooms[number] = like.new_zeros(rows * aligned)
        return self._rooms[number][: rows * aligned].view(rows, aligned)[:, :entries].view(shape)

    def _is_known_to_keep_clients_apart(self, network: Perceptron, like: Samples) -> bool:
        """Cached result of `_keeps_clients_apart`, by network, shapes and local work."""
        shapes = tuple(stack.shape for stack in self._descent.parameters)
        kinds = tuple((part.shape, part.dtype, part.device) for part in (self._model.vector, *like))
        work = str(self._section), self._elsewhere, self._most_samples
        of_a_kind = network.kind, shapes, kinds, work, torch.get_num_threads()
        if of_a_kind not in _GROUP_INVARIANT:
            _GROUP_INVARIANT[of_a_kind] = self._keeps_clients_apart(like)
        return _GROUP_INVARIANT[of_a_kind]

    def _keeps_clients_apart(self, like: Samples) -> bool:
        """Try out whether a client's bits are the same alone and in groups, on random data of the run's shapes."""
        batch_size, draws = self._section.batch_size, torch.Generator().manual_seed(0)
        most = TRIED + 2 if self._most_samples is None else self._most_samples
        size = max(1, min(TRIED, most - 2, TRIED if batch_size == "full" else int(batch_size)))

        def drawn(part: Tensor, count: int) -> Tensor:
            if not part.is_floating_point():
                return part.expand(count, *part.shape[1:])
            numbers = torch.randn(count, *part.shape[1:], generator=draws, dtype=part.dtype)
            return numbers.to(part.device)

        def solved(tasks: Sequence[Task]) -> list[tuple[Tensor, float | Tensor]]:
            return [(local.delta.clone(), local.loss_sum) for local in self._solve(w, tasks, 1)] if tasks else []

        if torch.get_num_threads() > 1:  # which share an operation out by its size
            return False
        if self.together == 1:  # a group is one client; the copies that a trial takes would be of a large model
            return True
        w, tasks, tilt = self._model.vector.clone(), [], Tilt(radius=0.1) if self._elsewhere else Tilt()
        for client in range(self.together):
            count = min(size + 3 * client // self.together, most)  # several, so that a group falls into runs
            tasks.append(Task(client, (drawn(like[0], count), drawn(like[1], count)), tilt, STEPS, 0.0))
        together = solved(tasks)
        for first, last in ((0, 1), (1, 2), (1, self.together), (self.together - 1, self.together)):
            for one, other in zip(together[first:last], solved(tasks[first:last]), strict=True):
                if not torch.equal(one[0], other[0]) or one[1] != other[1]:
                    return False
        return True


def _single(
    batches: Iterator[tuple[int, tuple[Tensor, Tensor]]],
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield minibatches of several steps step by step, in the same memory."""
    for first, (x, y) in batches:
        for step in range(x.shape[1]):
            yield first + step, (x[:, step : step + 1], y[:, step : step + 1])


def _stack_bytes(device: torch.device) -> int:
    """Return how many bytes of parameters are best trained together."""
    return STACK_BYTES if device.type == "cpu" else accelerator(device).stack_bytes


def _order(task: Task) -> tuple[int, int]:
    """Return the key by which clients are sorted in a stack: most steps first, those of equal size adjacent."""
    return -task.steps, task.samples[1].shape[0]


def _visited(orders: Sequence[np.ndarray], first: int, count: int) -> Tensor:
    """Return which samples are visited in `count` steps, (R', visits), by the clients that still work in step `first`.

    Once a client has taken all its steps, it visits sample 0.
    """
    active = [order[first : first + count] for order in orders if len(order) > first]
    visited = np.zeros((len(active), count, orders[0].shape[1]), np.int64)
    for own, order in zip(visited, active, strict=True):
        own[: len(order)] = order
    return torch.from_numpy(visited.reshape(len(active), -1))


def _sums(losses: Tensor, rows: Sequence[Task]) -> list[float | Tensor]:
    """Return the sum of each client's losses, (R, most steps), over the steps it took; those of most come first.

    On a device they are scalars there, which nothing has waited for.
    """
    on_host = losses.device.type == "cpu"
    each, sums = losses.double(), list[float | Tensor]()
    for steps, alike in groupby(rows, key=lambda task: task.steps):
        first, last = len(sums), len(sums) + len(list(alike))
        own = each[first:last, :steps]
        sums += own.numpy().sum(axis=1).tolist() if on_host else own.sum(1).unbind()
    return sums


def _constants(w: Tensor, rows: Sequence[Task], pull: float) -> Tensor | None:
    """Return `constant_of` each client, (R, d); None where all are 0."""
    found = [constant_of(task.tilt, w, pull) for task in rows]
    if all(constant is None for constant in found):
        return None
    return torch.stack([torch.zeros_like(w) if constant is None else constant for constant in found])


def _parts(sizes: np.ndarray) -> list[list[EqualBatches]]:
    """Return the parts of each step from sizes of minibatches, (R, steps), 0 after a client's last."""
    found: dict[bytes, list[EqualBatches]] = {}
    parts = []
    for column in np.ascontiguousarray(sizes.T):
        key = column.tobytes()
        if key not in found:  # most steps are like the one before
            active = int(np.count_nonzero(column))
            bounds = [0, *(np.flatnonzero(np.diff(column[:active])) + 1).tolist(), active]
            found[key] = [EqualBatches(first, last, int(column[first])) for first, last in pairwise(bounds)]
        parts.append(found[key])
    return parts
