"""Steps of the clients of a tile: by any client optimizer along any network's gradients, or fused.

All R slots take every step, whether a client is there and still works or not; a client's last iterate is read after its
own last step.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.batched.gradients import Perceptron, StackedNetwork
from hpcfed.client.batched.tiles import REGISTERS, Stacks
from hpcfed.client.optimizers import Number, optimizer_for
from hpcfed.client.shorts import Short
from hpcfed.client.solver import Scales, Stepping, Task, anchor_of, constant_of, move_of
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.accelerators import upload

CACHED_BYTES = 1 << 20
"""Of `FlatDescent`, on a CPU: parameters that are stepped at a time, so that what a step's operations pass over, the
gradient above all, is still in the core's own cache."""
SMALLEST_KEEP, SMALLEST_SCALE = 0.5, 2.0**-20
"""Of `FusedDescent`: the least keep that joins the scale, and the scale below which it is applied."""


class Descent(Protocol):
    """Steps of the clients of a tile.

    Attributes:
        stacks: the parameters of all slots; after `begin` only `take` says what they are.
    """

    stacks: Stacks

    def begin(self, tasks: Mapping[int, Task], w: Tensor, lr: float, mu: float) -> None:
        """Prepare for clients whose start lies in `stacks`.

        Args:
            tasks: by slot.
            w: the server's model, (d,).
            lr, mu: η_l and μ, the same for all.
        """
        ...

    def take_steps(
        self, x: Tensor, y: Tensor, short: Sequence[Short | None], losses: Tensor, keys: Tensor | None = None
    ) -> None:
        """Take S steps.

        Args:
            x, y: minibatches (R, S, B, …).
            short: which of their rows are samples, of each step.
            losses: (R, S), where the losses go.
            keys: of dropout's masks, (R, S, keys); None without dropout.
        """
        ...

    def guess(self, slot: int, steps: float, taken: int) -> None:
        """Take the guessed steps (GeL) of a client that has taken all others, so many."""
        ...

    def take(self, first: int, last: int, out: Tensor) -> Tensor:
        """Write the present iterates of the slots ``first:last`` into `out`, (last − first, d), and return them."""
        ...

    def take_private(self, slot: int) -> Tensor:
        """Return the present private parameters of a slot, (p,)."""
        ...


class DeviceDescent(Descent, Protocol):
    """A `Descent` whose steps can be recorded on a device."""

    def numbers(self, lr: float, mu: float, sizes: np.ndarray) -> np.ndarray:
        """Return the numbers of steps on a device, (steps, n), from the rows of their minibatches, (steps,)."""
        ...

    def expect(self, vectors: Container[str], lr: float, mu: float) -> None:
        """Prepare for clients on a device whose tilts have these vectors, of ``constant``, ``anchor``, ``offset``,
        ``move`` and ``radius``.
        """
        ...

    def begin_on_device(self, vectors: Mapping[str, Tensor]) -> None:
        """Begin from `stacks` with these vectors, (R, d), and radii, (R,): work that can be recorded."""
        ...

    def step(
        self, x: Tensor, y: Tensor, short: Short | None, numbers: Sequence[Tensor], keys: Tensor | None = None
    ) -> Tensor:
        """Take a step on minibatches (R, B, …) with its `numbers`, scalars of the device, and the keys of dropout's
        masks, (R, keys); return the losses, (R,).
        """
        ...


class FlatDescent:
    """By the recipe's optimizer, on all parameters of all slots as one vector: a few operations a step.

    Tilt, clip and decay are those of `SequentialSolver` and `FusedDescent`, in another order of operations;
    ``tests/numerics/test_tilts.py`` holds the three to one computation by hand.
    """

    def __init__(
        self,
        network: StackedNetwork,
        model: FlatModel,
        section: LocalSection,
        stacks: Stacks,
        arithmetic: Arithmetic = LIBRARIES,
    ):
        self._network, self._model, self._section, self._stepping = network, model, section, Stepping(section)
        self._arithmetic, self.stacks = arithmetic, stacks
        self._gradients = stacks.like()
        self._y, self._g = stacks.flat, self._gradients.flat
        self._optimizer = optimizer_for(section, self._y, arithmetic)
        piece = max(REGISTERS, CACHED_BYTES // REGISTERS * REGISTERS) // self._y.element_size()
        self._at_a_time = piece if self._y.device.type == "cpu" else len(self._y)
        self._held: dict[str, Stacks] = {}
        self._of_private = Scales(*self._stepping.scales(0.0), 0.0)  # which no method tilts
        self._radii = self._y.new_zeros(stacks.slots)

    def begin(self, tasks: Mapping[int, Task], w: Tensor, lr: float, mu: float) -> None:
        """Prepare; see `Descent`."""
        self._lr, pull = lr, self._stepping.pull(mu)
        self._scales = Scales(*self._stepping.scales(mu), pull)
        self._constant = self._stacked({slot: constant_of(task.tilt, w, pull) for slot, task in tasks.items()})
        self._anchors = self._stacked({s: anchor_of(t.tilt, w) for s, t in tasks.items()}) if pull else None
        self._offsets = self._stacked({slot: task.tilt.offset for slot, task in tasks.items()})
        self._moves = self._stacked({slot: move_of(task.tilt, lr) for slot, task in tasks.items()})
        radii = {slot: task.tilt.radius for slot, task in tasks.items()}
        of_slots = torch.tensor([radii.get(slot, 0.0) for slot in range(self.stacks.slots)], dtype=self._y.dtype)
        self._radii = upload(of_slots, self._y.device)
        self._ascends = any(radii.values())
        self._optimizer.reset()

    def take_steps(
        self, x: Tensor, y: Tensor, short: Sequence[Short | None], losses: Tensor, keys: Tensor | None = None
    ) -> None:
        """Take S steps; see `Descent`."""
        of_steps = [None] * len(short) if keys is None else keys.unbind(1)
        each = zip(x.unbind(1), y.unbind(1), short, of_steps, strict=True)
        for step, (x_step, y_step, of_step, own) in enumerate(each):
            losses[:, step] = self._gradients_of(x_step, y_step, of_step, own)
            self._optimizer.taken += 1
            self._step(self._optimizer.numbers(self._lr, self._optimizer.taken), self._scales)

    def numbers(self, lr: float, mu: float, sizes: np.ndarray) -> np.ndarray:
        """Return the optimizer's numbers and the scales of steps; see `Descent`."""
        scales = *self._stepping.scales(mu), self._stepping.pull(mu)
        return np.array([(*self._optimizer.numbers(lr, step + 1), *scales) for step in range(len(sizes))])

    def expect(self, vectors: Container[str], lr: float, mu: float) -> None:
        """Prepare; see `Descent`."""
        names = ("constant", "anchor", "offset", "move")
        for name in names:
            if name in vectors and name not in self._held:
                self._held[name] = self.stacks.like()
        found = [self._held[name].flat if name in vectors else None for name in names]
        self._constant, self._anchors, self._offsets, self._moves = found
        self._ascends, self._lr = "radius" in vectors, lr
        self._scales = Scales(*self._stepping.scales(mu), self._stepping.pull(mu))

    def begin_on_device(self, vectors: Mapping[str, Tensor]) -> None:
        """Begin; see `Descent`."""
        for name, vector in vectors.items():
            if name == "radius":
                self._radii.copy_(vector)
            else:
                self._held[name].fill(vector)
        self._optimizer.reset()

    def step(
        self, x: Tensor, y: Tensor, short: Short | None, numbers: Sequence[Tensor], keys: Tensor | None = None
    ) -> Tensor:
        """Take a step; see `Descent`."""
        losses = self._gradients_of(x, y, short, keys)
        self._step(numbers[:-3], self._scales.on_device(numbers[-3:]))
        return losses

    def guess(self, slot: int, steps: float, taken: int) -> None:
        """Take guessed steps; see `Descent`."""
        self._optimizer.taken = taken
        for first, last in self.stacks.pieces(slot):
            piece = slice(first, last)
            self._optimizer.guess(self._y[piece], self._lr, steps, piece)

    def take(self, first: int, last: int, out: Tensor) -> Tensor:
        """Write iterates; see `Descent`."""
        return self.stacks.take(first, last, out)

    def take_private(self, slot: int) -> Tensor:
        """Return private parameters; see `Descent`."""
        return self.stacks.take_private(slot)

    def _stacked(self, vectors: Mapping[int, Tensor | None]) -> Tensor | None:
        """Return vectors (d,) by slot as `Stacks.flat`; None if there is none at all."""
        found = self.stacks.holding(vectors)
        return None if found is None else found.flat

    def _gradients_of(self, x: Tensor, y: Tensor, short: Short | None, keys: Tensor | None = None) -> Tensor:
        """Write each slot's ∇f of its minibatch, taken where its tilt says; return the losses there."""
        parameters, gradients = self.stacks.each, self._gradients.each
        of_masks = () if keys is None else (keys,)
        if self._offsets is None and not self._ascends:
            return self._network.gradients(parameters, x, y, gradients, short, *of_masks)
        kept = self._y.clone()
        if self._offsets is not None:
            self._y.add_(self._offsets)
        if self._ascends:
            self._network.gradients(parameters, x, y, gradients, short, *of_masks)
            factors = self._radii / (torch.linalg.vector_norm(self._gradients.rows(), dim=1) + 1e-12)
            for model, ascent in zip(parameters, gradients, strict=True):
                model.add_(ascent * factors.view(-1, *(1,) * (ascent.ndim - 1)))
        losses = self._network.gradients(parameters, x, y, gradients, short, *of_masks)
        self._y.copy_(kept)
        return losses

    def _pieces(self, scales: Scales) -> Iterator[tuple[slice, Scales]]:
        """Yield what is stepped at a time, with the coefficients of y there."""
        shared = self.stacks.shared
        for first, last, own in ((0, shared, scales), (shared, len(self._y), self._of_private)):
            for start in range(first, last, self._at_a_time):
                yield slice(start, min(last, start + self._at_a_time)), own

    def _step(self, numbers: Sequence[Number], scales: Scales) -> None:
        """One step of the client optimizer; tilt, clip and decay as `SequentialSolver` has them."""
        if self._section.clip_norm is None:
            for piece, own in self._pieces(scales):
                self._tilt(piece, own)
                self._move(piece, numbers)
            return
        for piece, own in self._pieces(scales):
            self._tilt(piece, own)
        self._clip(self._section.clip_norm)
        for piece, own in self._pieces(scales):
            if Scales.has(own.after_clip):
                self._arithmetic.add_scaled(self._g[piece], self._y[piece], own.after_clip)
            self._move(piece, numbers)

    def _move(self, piece: slice, numbers: Sequence[Number]) -> None:
        y = self._y[piece]
        self._optimizer.move(y, self._g[piece], numbers, piece)
        if self._moves is not None:
            y.add_(self._moves[piece])

    def _tilt(self, piece: slice, scales: Scales) -> None:
        """Add what a tilt, and a decay that is clipped with it, add to the gradient."""
        y, g = self._y[piece], self._g[piece]
        if self._constant is not None:
            g.add_(self._constant[piece])
        if self._anchors is not None and Scales.has(scales.pull):
            LIBRARIES.add_scaled(g, y - self._anchors[piece], scales.pull)
        if Scales.has(scales.before_clip):
            self._arithmetic.add_scaled(g, y, scales.before_clip)

    def _clip(self, most: float) -> None:
        """Scale each slot's gradient to a norm of at most `most`."""
        scales = (most / (self._arithmetic.norms(self._gradients.rows()) + 1e-6)).clamp_(max=1.0)
        if scales.device.type == "cpu" and bool((scales == 1).all()):
            return
        for stack in self._gradients.each:
            stack.mul_(scales.view(-1, *(1,) * (stack.ndim - 1)))


class FusedDescent:
    """By plain SGD on a perceptron: its products are added where the parameters lie, each one's stack without gaps.

    Tilt and decay are a factor of the parameters, keep, and a constant; ``tests/numerics/test_tilts.py`` holds them to
    those of `FlatDescent` and `SequentialSolver`. Tilts with an offset or a radius need `FlatDescent`. The factor is
    not applied in each step: the stacks hold V, the parameters are scale·V, and

        scale ← keep·scale,     V ← V − (lr / scale)·gradient

    takes one pass over memory less.
    """

    def __init__(self, network: Perceptron, model: FlatModel, section: LocalSection, stacks: Stacks):
        self._network, self._model, self._stepping = network, model, Stepping(section)
        self.stacks, self._layers = stacks, network.layers(stacks.each)
        self._scale = 1.0
        self._held: Stacks | None = None

    def begin(self, tasks: Mapping[int, Task], w: Tensor, lr: float, mu: float) -> None:
        """Prepare; see `Descent`."""
        self._lr, self._keep, self._scale = lr, 1 - lr * sum(self._stepping.scales(mu)), 1.0
        self._constants = self.stacks.holding({slot: constant_of(task.tilt, w, 0.0) for slot, task in tasks.items()})
        self._hidden = self._keep > 0 and self._network.hide(self._layers)

    def take_steps(
        self, x: Tensor, y: Tensor, short: Sequence[Short | None], losses: Tensor, keys: Tensor | None = None
    ) -> None:
        """Take S steps; see `Descent`. A perceptron has no dropout."""
        encoded = self._network.encoded(y.flatten(1, 2), self._layers).view(*y.shape[:3], -1)
        weights = self._network.weights(y.flatten(1, 2))
        of_steps = [None] * len(short) if weights is None else weights.view(*y.shape[:3], 1).unbind(1)
        outputs = []
        each = zip(x.flatten(3).unbind(1), encoded.unbind(1), short, of_steps, strict=True)
        for x_step, encoded_step, of_step, own in each:
            keep, scale = self._factors()
            factors = keep, self._lr / scale, self._scale
            z = self._network.descend(self._layers, x_step, encoded_step, *factors, of_step, own, hidden=self._hidden)
            outputs.append(z)
            self._scale = scale
            if self._constants is not None:
                self.stacks.flat.sub_(self._constants.flat, alpha=self._lr / scale)
        losses.copy_(self._network.losses_of_steps(torch.stack(outputs, 1), y, short))

    def numbers(self, lr: float, mu: float, sizes: np.ndarray) -> np.ndarray:
        """Return each step's factors of D, of the constant term and of V, (steps, 3); see `Descent`."""
        keep = 1 - lr * sum(self._stepping.scales(mu))
        return np.array([(-lr * self._network.share(size), -lr, keep) for size in sizes.tolist()])

    def expect(self, vectors: Container[str], lr: float, mu: float) -> None:
        """Prepare; see `Descent`. On a device the scale stays 1: V is multiplied in each step, in one pass."""
        if "constant" in vectors and self._held is None:
            self._held = self.stacks.like()
        self._constants = self._held if "constant" in vectors else None
        self._decays = any(self._stepping.scales(mu))

    def begin_on_device(self, vectors: Mapping[str, Tensor]) -> None:
        """Begin; see `Descent`."""
        if self._held is not None and "constant" in vectors:
            self._held.fill(vectors["constant"])

    def step(
        self, x: Tensor, y: Tensor, short: Short | None, numbers: Sequence[Tensor], keys: Tensor | None = None
    ) -> Tensor:
        """Take a step; see `Descent`."""
        step, of_constant, keep = numbers
        z, changes = self._network.changes(self._layers, x.flatten(2), y, step, short)
        if self._decays:
            self.stacks.flat.mul_(keep)
        if self._constants is not None:
            self.stacks.flat.addcmul_(self._constants.flat, of_constant)
        self._network.apply(changes)
        return self._network.losses(z, y, short)

    def guess(self, slot: int, steps: float, taken: int) -> None:
        """Do nothing: without momentum there is nothing to guess from."""

    def take(self, first: int, last: int, out: Tensor) -> Tensor:
        """Write iterates; see `Descent`."""
        return self.stacks.take(first, last, out, self._scale)

    def take_private(self, slot: int) -> Tensor:
        """Return private parameters; see `Descent`."""
        return self.stacks.take_private(slot, self._scale)

    def _factors(self) -> tuple[float, float]:
        """Return the factor of V in the next step, and the scale after it."""
        if not SMALLEST_KEEP <= self._keep <= 1:
            return self._keep, self._scale
        if self._scale < SMALLEST_SCALE:
            self.stacks.flat.mul_(self._scale)
            self._scale = 1.0
        return 1.0, self._scale * self._keep
