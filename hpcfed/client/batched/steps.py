"""Steps of stacked clients: by any client optimizer along any network's gradients, or fused.

The clients of a stack are its first rows, those that work longest first, and in a step those of the same batch size
next to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.batched.gradients import Perceptron, StackedNetwork
from hpcfed.client.batched.matmul import Layer
from hpcfed.client.optimizers import optimizer_for
from hpcfed.client.solver import Stepping, Task
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.accelerators import upload

CACHED_BYTES = 1 << 20
"""Of `FlatDescent`, on a CPU: parameters that are stepped at a time, so that what a step's operations pass over, the
gradient above all, is still in the core's own cache."""
SMALLEST_KEEP, SMALLEST_SCALE = 0.5, 2.0**-20
"""Of `FusedDescent`: the least keep that joins the scale, and the scale below which it is applied."""


class EqualBatches(NamedTuple):
    """Clients of a stack whose minibatches have the same size in a step: rows ``first:last``, `size` samples."""

    first: int
    last: int
    size: int

    def of(self, batches: Tensor) -> Tensor:
        """Return this part of the step's minibatches (R, B, …)."""
        if (0, *batches.shape[:2]) == self:
            return batches
        return batches[self.first : self.last, : self.size]


class Pair:
    """Room for a single client as a stack of two equal ones, (2, …) each parameter.

    torch takes another kernel for a stack of one than for larger ones, and the two may round differently
    (docs/bits.md): so a client that is alone in a part of a stack is computed twice.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = [stack.new_empty(2, *stack.shape[1:]) for stack in parameters]
        self.gradients = [torch.empty_like(stack) for stack in self.parameters]

    def load(self, parameters: Sequence[Tensor]) -> None:
        """Copy the parameters of one client, (1, …) each."""
        for pair, own in zip(self.parameters, parameters, strict=True):
            pair.copy_(own.expand_as(pair))

    @staticmethod
    def of(batch: Tensor) -> Tensor:
        """Return a minibatch (1, B, …) twice, (2, B, …)."""
        return batch.expand(2, *batch.shape[1:]).contiguous()

    @staticmethod
    def store(pairs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Copy the first of each pair to `out`, (1, …) each."""
        for pair, own in zip(pairs, out, strict=True):
            own.copy_(pair[:1])


class Descent(Protocol):
    """Steps of stacked clients.

    Attributes:
        parameters: each parameter's stack, (clients, …), in the module's order; between `begin` and `end` only
            `iterate` says what they are.
    """

    parameters: list[Tensor]

    def begin(
        self, rows: Sequence[Task], constant: Tensor | None, anchors: Tensor | None, lr: float, mu: float
    ) -> None:
        """Prepare for a round of R clients, whose start lies in `parameters`.

        Args:
            rows: what they have to do; those with the most steps first.
            constant: `constant_of` each, (R, d), if any has one.
            anchors: of each, (R, d), where the gradient has `Stepping.pull`; else None.
            lr, mu: η_l and μ, the same for all.
        """
        ...

    def take_steps(
        self, first: int, x: Tensor, y: Tensor, parts: Sequence[Sequence[EqualBatches]], losses: Tensor
    ) -> None:
        """Take S steps.

        Args:
            first: number of the first one, from 0.
            x, y: minibatches (R, S, B, …).
            parts: of each step; clients in none have taken all their steps.
            losses: (R, S), where the losses go.
        """
        ...

    def iterate(self, row: int) -> list[Tensor]:
        """Return the parameters of a client that took the last step."""
        ...

    def end(self) -> None:
        """End the round: `parameters` are the clients' last ones."""
        ...


class FlatDescent:
    """By the recipe's optimizer, on each client's parameters as one vector: a few operations on all of them.

    Tilt, clip and decay are those of `SequentialSolver` and `FusedDescent`, in another order of operations;
    ``tests/numerics/test_tilts.py`` holds the three to one computation by hand.
    """

    def __init__(
        self,
        network: StackedNetwork,
        model: FlatModel,
        section: LocalSection,
        together: int,
        arithmetic: Arithmetic = LIBRARIES,
    ):
        self._network, self._section, self._stepping = network, section, Stepping(section)
        self._arithmetic = arithmetic
        alone = together == 1
        self._y = model.vector.unsqueeze(0) if alone else model.vector.new_zeros(together, model.vector.numel())
        self._g = torch.zeros_like(self._y)
        self.parameters, self._gradients = (list(model.views(flat).values()) for flat in (self._y, self._g))
        self._optimizer = optimizer_for(section, self._y, arithmetic)
        self._pair = None if alone or not isinstance(network, Perceptron) else Pair(self.parameters)
        on_cpu = model.vector.device.type == "cpu"
        self._at_a_time = max(1, CACHED_BYTES // model.vector.nbytes) if on_cpu else together

    def begin(
        self, rows: Sequence[Task], constant: Tensor | None, anchors: Tensor | None, lr: float, mu: float
    ) -> None:
        """Prepare; see `Descent`."""
        self._rows, self._constant, self._anchors, self._lr, self._mu = rows, constant, anchors, lr, mu
        self._offsets, self._radii = offsets_of(rows, self._y), radii_of(rows, self._y)
        self._elsewhere = self._offsets is not None or self._radii is not None
        self._optimizer.reset()

    def take_steps(
        self, first: int, x: Tensor, y: Tensor, parts: Sequence[Sequence[EqualBatches]], losses: Tensor
    ) -> None:
        """Take S steps; see `Descent`."""
        for step, (x_step, y_step, of_step) in enumerate(zip(x.unbind(1), y.unbind(1), parts, strict=True)):
            for part in of_step:
                rows = slice(part.first, part.last)
                losses[rows, step] = self._gradients_of(rows, part.of(x_step), part.of(y_step))
            active = of_step[-1].last
            for start in range(0, active, self._at_a_time):
                self._step(slice(start, min(start + self._at_a_time, active)))
            self._guess(first + step + 1, active)

    def iterate(self, row: int) -> list[Tensor]:
        """Return a client's parameters; see `Descent`."""
        return [stack[row] for stack in self.parameters]

    def end(self) -> None:
        """End the round; see `Descent`."""

    def _gradients_of(self, rows: slice, x: Tensor, y: Tensor) -> Tensor:
        """Write each row's ∇f of its minibatch, taken where its tilt says; return the losses there."""
        parameters, gradients = ([stack[rows] for stack in s] for s in (self.parameters, self._gradients))
        if not self._elsewhere:
            return self._plain_gradients(parameters, x, y, gradients)
        model, ascent, kept = self._y[rows], self._g[rows], self._y[rows].clone()
        if self._offsets is not None:
            model.add_(self._offsets[rows])
        if self._radii is not None:
            self._plain_gradients(parameters, x, y, gradients)
            model.add_(ascent * (self._radii[rows] / (torch.linalg.vector_norm(ascent, dim=1) + 1e-12)).unsqueeze(1))
        losses = self._plain_gradients(parameters, x, y, gradients)
        model.copy_(kept)
        return losses

    def _plain_gradients(self, parameters: list[Tensor], x: Tensor, y: Tensor, gradients: list[Tensor]) -> Tensor:
        """Write each row's ∇f of its minibatch; return the losses."""
        pair = self._pair
        if pair is None or len(x) > 1:
            return self._network.gradients(parameters, x, y, gradients)
        pair.load(parameters)
        losses = self._network.gradients(pair.parameters, pair.of(x), pair.of(y), pair.gradients)
        pair.store(pair.gradients, gradients)
        return losses[:1]

    def _step(self, rows: slice) -> None:
        """One step of the client optimizer; tilt, clip and decay as `SequentialSolver` has them."""
        before_clip, after_clip = self._stepping.scales(self._mu)
        y, g = self._y[rows], self._g[rows]
        if self._constant is not None:
            g.add_(self._constant[rows])
        if self._anchors is not None:
            g.add_(y - self._anchors[rows], alpha=self._stepping.pull(self._mu))
        if before_clip:
            self._arithmetic.add_scaled(g, y, before_clip)
        if self._section.clip_norm is not None:
            self._clip(g, self._section.clip_norm)
            if after_clip:
                self._arithmetic.add_scaled(g, y, after_clip)
        self._optimizer.step(y, g, self._lr, rows)

    def _clip(self, g: Tensor, most: float) -> None:
        """Scale each row to a norm of at most `most`; on a CPU, only those rows that are longer."""
        scales = (most / (self._arithmetic.norms(g) + 1e-6)).clamp_(max=1.0)
        if g.device.type != "cpu":
            g.mul_(scales.unsqueeze(1))
            return
        for row, scale in enumerate(scales.tolist()):
            if scale != 1:
                g[row].mul_(scale)

    def _guess(self, done: int, active: int) -> None:
        """Apply the guessed steps (GeL) of clients that have taken all theirs."""
        for row in range(active - 1, -1, -1):
            task = self._rows[row]
            if task.steps > done:
                break
            if task.guessed:
                own = slice(row, row + 1)
                self._optimizer.guess(self._y[own], self._lr, task.guessed, own)


class FusedDescent:
    """By plain SGD on a perceptron: its products are added where the parameters lie, each one's stack without gaps.

    Tilt and decay are a factor of the parameters, keep, and a constant; ``tests/numerics/test_tilts.py`` holds them to
    those of `FlatDescent` and `SequentialSolver`. Tilts with an offset or a radius need `FlatDescent`. The factor is
    not applied in each step: the stacks hold V, the parameters are scale·V, and

        scale ← keep·scale,     V ← V − (lr / scale)·gradient

    takes one pass over memory less.
    """

    def __init__(self, network: Perceptron, model: FlatModel, section: LocalSection, together: int):
        self._network, self._model, self._stepping = network, model, Stepping(section)
        views = model.views(model.vector).values()
        self.parameters = [
            view.unsqueeze(0) if together == 1 else view.new_empty(together, *view.shape) for view in views
        ]
        self._layers: dict[tuple[int, int], list[Layer]] = {}
        self._pair = None if together == 1 else Pair(self.parameters)
        self._scale, self._active = 1.0, 0

    def begin(
        self, rows: Sequence[Task], constant: Tensor | None, anchors: Tensor | None, lr: float, mu: float
    ) -> None:
        """Prepare; see `Descent`. Without momentum there is nothing to guess from."""
        self._lr, self._keep = lr, 1 - lr * sum(self._stepping.scales(mu))
        self._constants = None if constant is None else list(self._model.views(constant).values())
        self._layers.clear()
        self._scale, self._active = 1.0, len(rows)

    def take_steps(
        self, first: int, x: Tensor, y: Tensor, parts: Sequence[Sequence[EqualBatches]], losses: Tensor
    ) -> None:
        """Take S steps; see `Descent`."""
        encoded = self._network.encoded(y.flatten(1, 2), self._rows_of(0, len(x))).view(*y.shape[:3], -1)
        outputs: dict[EqualBatches, dict[int, Tensor]] = defaultdict(dict)
        batches = zip(x.flatten(3).unbind(1), encoded.unbind(1), parts, strict=True)
        for step, (x_step, y_step, of_step) in enumerate(batches):
            self._leave_out(of_step[-1].last)
            keep, scale = self._factors()
            for part in of_step:
                outputs[part][step] = self._descend(part, part.of(x_step), part.of(y_step), keep, self._lr / scale)
            self._scale = scale
            for stack, constant in self._shifts(of_step[-1].last):
                stack.sub_(constant, alpha=self._lr / scale)
        for part, z in outputs.items():  # of many steps at once, for no step waits for its loss
            rows = slice(part.first, part.last)
            steps = slice(None) if len(z) == len(parts) else upload(torch.tensor(list(z)), y.device)
            targets = y[rows, steps, : part.size]
            of_part = self._network.losses(torch.stack(list(z.values()), 1).flatten(0, 1), targets.flatten(0, 1))
            losses[rows, steps] = of_part.view(-1, len(z))

    def _descend(self, part: EqualBatches, x: Tensor, encoded: Tensor, keep: float, lr: float) -> Tensor:
        """Take a step with the clients of a part; return z before it, (clients, B, C)."""
        pair = self._pair
        if pair is None or len(x) > 1:
            layers = self._rows_of(part.first, part.last)
            return self._network.descend(layers, x, encoded, keep, lr, self._scale)
        own = [stack[part.first : part.last] for stack in self.parameters]
        pair.load(own)
        layers = self._network.layers(pair.parameters)
        z = self._network.descend(layers, pair.of(x), pair.of(encoded), keep, lr, self._scale)
        pair.store(pair.parameters, own)
        return z[:1]

    def iterate(self, row: int) -> list[Tensor]:
        """Return a client's parameters; see `Descent`."""
        return [stack[row] * self._scale for stack in self.parameters]

    def end(self) -> None:
        """End the round; see `Descent`."""
        self._apply_scale(0)
        self._scale = 1.0

    def _factors(self) -> tuple[float, float]:
        """Return the factor of V in the next step, and the scale after it."""
        if not SMALLEST_KEEP <= self._keep <= 1:
            return self._keep, self._scale
        if self._scale < SMALLEST_SCALE:
            self._apply_scale(0)
            self._scale = 1.0
        return 1.0, self._scale * self._keep

    def _leave_out(self, active: int) -> None:
        """Go on with the first clients alone; the others have taken all their steps."""
        if active < self._active:
            self._apply_scale(active)
            self._active = active

    def _apply_scale(self, first: int) -> None:
        """Multiply the parameters of the clients ``first:`` that still worked."""
        if self._scale != 1:
            for stack in self.parameters:
                stack[first : self._active].mul_(self._scale)

    def _rows_of(self, first: int, last: int) -> list[Layer]:
        """Return the layers of some rows."""
        if (first, last) not in self._layers:
            self._layers[first, last] = self._network.layers([stack[first:last] for stack in self.parameters])
        return self._layers[first, last]

    def _shifts(self, active: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter's stack, and its constants, of the first rows; nothing where all constants are 0."""
        if self._constants is not None:
            for stack, constant in zip(self.parameters, self._constants, strict=True):
                yield stack[:active], constant[:active]


def offsets_of(rows: Sequence[Task], like: Tensor) -> Tensor | None:
    """Return the offset of each client's gradients, (R, d); None if all are 0."""
    if all(task.tilt.offset is None for task in rows):
        return None
    return torch.stack([like.new_zeros(like.shape[1]) if t.tilt.offset is None else t.tilt.offset for t in rows])


def radii_of(rows: Sequence[Task], like: Tensor) -> Tensor | None:
    """Return the radius of each client's ascent, (R,); None if all are 0."""
    radii = [task.tilt.radius for task in rows]
    return like.new_tensor(radii) if any(radii) else None
