"""Re-estimation of BatchNorm's running statistics on the training samples, for averaged or extrapolated models.

    μ = Σ_b n_b μ_b / n,     σ² = Σ_b n_b (σ_b² + μ_b²) / n − μ²

The sums run over minibatches b of n_b samples, of all clients except those in ``cohort.without``; n = Σ_b n_b. A
minibatch has at most ``evaluate.batch_size`` samples, or more if a minibatch would otherwise have a single sample. μ_b
and σ_b² (unbiased) are mean and variance of the input of a layer with running statistics, while every such layer
normalises by its minibatch's statistics; all else, such as dropout, is in evaluation mode. Sums over clients are taken
in the order of client numbers, so values do not depend on the number of ranks.

Reference: Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.client.private_parts import PrivateParts
from hpcfed.data.shards import Shards
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.placement import Placement
from hpcfed.ranks.world import World
from hpcfed.types import State

ENTRIES = 1 << 22
"""Most float64 numbers in one reduction over ranks: 32 MiB."""


class TrainingStatistics:
    """Estimates running statistics of a model's layers on all training samples; a call is collective.

    Args:
        model: the model.
        shards: the clients' samples.
        sizes: number of training samples of each client, (N,); clients with 0 are left out.
        placement, world: decide which clients' samples this rank reads.
        private: the clients' private parts; None if the model has none.
        batch_size: most samples in a minibatch; exceeded only to avoid minibatches of one sample.
        begin: called with a client's number before its samples go through the model.
    """

    def __init__(
        self,
        model: FlatModel,
        shards: Shards,
        sizes: np.ndarray,
        placement: Placement,
        world: World,
        private: PrivateParts | None,
        batch_size: int,
        begin: Callable[[int], None],
    ):
        self._model, self._private, self._shards = model, private, shards
        self._sizes, self._placement, self._world = sizes, placement, world
        self._batch_size, self._begin = batch_size, begin
        self._width = len(_read(model.averaging, "running_mean"))

    def __call__(self, w: Tensor) -> State:
        """Return the averaged buffers for the model `w`, (d,): new running statistics; all else as in the model."""
        means, squares = self._sums(w).reshape(2, -1) / self._sizes.sum()
        self._model.load(w)
        _write(self._model.averaging, "running_mean", means)
        _write(self._model.averaging, "running_var", np.maximum(squares - means**2, 0.0))
        return self._model.averaged_buffers()

    def _sums(self, w: Tensor) -> np.ndarray:
        """Return Σ n_b μ_b and Σ n_b (σ_b² + μ_b²) over all clients, concatenated, (2 · features of all layers,)."""
        sizes, mine = self._sizes, set(self._placement.at_home(self._world.rank).tolist())
        total, together = np.zeros(2 * self._width), max(1, ENTRIES // (2 * self._width))
        for first in range(0, len(sizes), together):
            clients = range(first, min(first + together, len(sizes)))
            slots = np.zeros((len(clients), 2 * self._width), np.int64)  # bit patterns, as in `evaluate`
            sums = slots.view(np.float64)
            for row, client in enumerate(clients):
                if client in mine and sizes[client]:
                    sums[row] = self._of_client(w, client)
            self._world.sum_in_place(slots)
            for one in sums:
                total += one
        return total

    def _of_client(self, w: Tensor, client: int) -> np.ndarray:
        """Return one client's summands of `_sums`, (2 · features of all layers,)."""
        self._model.load(w, None if self._private is None else self._private.of(client))
        self._begin(client)
        total, (x, _) = np.zeros((2, self._width)), self._shards.client(client)
        with torch.no_grad(), _of_the_minibatch(self._model):
            for part in x.tensor_split(_pieces(len(x), self._batch_size)):
                self._model.module(part)
                mean, variance = (_read(self._model.averaging, name) for name in ("running_mean", "running_var"))
                total += len(part) * np.stack([mean, variance + mean**2])
        return total.ravel()


def _pieces(count: int, batch_size: int) -> int:
    """Return the number of minibatches: ⌈count / batch_size⌉, or fewer to have 2 samples each (for BatchNorm)."""
    return max(1, min(-(-count // batch_size), count // 2))


@contextmanager
def _of_the_minibatch(model: FlatModel) -> Iterator[None]:
    """In this block, layers with running statistics normalise by each minibatch's statistics and store them."""
    momenta = [part.momentum for part in model.averaging]
    model.module.eval()
    for part in model.averaging:
        part.train()
        part.momentum = 1.0
    try:
        yield
    finally:
        for part, momentum in zip(model.averaging, momenta, strict=True):
            part.momentum = momentum
        model.train()


def _read(layers: Sequence[Any], name: str) -> np.ndarray:
    """Return the buffer `name` of all layers, concatenated, float64."""
    return torch.cat([getattr(layer, name) for layer in layers]).double().cpu().numpy()


def _write(layers: Sequence[Any], name: str, values: np.ndarray) -> None:
    buffers = [getattr(layer, name) for layer in layers]
    for buffer, own in zip(buffers, torch.from_numpy(values).split([len(one) for one in buffers]), strict=True):
        buffer.copy_(own)
