"""Tiles: the slots in which clients are trained together, their size, their widths and their memory.

A kernel may round by the shape and the alignment of its operands. So all tensors of a tile have one shape, which
follows from the recipe and the kind of device alone, whichever clients fill its R slots, on whichever rank; and every
matrix of a slot fills whole lines of 64 bytes, so that all slots begin alike:

    widths are rounded up by zeros,  784–200–100–10  →  784–200–104–16

Slots without a client, and steps that a client does not take, are computed and thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfed.models.flat import FlatModel
from hpcfed.ranks.accelerators import accelerator

LINE = 64
"""Bytes that every matrix of a slot fills in whole multiples."""
LEAST_WIDTH = 4
"""Widths are multiples of at least so many numbers: the product of two then fills lines of `LINE` bytes in float32."""
REGISTERS = 128
"""Bytes that a vector fills in whole multiples: elementwise kernels may round a partial SIMD tail differently."""
STACK_BYTES = 4 << 20
"""Parameters that are best trained together on a CPU: what its caches still hold."""
MOST_SLOTS = 256
WORK_OF_CALLS, PER_SLOT = 3.1e6, 0.015
"""Of the modelled cost of a step on a CPU: a slot's samples · parameters that take as long as the calls of a step, and
what a slot takes besides, as a part of the calls. Measured on an AVX-512 processor at cohorts of 5 to 200."""
WORK_ON_A_GPU = 7e7
"""The former on a GPU, where a slot takes nothing besides. From two convolutional networks on an H100, whose work was
recorded: 4 clients in one tile and each in its own, 5.29 and 6.24 ms a round; 50 clients, 41 and 78 ms."""
NEAR = 1.03
"""Cost, relative to the least, up to which more and smaller tiles are preferred: they leave fewer empty slots."""


def tile_for(
    model: FlatModel,
    device: torch.device,
    cohort_size: int,
    steps: Sequence[int] | np.ndarray,
    slot_work: float,
) -> int:
    """Return R, by a rule of the recipe and the kind of device.

    At most as many slots as members of a cohort, and as their parameters fit into caches or the device's share; of the
    ways to cut a cohort into equal tiles the one whose modelled cost is least,

        Σ over tiles of (most steps of a member) · (calls of a step + R · arithmetic of a slot)

    where a cohort has steps as all clients have.

    Args:
        model: what is trained.
        device: where.
        cohort_size: most members of a cohort.
        steps: of each client in a round, (N,).
        slot_work: multiplications of a slot's step, forwards.
    """
    on_cpu = device.type == "cpu"
    room = STACK_BYTES if on_cpu else accelerator(device).stack_bytes
    most = max(1, min(MOST_SLOTS, room // model.trained.nbytes, cohort_size))
    ordered = np.sort(np.asarray(steps, np.float64))[::-1]
    typical = ordered[np.linspace(0, len(ordered) - 1, cohort_size).round().astype(np.int64)]
    costs = {}
    for tiles in range(-(-cohort_size // most), cohort_size + 1):
        size = -(-cohort_size // tiles)
        if size not in costs:
            costs[size] = float(typical[::size].sum()) * step_cost(size, slot_work, device)
    return min(size for size, cost in costs.items() if cost <= NEAR * min(costs.values()))


def step_cost(slots: int, slot_work: float, device: torch.device) -> float:
    """Return the modelled cost of a step of a tile, in that of its calls."""
    if device.type != "cpu":
        return 1 + slots * slot_work / WORK_ON_A_GPU
    return 1 + slots * (slot_work / WORK_OF_CALLS + PER_SLOT)


def cut(places: Sequence[int], tile: int, *, fixed_slots: bool) -> list[list[int]]:
    """Cut places in a cohort into tiles, in their order.

    Args:
        places: those that this rank trains.
        tile: R.
        fixed_slots: whether the slot of a place is its remainder by R, so that a tile has each remainder once.
    """
    if not fixed_slots:
        return [list(places[first : first + tile]) for first in range(0, len(places), tile)]
    tiles: list[list[int]] = []
    taken = [0] * tile  # of each slot, in how many tiles
    for place in places:
        slot = place % tile
        if taken[slot] == len(tiles):
            tiles.append([])
        tiles[taken[slot]].append(place)
        taken[slot] += 1
    return tiles


def width_step(batch: int, itemsize: int) -> int:
    """Return what widths are multiples of, so that matrices (B, width), and of two widths, fill whole lines."""
    line = LINE // itemsize
    return max(LEAST_WIDTH, line // math.gcd(line, batch))


def rounded(width: int, step: int) -> int:
    """Return the width rounded up."""
    return -(-width // step) * step


class Stacks:
    """The parameters of R slots, each parameter's as one stack without gaps, all in one vector.

        [ parameter 1: slot 0 | slot 1 | … | slot R−1 ]  [ parameter 2: … ]  …

    Private parameters come last.

    Args:
        model: whose parameters.
        slots: R.
        rooms: the shape that each parameter has here, at least its own; default: its own.

    Attributes:
        flat: all, (n,); 0 outside of the parameters.
        shared: entries of `flat` before those of the first private parameter.
        each: of each parameter, (R, *room).
    """

    def __init__(self, model: FlatModel, slots: int, rooms: Sequence[torch.Size] | None = None):
        self._model, self.slots = model, slots
        shapes = [view.shape for view in model.trained_views(model.trained).values()]
        self._rooms = shapes if rooms is None else list(rooms)
        itemsize = model.vector.element_size()
        places, end, num_shared = [], 0, len(model.views(model.vector))
        for number, room in enumerate(self._rooms):
            if number == num_shared:
                end = rounded(end, REGISTERS // itemsize)
            places.append(end)
            end += rounded(slots * room.numel(), LINE // itemsize)
        self.flat = model.vector.new_zeros(rounded(end, REGISTERS // itemsize))
        self.each = [
            self.flat[start : start + slots * room.numel()].view(slots, *room)
            for start, room in zip(places, self._rooms, strict=True)
        ]
        self._cut()

    def _cut(self) -> None:
        shapes = [view.shape for view in self._model.trained_views(self._model.trained).values()]
        private = self.each[len(self._model.views(self._model.vector)) :]
        self.shared = self._start(private[0]) if private else len(self.flat)
        self._own = [
            stack[(slice(None), *(slice(size) for size in shape))]
            for stack, shape in zip(self.each, shapes, strict=True)
        ]
        self._rest = [
            stack.narrow(axis + 1, size, stack.shape[axis + 1] - size)
            for stack, shape in zip(self.each, shapes, strict=True)
            for axis, size in enumerate(shape)
            if size < stack.shape[axis + 1]
        ]

    @classmethod
    def in_place(cls, model: FlatModel, vector: Tensor) -> Stacks:
        """Return a stack of one client that lies in a vector (d + p,) of the model."""
        found = cls.__new__(cls)
        found._model, found.slots, found.flat = model, 1, vector
        found.each = [view.unsqueeze(0) for view in model.trained_views(vector).values()]
        found._rooms = [stack.shape[1:] for stack in found.each]
        found._cut()
        return found

    def like(self) -> Stacks:
        """Return zeros of the same layout."""
        return Stacks(self._model, self.slots, None if self.slots == 1 else self._rooms)

    def holding(self, vectors: Mapping[int, Tensor | None]) -> Stacks | None:
        """Return vectors (d,) by slot in this layout, 0 where there is none; None if there is none at all."""
        if all(vector is None for vector in vectors.values()):
            return None
        found = self.like()
        for slot, vector in vectors.items():
            if vector is not None:
                found.put(slot, vector)
        return found

    def fill(self, vector: Tensor) -> None:
        """Set all slots to a vector (d,), and to 0 what is outside, where a client that diverged has left NaN."""
        for rest in self._rest:
            rest.zero_()
        for own, view in zip(self._own, self._model.views(vector).values(), strict=False):
            own.copy_(view)

    def put(self, slot: int, vector: Tensor) -> None:
        """Set a slot to a vector (d,)."""
        for own, view in zip(self._own, self._model.views(vector).values(), strict=False):
            own[slot].copy_(view)

    def put_private(self, slot: int, vector: Tensor) -> None:
        """Set a slot's private parameters to a vector (p,)."""
        views = self._model.private_views(vector).values()
        for own, view in zip(self._own[-len(views) :], views, strict=True):
            own[slot].copy_(view)

    def take(self, first: int, last: int, out: Tensor, scale: float = 1.0) -> Tensor:
        """Write scale · the slots ``first:last`` into vectors, (last − first, d), and return them."""
        for own, view in zip(self._own, self._model.views(out).values(), strict=False):
            _copy(own[first:last], scale, view)
        return out

    def take_private(self, slot: int, scale: float = 1.0) -> Tensor:
        """Return scale · a slot's private parameters as a new vector, (p,)."""
        out = self.flat.new_zeros(len(self._model.trained) - len(self._model.vector))
        views = self._model.private_views(out).values()
        for own, view in zip(self._own[-len(views) :], views, strict=True):
            _copy(own[slot], scale, view)
        return out

    def rows(self) -> Tensor:
        """Return all parameters of each slot as vectors, (R, d + p)."""
        out = self.flat.new_zeros(self.slots, len(self._model.trained))
        for own, view in zip(self._own, self._model.trained_views(out).values(), strict=True):
            view.copy_(own)
        return out

    def _start(self, stack: Tensor) -> int:
        return int(stack.storage_offset() - self.flat.storage_offset())

    def pieces(self, slot: int) -> Iterator[tuple[int, int]]:
        """Yield where the parameters of a slot lie in the vector: the first entry of each, and the one after it."""
        for stack in self.each:
            size = stack[0].numel()
            start = self._start(stack) + slot * size
            yield start, start + size


def _copy(own: Tensor, scale: float, out: Tensor) -> None:
    if scale == 1:
        out.copy_(own)
    else:
        torch.mul(own, scale, out=out)
