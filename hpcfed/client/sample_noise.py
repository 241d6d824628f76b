"""DP-SGD: clients whose steps hide each of their samples.

    B_k ∋ each sample with probability q = B / n_i
    g = (Σ_{B_k} ∇f_s min(1, C / ‖∇f_s‖) + N(0, (z C)² I)) / (q n_i)

at each step k, in the place of a minibatch's gradient; with ``loss.reduction: sum`` without the quotient. What a method
adds to it, weight decay, momentum and all that follows are of this g alone.

Reference: Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfed.client.augment import augmented
from hpcfed.client.batched.gradients import Perceptron, Vectorized, mixes_samples
from hpcfed.client.batched.matmul import Layer, OneClient
from hpcfed.client.batched.networks import network_of
from hpcfed.client.solver import SequentialSolver, Task
from hpcfed.client.trials import try_vectorized
from hpcfed.config.recipe import Local
from hpcfed.data.cache import Samples
from hpcfed.errors import InputError
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.models.portable import PortableLoss
from hpcfed.models.reading.program import Unreadable
from hpcfed.rng import Purpose, normals, stream
from hpcfed.updates._layout import layout_of
from hpcfed.updates._mechanism import SLACK

GRADIENT_BYTES = 1 << 28
"""Of the gradients of samples that are computed together."""
ClippedSum = Callable[[Tensor, Tensor, float], Tensor]
"""A minibatch, (B, …) each, and C → the sum of the losses; writes the sum of clipped gradients to a vector of 0."""


class PrivateSolver(SequentialSolver):
    """Trains one client after another by noised sums of clipped gradients.

    Args:
        model, loss: what is trained, and its objective.
        section: the recipe's ``local``, with ``noise``.
        seed: the recipe's ``seed.batches``.
        like: one sample, x (1, …) and y (1, …).

    Raises:
        InputError: a sample's gradient is not its own, as with BatchNorm, or cannot be computed.
    """

    def __init__(self, model: FlatModel, loss: Loss, section: Local, seed: int, like: Samples):
        super().__init__(model, loss, section, seed, draws=False)
        assert section.noise is not None
        self._amount, self._layout, self._averages = section.noise, layout_of(model), loss.reduction == "mean"
        self._address, self._step, self._expected = (0, 0), 0, 1.0
        self._total = torch.zeros_like(model.vector)
        self._sum_of = _clipped_sum(model, loss, like, self._total)

    def minibatches(self, task: Task, round: int) -> Iterator[Samples]:
        """Yield minibatches that each sample joins with probability B / n_i; perhaps empty ones."""
        rng, size = self._begin(task, round), expected_size(task.samples, self._section.batch_size)
        self._address, self._expected = (round, task.client), float(size)
        of_crops = stream(self._seed, Purpose.AUGMENT, round, task.client)
        batches = poisson_minibatches(task.samples, size, task.steps, rng)
        for self._step, (x_batch, y_batch) in enumerate(batches):
            if self._section.augment is not None and len(y_batch):
                x_batch = augmented(x_batch, self._section.augment, of_crops)
            yield x_batch, y_batch

    def add_gradient(self, x: Tensor, y: Tensor, begin: Callable[[], None] | None = None) -> Tensor:
        """Add the noised gradient to the model's flat one, which `begin` sets, and return the minibatch's loss."""
        clip, model = self._amount.clip, self._model
        if begin is not None:
            begin()
        total = self._total.zero_()
        loss = self._sum_of(x, y, clip) if len(y) else model.vector.new_zeros(())
        round, client = self._address
        noise = normals(self._seed, Purpose.LOCAL_STEP, round, client, self._step, self._layout.size)
        deviation = (self._amount.multiplier or 0.0) * clip * SLACK
        total += self._layout.opened(torch.from_numpy(noise * deviation).to(total), total)
        model.grad += total / self._expected if self._averages else total
        return loss / max(1, len(y)) if self._averages else loss


def expected_size(samples: Samples, batch_size: int | str) -> int:
    """Return the size that a client's minibatches have on average."""
    count = len(samples[1])
    return count if batch_size == "full" else min(int(batch_size), count)


def poisson_minibatches(samples: Samples, size: int, steps: int, rng: np.random.Generator) -> Iterator[Samples]:
    """Yield minibatches that each of n samples joins with probability size / n; perhaps empty ones."""
    x, y = samples
    for _ in range(steps):
        joined = torch.from_numpy(np.flatnonzero(rng.random(len(y)) * len(y) < size)).to(x.device)
        yield x.index_select(0, joined), y.index_select(0, joined)


def _clipped_sum(model: FlatModel, loss: Loss, like: Samples, total: Tensor) -> ClippedSum:
    """Return what adds up clipped gradients in `total`, (d,): layer by layer of a perceptron, else by `torch.func`.

    Raises:
        InputError: the samples have no gradients of their own.
    """
    if loss.whole:
        raise InputError("local.noise: the loss of a sample depends on the others of its minibatch")
    if mixes_samples(model.module, like[0]):
        what = "local.noise: the model's output for a sample is drawn, or depends on the others of its minibatch"
        raise InputError(what, remedy="use GroupNorm or LayerNorm in the place of BatchNorm, and no dropout")
    if loss.inverse_link is not None and not isinstance(loss, PortableLoss):
        with suppress(Unreadable):
            network = network_of(model, loss, like[0], 1, OneClient())
            if isinstance(network, Perceptron):
                layers, sums = (
                    network.layers([view.unsqueeze(0) for view in model.views(vector).values()])
                    for vector in (model.vector, total)
                )
                return partial(_by_layers, network, layers, sums)
    gradients = Vectorized(model.module, loss, mixes=True)
    x, y = (part.expand(2, *part.shape[1:]).unsqueeze(1) for part in like)
    remedy = "use a model of operations that torch.func.vmap can take"
    try_vectorized(gradients, model, x, y, key="local.noise", remedy=remedy)
    own, slots = (list(model.views(part).values()) for part in (model.vector, total))
    return partial(_sample_by_sample, gradients, own, slots, max(1, GRADIENT_BYTES // model.vector.nbytes))


def _by_layers(
    network: Perceptron, layers: Sequence[Layer], slots: Sequence[Layer], x: Tensor, y: Tensor, clip: float
) -> Tensor:
    """Write the sum of clipped gradients to `slots`; return the sum of the losses."""
    return network.clipped(layers, x.unsqueeze(0), y.unsqueeze(0), clip, slots).sum()


def _sample_by_sample(
    gradients: Vectorized, parameters: list[Tensor], slots: list[Tensor], rows: int, x: Tensor, y: Tensor, clip: float
) -> Tensor:
    """Write the same, of `rows` samples' gradients at a time."""
    loss = slots[0].new_zeros(())
    for start in range(0, len(y), rows):
        own_x, own_y = (part[start : start + rows].unsqueeze(1) for part in (x, y))
        stacks = [view.expand(len(own_y), *view.shape) for view in parameters]
        found = [torch.empty_like(stack, memory_format=torch.contiguous_format) for stack in stacks]
        loss += gradients.gradients(stacks, own_x, own_y, found).sum()
        norms = sum(gradient.flatten(1).double().square().sum(1) for gradient in found)
        factors = (clip / torch.as_tensor(norms).sqrt()).clamp(max=1.0).to(slots[0])
        for slot, gradient in zip(slots, found, strict=True):
            slot += torch.tensordot(factors, gradient, 1)
    return loss
