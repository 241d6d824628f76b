"""Loss and accuracy of one model, measured by all ranks together, the same to the last bit on any number of them.

The test set is cut into chunks of ``evaluate.batch_size`` samples, a client's training set likewise; each chunk is
computed whole by one rank, lands in a slot of its own, and every rank adds the slots up in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.format import Federation
from hpcfed.data.shards import Samples, Shards
from hpcfed.flat import FlatModel
from hpcfed.losses import Loss
from hpcfed.world import World


@dataclass(frozen=True)
class Scores:
    """What an evaluation found; None where it was not asked for or has no meaning."""

    test_loss: float | None = None
    test_accuracy: float | None = None
    train_loss: float | None = None
    train_accuracy: float | None = None


class Evaluator:
    """Measures models on the common test set and on all clients' training sets."""

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        shards: Shards,
        federation: Federation,
        home: np.ndarray,
        world: World,
        batch_size: int,
    ):
        self._model = model
        self._loss = loss
        self._shards = shards
        self._federation = federation
        self._mine = np.flatnonzero(home == world.rank)
        self._world = world
        self._batch_size = batch_size
        self._classifies = federation.task != "regression"

    def __call__(self, w: Tensor, *, test: bool, train: bool) -> Scores:
        """Measure the model `w`, (d,), on the test set, on the training sets, or both: one small reduction."""
        num_chunks = -(-self._federation.num_test // self._batch_size) if test else 0
        num_clients = self._federation.num_clients if train else 0
        if num_chunks + num_clients == 0:
            return Scores()
        slots = np.zeros((num_chunks + num_clients, 2), dtype=np.int64)
        losses = slots[:, 0].view(np.float64)
        self._model.vector.copy_(w)
        self._model.module.eval()
        with torch.no_grad():
            for chunk in range(self._world.rank, num_chunks, self._world.size):
                losses[chunk], slots[chunk, 1] = self._sums(self._shards.test_chunk(chunk, self._batch_size))
            if train:
                for client in self._mine:
                    place = num_chunks + client
                    losses[place], slots[place, 1] = self._sums(self._shards.client(int(client)))
        self._model.module.train()
        self._world.sum_in_place(slots)
        return self._scores(slots[:num_chunks], slots[num_chunks:])

    def _sums(self, samples: Samples) -> tuple[float, int]:
        """Summed loss and right answers over samples, a chunk at a time."""
        loss, right = 0.0, 0
        for x, y in zip(*(tensor.split(self._batch_size) for tensor in samples), strict=True):
            chunk_loss, chunk_right = self._loss.sums(self._model.module(x), y)
            loss, right = loss + chunk_loss, right + chunk_right
        return loss, right

    def _scores(self, test: np.ndarray, train: np.ndarray) -> Scores:
        test_loss = test_accuracy = train_loss = train_accuracy = None
        if len(test):
            test_loss = float(test[:, 0].view(np.float64).sum()) / self._federation.num_test
            test_accuracy = int(test[:, 1].sum()) / self._federation.num_test
        if len(train):
            filled = self._federation.sizes > 0
            sizes = self._federation.sizes[filled]
            objective = train[filled, 0].view(np.float64) / (sizes if self._loss.reduction == "mean" else 1)
            train_loss = float(objective.mean())
            train_accuracy = float((train[filled, 1] / sizes).mean())
        if not self._classifies:
            test_accuracy = train_accuracy = None
        return Scores(test_loss, test_accuracy, train_loss, train_accuracy)
