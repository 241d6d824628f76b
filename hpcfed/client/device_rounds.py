"""A round of R clients on a device, in pieces that can be recorded: gathered, stepped, their losses added up.

    host     places of samples, numbers of steps, sizes of minibatches ── one copy ──► memory that stays
    device   a piece of S steps, from the one that a counter on the device names:
             gather (R, B, …) ► the engine's step ► losses, of clients that take this step

A round in which all clients take the same few steps is one graph. Else a piece is of 1, 2, 4, … steps, so that a few
graphs take any number of them. Nothing in it depends on the clients but what the memory holds. A step's kernels see the
same shapes and alignments whichever piece it is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol
from weakref import proxy

import numpy as np
import torch
from torch import Tensor

from hpcfed.client.shorts import Short
from hpcfed.client.tables import Tables
from hpcfed.data.cache import ALIGNED, Samples
from hpcfed.ranks.graphs import Graphs, Inputs

MOST_TOGETHER = 16
"""Steps of a piece."""
MOST_OF_A_GRAPH = 64
"""Steps of a round that is recorded as a whole."""
MOST_WHOLE = 16
"""Kinds of rounds that are recorded as a whole: clients of many sizes share the graphs of pieces."""
GATHERED_BYTES = 1 << 26
"""Samples of a piece, all clients' together, are no more than this, or those of one step."""


class Steps(Protocol):
    """Takes steps of R clients, on memory that stays."""

    def step(self, x: Tensor, y: Tensor, short: Short | None, numbers: Sequence[Tensor], draws: Draws) -> Tensor:
        """Take a step of all clients.

        Args:
            x, y: minibatches, (R, B, …).
            short: which of their rows are samples.
            numbers: of the step, scalars.
            draws: of the step, what has been drawn for it, by name.

        Returns:
            The losses, (R,).
        """
        ...


Draws = Mapping[str, Tensor]


class DeviceRounds:
    """Takes the steps of R clients.

    Args:
        steps: takes one.
        graphs: records pieces.
        like: a tensor of the run's dtype on the device.
        slots: R.
        width: samples of a minibatch that is not short.
        most_steps: of a client in a round, as far as is known.
        averages: whether a minibatch's loss is an average.
        width_step: what the widths of samples are rounded up to multiples of, by zeros.

    Attributes:
        inputs: of the round, by name: `numbers` (K, n), and others that the caller has given.
        kind: what pieces of the round depend on beside the memory's content.
    """

    inputs: Mapping[str, Tensor]

    def __init__(
        self,
        steps: Steps,
        graphs: Graphs,
        like: Tensor,
        *,
        slots: int,
        width: int,
        most_steps: int,
        averages: bool = True,
        width_step: int = 1,
    ):
        self._steps = proxy(steps)  # which has this: in a cycle, memory would stay taken when a run has ended
        self._graphs, self._like = graphs, like
        self._slots, self._width, self._most, self._averages = slots, width, max(1, most_steps), averages
        self._width_step = width_step
        self._copied, self._tables = Inputs(like.device), Tables()
        self._at = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._count = torch.arange(MOST_TOGETHER, device=like.device)
        self._sums = torch.zeros(slots, dtype=torch.float64, device=like.device)
        self._none = torch.zeros((), dtype=like.dtype, device=like.device)
        self._whole = set[Hashable]()
        self.kind: Hashable = None

    def open(
        self,
        samples: Mapping[int, Samples],
        orders: Mapping[int, np.ndarray],
        sizes: np.ndarray,
        taken: Mapping[int, int],
        numbers: np.ndarray,
        *,
        draws: Mapping[str, np.ndarray] | None = None,
        others: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Copy a round's inputs to the device.

        Args:
            samples, orders, taken: of each client, by slot: all of its samples, those of each minibatch (steps, B), and
                its steps.
            sizes: of the minibatches, (R, K).
            numbers: of each step, (K, n).
            draws: of each step, by name, (K, …).
            others: further arrays, by name, as `inputs` then has them.
        """
        steps = sizes.shape[1]
        self._most = max(self._most, steps)
        most, slots, width = self._most, self._slots, self._width
        table, firsts = self._tables.number, self._tables.hold([samples[slot] for slot in orders])
        if self._tables.number != table:
            self._whole.clear()  # they come no more: a graph is of its memory
        places = np.zeros((most, slots, width), np.int64)
        for (slot, order), first in zip(orders.items(), firsts, strict=True):
            np.add(order, first, out=places[: len(order), slot, : order.shape[1]])
        counts = np.zeros(slots, np.int64)
        counts[list(taken)] = list(taken.values())
        dtype = torch.empty(0, dtype=self._like.dtype).numpy().dtype
        of_step = {"places": places.reshape(most, -1), "numbers": numbers.astype(dtype), **(draws or {})}
        self._draws, self._sizes = tuple(draws or ()), sizes
        self._has_short = slots > 1 and bool((sizes < width).any())
        if self._has_short:
            of_step["sizes"] = sizes.T
            of_step["factors"] = (width / sizes.T if self._averages else np.ones(sizes.T.shape)).astype(dtype)
        self._by_step = tuple(of_step)
        arrays = {name: _lengthened(array, most) for name, array in of_step.items()}
        self.inputs = self._copied({**arrays, "taken": counts, **(others or {})})
        self.kind = self._copied.layout, self._tables.number, most

    def whole(self, steps: int, kind: Hashable, begin: Callable[[], None], end: Callable[[], None]) -> bool:
        """Begin, take all steps of the round, and end, in one graph.

        Do nothing and return False if they are many, or many other kinds of rounds have come before.
        """
        if steps > MOST_OF_A_GRAPH:
            return False
        pieces = tuple(self._pieces(0, steps, in_powers=False))
        key = "round", pieces, self._has_short, self.kind, kind
        if key not in self._whole and len(self._whole) >= MOST_WHOLE:
            return False
        self._whole.add(key)

        def work() -> None:
            begin()
            for count, size in pieces:
                self._piece(count, size)
            end()

        self._graphs(key, work)
        return True

    def begin(self) -> None:
        """Begin with the first step, and sums of 0: what a caller's first graph does among others."""
        self._at.zero_()
        self._sums.zero_()

    def take(self, first: int, last: int, kind: Hashable) -> None:
        """Take the steps ``first:last``, which begin where the last call has ended."""
        for count, size in self._pieces(first, last, in_powers=True):
            self._graphs(("steps", count, size, self._has_short, self.kind, kind), partial(self._piece, count, size))

    def _pieces(self, first: int, last: int, *, in_powers: bool) -> Iterator[tuple[int, int]]:
        """Yield the number of steps of each piece, and the samples of their minibatches."""
        while first < last:
            size, count = self._width, last - first
            if self._slots == 1:
                sizes = self._sizes[0, first:last]
                size, other = int(sizes[0]), np.flatnonzero(sizes != sizes[0])
                count = int(other[0]) if len(other) else count
            count = min(count, self._most_together(size))
            if in_powers:
                count = 1 << (count.bit_length() - 1)
            yield count, size
            first += count

    def losses(self) -> Sequence[Tensor]:
        """Return the sum of each client's losses, scalars of float64."""
        return self._sums.clone().unbind()

    def _most_together(self, size: int) -> int:
        a_step = self._slots * size * math.prod(self._tables.x.shape[1:]) * self._tables.x.element_size()
        return max(1, min(MOST_TOGETHER, GATHERED_BYTES // max(1, a_step)))

    def _piece(self, count: int, size: int) -> None:
        at = self._at + self._count[:count]
        rows = {name: self.inputs[name].index_select(0, at) for name in self._by_step}
        works = at.unsqueeze(1) < self.inputs["taken"]
        short: list[Short | None] = [None] * count
        if self._has_short:
            fillers = torch.arange(size, device=at.device) >= rows["sizes"].unsqueeze(2)
            short = [Short.of(*of_step) for of_step in zip(fillers, rows["factors"], strict=True)]
        for step, (x, y) in enumerate(self._minibatches(rows["places"][:, : self._slots * size], size)):
            draws = {name: rows[name][step] for name in self._draws}
            losses = self._steps.step(x, y, short[step], rows["numbers"][step].unbind(), draws)
            self._sums.add_(torch.where(works[step], losses, self._none))
        self._at.add_(count)

    def _minibatches(self, places: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x and y (R, B, …) of each step, from places (S, R·B).

        All steps' in one call where each fills whole lines of memory, since where a step's begins must not depend on
        the piece that it is in.
        """
        parts: list[Sequence[Tensor]] = []
        for table, step in ((self._tables.x, self._width_step), (self._tables.y, 1)):
            features = math.prod(table.shape[1:])
            if missing := -features % step:
                rows = table.index_select(0, places.reshape(-1)).flatten(1)
                shape = (len(places), self._slots, size, features + missing)
                parts.append(torch.nn.functional.pad(rows, (0, missing)).view(shape).unbind())
                continue
            shape = (self._slots, size, *table.shape[1:])
            if math.prod(shape) * table.element_size() % ALIGNED == 0:
                parts.append(table.index_select(0, places.reshape(-1)).view(len(places), *shape).unbind())
            else:
                parts.append([table.index_select(0, row).view(shape) for row in places.unbind()])
        return zip(*parts, strict=True)


def _lengthened(array: np.ndarray, rows: int) -> np.ndarray:
    """Return an array with so many rows; those of steps that nobody takes are not read."""
    missing = rows - len(array)
    if not missing:
        return array
    return np.concatenate([array, np.ones((missing, *array.shape[1:]), array.dtype)])
