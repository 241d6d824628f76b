"""The local solver: one client's training in one round, the same lines for every method.

    g = clip(∇f(y; batch) + shift + μ (y − anchor)) + wd·y,     y ← y − η · (the optimizer's direction from g)

from y = w, and then, if the recipe has it guess, on without gradients. What a method adds is its tilt (shift, μ,
anchor), constant during the round; so shift − μ·anchor is computed once, and μ·y joins the weight decay wherever no
clipping comes between the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpcfed.client.augment import augmented
from hpcfed.client.displacement import displacement
from hpcfed.client.optimizers import optimizer_for
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.data.batches import minibatches
from hpcfed.data.shards import Samples
from hpcfed.flat import FlatModel
from hpcfed.losses import Loss
from hpcfed.rng import Purpose, stream, torch_seed
from hpcfed.types import Local, Tilt


class LocalSolver:
    """Trains one client after another with one model and one set of buffers.

    Args:
        model, loss, section: what is trained, on what, and how (the recipe's ``local``).
        seed: the recipe's ``seed.batches``.
        draws: whether the model draws random numbers of its own, which then come from the client's stream.
    """

    def __init__(self, model: FlatModel, loss: Loss, section: LocalSection, seed: int, *, draws: bool):
        self._model = model
        self._loss = loss
        self._section = section
        self._seed = seed
        self._generator = _torch_generator(model.vector.device) if draws else None
        self._delta = torch.empty_like(model.vector)
        self._optimizer = optimizer_for(section, model.vector)

    def lr(self, round: int) -> float:
        """Return η_l of a round, counted from 1."""
        return self._section.lr * self._section.lr_decay ** (round - 1)

    def displacement(self, steps: int, guessed: float, *, round: int, mu: float) -> float | None:
        """Return ‖a_i‖₁ of a client whose tilt has this μ; None for an optimizer that has none."""
        if self._section.optimizer != "sgd":
            return None
        return displacement(steps, guessed, lr=self.lr(round), momentum=self._section.momentum, mu=mu)

    def solve(
        self, w: Tensor, samples: Samples, tilt: Tilt, *, steps: int, guessed: float, round: int, client: int
    ) -> Local:
        """Run `steps` minibatch steps of one client from the server's model `w`, (d,) on the model's device.

        `guessed` more follow without gradients. The minibatches, their augmentation, and whatever the model draws
        itself (dropout), come from the streams of (round, client).
        """
        section, y = self._section, self._model.vector
        lr = self.lr(round)
        constant = _constant(tilt, w)
        before_clip, after_clip = tilt.mu + section.weight_decay, 0.0
        if section.clip_norm is not None:
            before_clip = tilt.mu if section.clip == "all" else 0.0
            after_clip = section.weight_decay if section.clip == "all" else tilt.mu + section.weight_decay
        y.copy_(tilt.anchor if tilt.from_anchor and tilt.anchor is not None else w)
        self._optimizer.reset()
        if self._generator is not None:
            self._generator.manual_seed(torch_seed(self._seed, Purpose.DROPOUT, round, client))
        losses = []
        for x_batch, y_batch in self._batches(samples, steps, round, client):
            self._begin_gradient(constant, before_clip)
            losses.append(self._add_gradient(x_batch, y_batch))
            self._descend(lr, after_clip)
        if guessed:
            self._optimizer.guess(y, lr, guessed)
        self._model.check_buffers()
        torch.sub(w, y, out=self._delta)
        loss_sum = float(torch.stack(losses).sum(dtype=torch.float64)) if losses else 0.0
        return Local(self._delta, steps, loss_sum, lr)

    def _batches(self, samples: Samples, steps: int, round: int, client: int) -> Iterator[Samples]:
        """Yield the minibatches of one client in one round, augmented where the recipe says so."""
        batches = minibatches(
            samples, self._section.batch_size, steps, stream(self._seed, Purpose.BATCHES, round, client)
        )
        if self._section.augment is None:
            return batches
        rng = stream(self._seed, Purpose.AUGMENT, round, client)
        return ((augmented(x, self._section.augment, rng), y) for x, y in batches)

    def _begin_gradient(self, constant: Tensor | None, scale: float) -> None:
        """Set the flat gradient to constant + scale·y: what backward then adds ∇f to, in one pass over memory."""
        y, g = self._model.vector, self._model.grad
        if constant is not None:
            torch.add(constant, y, alpha=scale, out=g)
        elif scale:
            torch.mul(y, scale, out=g)
        else:
            g.zero_()

    def _add_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Add ∇f of a minibatch to the flat gradient, and return its loss."""
        loss = self._loss.batch(self._model.module(x), y)
        loss.backward()
        return loss.detach()

    def _descend(self, lr: float, after_clip: float) -> None:
        """One step of the client optimizer from the flat gradient."""
        y, g = self._model.vector, self._model.grad
        if self._section.clip_norm is not None:
            g.mul_((self._section.clip_norm / (torch.linalg.vector_norm(g) + 1e-6)).clamp_(max=1.0))
            if after_clip:
                g.add_(y, alpha=after_clip)
        self._optimizer.step(y, g, lr)


def _torch_generator(device: torch.device) -> torch.Generator:
    """Return the generator that modules on a device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _constant(tilt: Tilt, w: Tensor) -> Tensor | None:
    """Return shift − μ·anchor, or None where it is 0."""
    if tilt.mu == 0.0:
        return tilt.shift
    anchor = w if tilt.anchor is None else tilt.anchor
    return -tilt.mu * anchor if tilt.shift is None else tilt.shift - tilt.mu * anchor
