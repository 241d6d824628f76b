"""One client on a device: its steps as a few pieces that can be recorded (`hpcfed.ranks.graphs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import proxy

import numpy as np
import torch
from torch import Tensor

from hpcfed.client.augment import cropped, crops
from hpcfed.client.device_rounds import DeviceRounds, Draws
from hpcfed.client.shorts import Short
from hpcfed.client.solver import Scales, SequentialSolver, Stepping, Task, TiltParts, vectors_of
from hpcfed.config.recipe import Augment
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.data.batches import visits
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.graphs import Graphs

CROPS = ("top", "left", "flips")


class DeviceClient:
    """Trains one client after another.

    Args:
        solver: takes their steps, on the memory of its model.
        model, section: what is trained, and how.
        graphs: records the pieces.
        width, most_steps: samples of a minibatch and steps of a client, at most, as far as is known.
    """

    def __init__(
        self,
        solver: SequentialSolver,
        model: FlatModel,
        section: LocalSection,
        graphs: Graphs,
        *,
        width: int,
        most_steps: int,
    ):
        self._solver: SequentialSolver = proxy(solver)  # which has this, as in `DeviceRounds`
        self._model, self._section, self._graphs, self._width = model, section, graphs, width
        self._rounds = DeviceRounds(self, graphs, model.vector, slots=1, width=width, most_steps=most_steps)
        self._vectors: dict[str, Tensor] = {}

    def step(self, x: Tensor, y: Tensor, short: Short | None, numbers: Sequence[Tensor], draws: Draws) -> Tensor:
        """Take a step; see `hpcfed.client.device_rounds.Steps`."""
        x, y = x[0], y[0]
        if self._section.augment is not None:
            count = len(x) if self._section.augment.per == "sample" else 1
            x = cropped(x, self._section.augment, *(draws[name][:count] for name in CROPS))
        vectors = {name: vector for name, vector in self._vectors.items() if name in self._names}
        radius = self._rounds.inputs["radius"][0] if "radius" in self._names else 0.0
        scales = self._scales.on_device(numbers[-3:])
        with torch.enable_grad():
            constant, anchor, offset, move = map(vectors.get, ("constant", "anchor", "offset", "move"))
            parts = TiltParts(constant, anchor, offset, radius, move)
            loss = self._solver.take_step(x, y, parts, scales, numbers[:-3])
        return loss.detach().reshape(1)

    def train(
        self,
        w: Tensor,
        task: Task,
        lr: float,
        rng: np.random.Generator,
        of_crops: np.random.Generator,
        show: Callable[[int], None] | None,
    ) -> Tensor:
        """Take a client's steps; see `hpcfed.client.solver.DeviceTraining`."""
        self._names, self._scales = self._write(w, task, lr)
        count, steps = len(task.samples[1]), task.steps
        order, sizes = visits(count, self._section.batch_size, steps, rng, max(self._width, count if steps else 0))
        order = order[:, : self._width]
        numbers = [(*step, *self._scales) for step in self._solver.numbers(lr, max(1, steps))]
        draws = {} if self._section.augment is None else self._crops(self._section.augment, sizes, of_crops)
        about = {"draws": draws, "others": {"radius": np.array([task.tilt.radius], str(w.dtype).partition(".")[2])}}
        self._rounds.open({0: task.samples}, {0: order}, sizes[None], {0: steps}, np.array(numbers), **about)
        kind = self._names, tuple(map(bool, self._scales))
        if show is None and self._rounds.whole(steps, kind, self._begin, lambda: None):
            return self._rounds.losses()[0]
        self._graphs(("begin", self._rounds.kind), self._begin)
        for first, last in [(0, steps)] if show is None else [(step, step + 1) for step in range(steps)]:
            self._rounds.take(first, last, kind)
            if show is not None:
                show(last)
        return self._rounds.losses()[0]

    def _write(self, w: Tensor, task: Task, lr: float) -> tuple[tuple[str, ...], Scales]:
        """Write what a client's tilt has into memory that stays; return its names, and the coefficients of y."""
        stepping, tilt = Stepping(self._section), task.tilt
        pull = stepping.pull(tilt.mu)
        found = vectors_of(tilt, w, lr, pull)
        for name, vector in found.items():
            if name not in self._vectors:
                self._vectors[name] = torch.zeros_like(self._model.vector)
            self._vectors[name].copy_(vector)
        return (*found, *["radius"] * bool(tilt.radius)), Scales(*stepping.scales(tilt.mu), pull)

    def _crops(self, section: Augment, sizes: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the crops of all minibatches, (steps, n) each."""
        every = self._width if section.per == "sample" else 1
        found = {name: np.zeros((len(sizes), every), bool if name == "flips" else np.int64) for name in CROPS}
        for step, size in enumerate(sizes.tolist()):
            for name, drawn in zip(CROPS, crops(size, section, rng), strict=True):
                found[name][step, : len(drawn)] = drawn
        return found

    def _begin(self) -> None:
        self._rounds.begin()
        self._solver.reset()
