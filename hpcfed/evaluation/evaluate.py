"""Loss, accuracy and the user's metrics of one model, bit-identical on any number of ranks.

The test set is cut into chunks of ``evaluate.batch_size`` samples; each chunk, and each client's training set (in
batches of that size), is computed whole by one rank into its own slot, and every rank adds the slots in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import ACCURACY, Loss, Metric
from hpcfed.ranks.world import World


@dataclass(frozen=True)
class Scores:
    """Results of an evaluation; None if not requested or undefined."""

    test_loss: float | None = None
    test_accuracy: float | None = None
    train_loss: float | None = None
    train_accuracy: float | None = None
    own: Mapping[str, float | None] = field(default_factory=dict)
    """The recipe's ``evaluate.metrics``, as ``test_<name>`` and ``train_<name>``."""

    def columns(self) -> dict[str, float | None]:
        """Return all scores by their names in the record."""
        named = ("test_loss", "test_accuracy", "train_loss", "train_accuracy")
        return {name: getattr(self, name) for name in named} | dict(self.own)


class Evaluator:
    """Measures models on the common test set and on all clients' training sets.

    On the test set a measure is Σ sums / Σ counts; on the training sets it is the unweighted mean of the clients' own
    measures, over the clients for which it is defined.

    Attributes:
        measures: metrics by name: the loss, the task's accuracy if it has one, the user's metrics.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        metrics: Mapping[str, Metric],
        shards: Shards,
        federation: Federation,
        home: np.ndarray,
        world: World,
        batch_size: int,
    ):
        self._model = model
        accuracy = ACCURACY.get(federation.task)
        self.measures: dict[str, Metric] = {
            "loss": loss.summed,
            **({"accuracy": accuracy} if accuracy is not None else {}),
            **metrics,
        }
        self._own = tuple(metrics)
        self._averages = loss.reduction == "mean"
        self._shards = shards
        self._federation = federation
        self._home = home
        self._world = world
        self._batch_size = batch_size

    @property
    def nothing(self) -> Scores:
        """Scores of a round that is not evaluated, all None."""
        return self._scores({}, {})

    def __call__(self, w: Tensor, *, test: bool, train: bool) -> Scores:
        """Measure the model `w`, (d,), on the test set, on the training sets, or both: one small reduction."""
        num_chunks = -(-self._federation.num_test // self._batch_size) if test else 0
        num_clients = self._federation.num_clients if train else 0
        if num_chunks + num_clients == 0:
            return self.nothing
        slots = np.zeros((num_chunks + num_clients, len(self.measures), 2), dtype=np.int64)
        pairs = slots.view(np.float64)  # summed as bit patterns, which other ranks' zeros leave unchanged
        self._model.vector.copy_(w)
        self._model.module.eval()
        with torch.no_grad():
            for chunk in range(self._world.rank, num_chunks, self._world.size):
                pairs[chunk] = self.sums(self._shards.test_chunk(chunk, self._batch_size))
            if train:
                for client in np.flatnonzero((self._home == self._world.rank) & (self._federation.sizes > 0)):
                    pairs[num_chunks + client] = self.sums(self._shards.client(int(client)))
        self._model.module.train()
        self._world.sum_in_place(slots)
        return self._scores(self._of_test(pairs[:num_chunks]), self._of_training(pairs[num_chunks:]))

    def sums(self, samples: Samples) -> np.ndarray:
        """Return sum and count of each of the M measures of the loaded model over samples, (M, 2)."""
        sums = np.zeros((len(self.measures), 2))
        for x, y in zip(*(tensor.split(self._batch_size) for tensor in samples), strict=True):
            output = self._model.module(x)
            sums += [measure(output, y) for measure in self.measures.values()]
        return sums

    def loss_of(self, w: Tensor, samples: Samples) -> float:
        """Return f_i of the model `w`, (d,), over a client's samples as its ``loss.reduction`` says; 0 without any."""
        self._model.vector.copy_(w)
        self._model.module.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in zip(*(tensor.split(self._batch_size) for tensor in samples), strict=True):
                total += self.measures["loss"](self._model.module(x), y)[0]
        self._model.module.train()
        return total / max(len(samples[1]), 1) if self._averages else total

    def _of_test(self, chunks: np.ndarray) -> dict[str, float]:
        """Return the measures on the test set, from each chunk's sums and counts, (chunks, M, 2)."""
        totals = chunks.sum(axis=0)
        return {name: total / count for name, (total, count) in zip(self.measures, totals, strict=True) if count}

    def _of_training(self, clients: np.ndarray) -> dict[str, float]:
        """Return the measures on the clients' training sets, from each client's sums and counts, (N, M, 2)."""
        found = {}
        for name, pairs in zip(self.measures, clients.swapaxes(0, 1), strict=True):
            total, count = pairs[pairs[:, 1] != 0].T
            if len(total):
                summed = name == "loss" and not self._averages  # then f_i is a sum
                found[name] = (total if summed else total / count).mean()
        return found

    def _scores(self, test: Mapping[str, float], train: Mapping[str, float]) -> Scores:
        found = {f"test_{name}": float(value) for name, value in test.items()}
        found |= {f"train_{name}": float(value) for name, value in train.items()}
        own = {f"{part}_{name}": found.pop(f"{part}_{name}", None) for part in ("test", "train") for name in self._own}
        return Scores(**found, own=own)
