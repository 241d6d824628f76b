"""The clients of a tile on a device: their work as a few pieces that can be recorded (`hpcfed.ranks.graphs`).

A tile begins with a copy of its inputs and ends with a select: each client's Δ is taken at its own last step, whatever
its neighbours do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfed.client.batched.steps import DeviceDescent
from hpcfed.client.device_rounds import DeviceRounds, Draws
from hpcfed.client.shorts import Short
from hpcfed.client.solver import Stepping, Task, start_of, vectors_of
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.ranks.graphs import Graphs


class DeviceTile:
    """Trains the clients of a tile.

    Args:
        descent: takes their steps.
        deltas: where each Δ goes, (R, d).
        section: the recipe's ``local``.
        graphs: records the pieces.
        width, most_steps, averages, width_step: as `hpcfed.client.batched.solver.StackedSolver` has them.
        computing: context manager of a step.
    """

    def __init__(
        self,
        descent: DeviceDescent,
        deltas: Tensor,
        section: LocalSection,
        graphs: Graphs,
        *,
        width: int,
        most_steps: int,
        averages: bool,
        width_step: int,
        computing: Callable[[], AbstractContextManager[object]],
    ):
        slots = len(deltas)
        self._descent, self._deltas, self._graphs, self._width = descent, deltas, graphs, width
        self._stepping, self._batch_size, self._computing = Stepping(section), section.batch_size, computing
        self._rounds = DeviceRounds(
            self,
            graphs,
            deltas,
            slots=slots,
            width=width,
            most_steps=most_steps,
            averages=averages,
            width_step=width_step,
        )
        self._w = deltas.new_zeros(deltas.shape[1])
        self._iterates = torch.zeros_like(deltas)
        self._ends = torch.zeros(1, dtype=torch.int64, device=deltas.device)
        self._vectors: dict[str, Tensor] = {}

    def step(self, x: Tensor, y: Tensor, short: Short | None, numbers: Sequence[Tensor], draws: Draws) -> Tensor:
        """Take a step; see `hpcfed.client.device_rounds.Steps`."""
        with self._computing():
            return self._descent.step(x, y, short, numbers, draws.get("keys"))

    def train(
        self,
        w: Tensor,
        of_slot: Mapping[int, Task],
        orders: Mapping[int, np.ndarray],
        sizes: np.ndarray,
        lr: float,
        keys: np.ndarray | None = None,
        show: Callable[[Mapping[int, Task], int], None] | None = None,
    ) -> Sequence[Tensor]:
        """Train clients by slot, of one μ, from w; return the sums of their losses, (R,) scalars.

        Args:
            w: (d,).
            of_slot: the clients.
            orders, sizes: of their minibatches, as `DeviceRounds.open` takes them.
            lr: η_l.
            keys: of dropout's masks, (R, steps, keys); None without dropout.
            show: called with those who have taken a step, or their guessed ones, and its number.
        """
        mu = next(iter(of_slot.values())).tilt.mu
        vectors = self._write(w, of_slot, lr, mu)
        names = tuple(sorted(vectors))
        ends = sorted({task.steps for task in of_slot.values()})
        taken = {slot: task.steps for slot, task in of_slot.items()}
        slots = len(self._deltas)
        at_end = np.zeros((slots, slots), np.bool_)
        for row, end in enumerate(ends):
            at_end[row, [slot for slot, steps in taken.items() if steps == end]] = True
        radii = np.zeros(slots)
        radii[list(of_slot)] = [task.tilt.radius for task in of_slot.values()]
        others = {"ends": at_end, "radius": radii.astype(str(w.dtype).removeprefix("torch."))}
        if radii.any():
            names = (*names, "radius")
        most = max(1, sizes.shape[1])
        rows = sizes[0] if slots == 1 and sizes.shape[1] else np.full(most, self._width)
        numbers = self._descent.numbers(lr, mu, rows)
        samples = {slot: task.samples for slot, task in of_slot.items()}
        draws = {} if keys is None else {"keys": keys.transpose(1, 0, 2)}
        self._rounds.open(samples, orders, sizes, taken, numbers, draws=draws, others=others)
        self._descent.expect(names, lr, mu)
        kind = names, tuple(map(bool, (*self._stepping.scales(mu), self._stepping.pull(mu))))
        alike = show is None and len(ends) == 1 and not any(task.guessed for task in of_slot.values())
        if not (alike and self._rounds.whole(ends[0], kind, partial(self._begin, names), self._end)):
            self._take_pieces(of_slot, ends, names, kind, show)
        return self._rounds.losses()

    def _take_pieces(
        self,
        of_slot: Mapping[int, Task],
        ends: Sequence[int],
        names: Sequence[str],
        kind: Hashable,
        show: Callable[[Mapping[int, Task], int], None] | None,
    ) -> None:
        """Begin, and take the steps up to each of `ends`, where a client may guess on, and Δ is taken of some."""
        self._graphs(("begin", self._rounds.kind, kind), partial(self._begin, names))
        step = 0
        for end in ends:
            for last in range(step + 1, end + 1) if show is not None else (end,):
                self._rounds.take(step, last, kind)
                step = last
                if show is not None:
                    show(of_slot, last)
            for slot, task in of_slot.items():
                if task.steps == end and task.guessed:
                    self._descent.guess(slot, task.guessed, end)
                    if show is not None:
                        show({slot: task}, end)
            self._graphs(("end", self._rounds.kind), self._end)

    def _write(self, w: Tensor, of_slot: Mapping[int, Task], lr: float, mu: float) -> dict[str, Tensor]:
        """Write w, and what tilts have of each client, into memory that stays; return the latter, (R, d), by name."""
        self._w.copy_(w)
        pull = self._stepping.pull(mu)
        found: dict[str, dict[int, Tensor]] = {"start": {}, "constant": {}, "anchor": {}, "offset": {}, "move": {}}
        for slot, task in of_slot.items():
            start = start_of(task.tilt, w)
            if start is not w:
                found["start"][slot] = start
            for name, vector in vectors_of(task.tilt, w, lr, pull).items():
                found[name][slot] = vector
        vectors = {}
        for name, by_slot in found.items():
            if not by_slot:
                continue
            if name not in self._vectors:
                self._vectors[name] = torch.zeros_like(self._deltas)
            vectors[name] = rows = self._vectors[name]
            for slot in range(len(rows)):
                if slot in by_slot:
                    rows[slot].copy_(by_slot[slot])
                elif name == "start":
                    rows[slot].copy_(w)
                elif len(by_slot) < len(of_slot):
                    rows[slot].zero_()
        return vectors

    def _begin(self, names: Sequence[str]) -> None:
        self._rounds.begin()
        self._ends.zero_()
        self._descent.stacks.fill(self._vectors["start"] if "start" in names else self._w)
        vectors = {name: self._vectors[name] for name in names if name not in ("start", "radius")}
        if "radius" in names:
            vectors["radius"] = self._rounds.inputs["radius"]
        self._descent.begin_on_device(vectors)

    def _end(self) -> None:
        """Take Δ of the clients whose last step this was."""
        chosen = self._rounds.inputs["ends"].index_select(0, self._ends).view(-1, 1)
        iterates = self._descent.take(0, len(self._deltas), self._iterates)
        torch.where(chosen, self._w - iterates, self._deltas, out=self._deltas)
        self._ends.add_(1)
