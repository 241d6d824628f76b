"""Graphs: work on a device that is recorded once and then launched as a whole, in one call of the host.

A device's small kernels end before the host has asked for the next ones. Work that is done again and again, on the same
memory, is recorded as a graph when it comes for the second time; the first time it is done step by step, which also
readies what its kernels need. Both ask the device for the same operations, so that they leave the same bits.

What differs from one time to the next must be on the device, in memory that stays: `Inputs` copies it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import RAISED, in_a_line
from hpcfed.ranks.accelerators import accelerator, is_full

log = logging.getLogger("hpcfed")

MOST_GRAPHS = 64
"""Of an engine; work of further kinds is done step by step."""
MOST_KINDS = 4096
"""Kinds of work that are remembered as seen."""
LINE = 64
"""Bytes on whose multiples the arrays of `Inputs` begin."""


def on_device(device: torch.device) -> bool:
    """Whether clients are trained by steps that can be recorded; their numbers are then the device's."""
    return device.type != "cpu"


class Graphs:
    """Work that is recorded when it comes for the second time, by its key.

    Args:
        device: where it is done.
        records: whether it is recorded at all.

    Attributes:
        records: whether it is.
        hindrance: why the clients' work cannot be recorded; empty where it can, or was not to be.
        any_order: kernels of the work that add in any order, though others were asked for, as far as they were seen.
    """

    def __init__(self, device: torch.device, *, records: bool):
        self._device, self.records, self.hindrance = device, records and device.type != "cpu", ""
        self.any_order: tuple[str, ...] = ()
        self._is_trial = False
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._seen: set[Hashable] = set()

    def __str__(self) -> str:
        return self.hindrance or ("recorded" if self.records else "off")

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work whose key this is: all calls with a key do the same, on the same memory."""
        if not self.records:
            work()
            return
        if (replay := self._replays.get(key)) is not None:
            replay()
            return
        if key not in self._seen or len(self._replays) >= MOST_GRAPHS:
            if len(self._seen) < MOST_KINDS:
                self._seen.add(key)
            own = accelerator(self._device)
            with own.beside(self._device), own.without_waits(self._device) if self._is_trial else nullcontext():
                work()
            return
        try:
            self._replays[key] = replay = accelerator(self._device).capture(self._device, work)
        except RAISED as error:  # a user's model may raise anything
            if self._is_trial or is_full(error):
                raise
            self.give_up(in_a_line(error))
            log.warning("clients are trained step by step from here on, without graphs: %s", self.hindrance)
            work()  # nothing of it was done; an error of its own is raised here
            return
        replay()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Meanwhile, work that comes for the first time must not wait for the device; forget its graphs afterwards."""
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False
            self.forget()

    def give_up(self, hindrance: str) -> None:
        """Record nothing from here on."""
        self.records, self.hindrance = False, hindrance
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: memory that they touch is given up."""
        self._replays.clear()
        self._seen.clear()


class Inputs:
    """Arrays of the host that go to a device in one copy, to the same memory whenever they have the same shapes.

    Args:
        device: where.

    Attributes:
        layout: number of the last call's shapes, and so of its memory.
        tensors: what the last call has returned.
    """

    def __init__(self, device: torch.device):
        self._device, self.layout, self.tensors = device, 0, dict[str, Tensor]()
        self._layouts: dict[Hashable, tuple[int, Tensor, dict[str, Tensor]]] = {}

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy arrays to the device, and return them there by name; they are valid until the next call."""
        layout = tuple((name, array.shape, array.dtype.str) for name, array in arrays.items())
        places, end = [], 0
        for array in arrays.values():
            places.append(end)
            end += -(-array.nbytes // LINE) * LINE
        if layout not in self._layouts:
            self._layouts[layout] = len(self._layouts), *self._laid_out(arrays, places, end)
        self.layout, memory, self.tensors = self._layouts[layout]
        packed = np.zeros(end, np.uint8)
        for array, place in zip(arrays.values(), places, strict=True):
            packed[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory.copy_(_ready(torch.from_numpy(packed), self._device), non_blocking=True)
        return self.tensors

    def _laid_out(
        self, arrays: Mapping[str, np.ndarray], places: list[int], end: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        memory = torch.zeros(end, dtype=torch.uint8, device=self._device)
        tensors = {
            name: memory[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for (name, array), place in zip(arrays.items(), places, strict=True)
        }
        return memory, tensors


def _ready(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor from where the device copies by itself."""
    return tensor if device.type == "cpu" else accelerator(device).locked_copy(tensor)
