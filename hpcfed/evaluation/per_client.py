"""Per-client evaluation: loss and accuracy of global, local and fine-tuned models on each client's own samples.

The models are the global one, the client's last one, and the global one after a few steps of fine-tuning. A client's
home rank measures it into the client's own slots, so the table is bit-identical on any number of ranks. Fine-tuning has
separate random streams and leaves training unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.algorithms._client_average import LAST
from hpcfed.client.solver import Task
from hpcfed.config.clients import EvaluateClients
from hpcfed.evaluation.evaluate import Evaluator
from hpcfed.parts import Parts
from hpcfed.types import Tilt

COLUMNS = ("round", "client", "model", "split", "loss", "accuracy", "n")
"""Columns of ``clients.csv``; ``accuracy`` is empty in a task that has none."""
MEASURES = ("loss", "accuracy")


@dataclass(frozen=True)
class ClientScores:
    """Results of a per-client evaluation; identical on all ranks.

    Attributes:
        models: the recipe's names of the measured models.
        sizes: samples of each client, (N,) int64, by split: ``train``, and ``test`` if clients have test sets.
        measures: ``loss``, a mean over the client's samples, and ``accuracy`` in tasks that have one.
        values: (N, models, splits, measures) float64; 0 for clients without samples.
    """

    models: tuple[str, ...]
    sizes: Mapping[str, np.ndarray]
    measures: tuple[str, ...]
    values: np.ndarray

    def rows(self, round: int) -> Iterator[str]:
        """Yield the table's lines, in `COLUMNS`: one per model, split and client with samples in it."""
        for place, model in enumerate(self.models):
            for number, (split, sizes) in enumerate(self.sizes.items()):
                for client in np.flatnonzero(sizes).tolist():
                    found = self.values[client, place, number].tolist()  # in full: reads back as the same bits
                    loss, accuracy = (*map(repr, found), "")[:2]
                    yield f"{round},{client},{model},{split},{loss},{accuracy},{sizes[client]}\n"

    def summary(self) -> dict[str, Any]:
        """Return mean, worst decile and variance over clients, of each model, split and measure.

        All clients with samples count alike. The worst decile is the mean over the tenth of them, rounded up, with the
        largest loss or the least accuracy (Li et al., "Fair resource allocation in federated learning", ICLR 2020,
        Table 1); the variance is divided by their number. None if any client's value is not finite.
        """
        return {
            model: {
                split: {
                    measure: _spread(self.values[sizes > 0, place, number, which], worst_first=measure == "loss")
                    for which, measure in enumerate(self.measures)
                }
                for number, (split, sizes) in enumerate(self.sizes.items())
            }
            for place, model in enumerate(self.models)
        }


class ClientEvaluator:
    """Measures models client by client.

    Args:
        section: the recipe's ``evaluate.clients``.
        parts: of the simulation before its first round: its model must be the initial one.
        evaluator: computes the measures.
    """

    def __init__(self, section: EvaluateClients, parts: Parts, evaluator: Evaluator):
        self._section, self._parts, self._evaluator = section, parts, evaluator
        federation = parts.federation
        self._sizes = {"train": federation.sizes}
        if federation.test_offsets is not None:
            self._sizes["test"] = np.diff(federation.test_offsets)
        self._initial = parts.model.vector.clone() if "last" in section.models else None
        self._measures = tuple(name for name in MEASURES if name in evaluator.measures)

    def __call__(self, w: Tensor, round: int) -> ClientScores:
        """Measure all clients after a round, with the global model `w`, (d,): one reduction."""
        world, models = self._parts.world, self._section.models
        shape = (self._parts.federation.num_clients, len(models), len(self._sizes), len(self._measures))
        slots = np.zeros(shape, dtype=np.int64)
        values = slots.view(np.float64)  # as bit patterns: the other ranks' zeros leave them as they are
        w = w.to(self._parts.model.vector.device)
        for client in np.flatnonzero(self._parts.placement.home == world.rank).tolist():
            for place, model in enumerate(models):
                self._load(model, w, round, client)
                for number, sizes in enumerate(self._sizes.values()):
                    if sizes[client]:
                        values[client, place, number] = self._measure(client, is_test=number > 0)
        world.sum_in_place(slots)
        return ClientScores(tuple(models), self._sizes, self._measures, values)

    def _load(self, which: str, w: Tensor, round: int, client: int) -> None:
        """Load the model that `evaluate.clients.models` names."""
        if which == "fine-tuned" and self._parts.tuner is not None and self._section.fine_tune is not None:
            steps = self._section.fine_tune.steps if self._sizes["train"][client] else 0
            task = Task(client, self._parts.shards.client(client), Tilt(), steps, guessed=0.0)
            next(self._parts.tuner.solve(w, [task], round))  # which leaves the client's last iterate in the model
        elif which == "last" and self._initial is not None:
            state = self._parts.clients.get(client)
            self._parts.model.vector.copy_(self._initial if state is None else state[LAST])
        else:
            self._parts.model.vector.copy_(w)

    def _measure(self, client: int, *, is_test: bool) -> np.ndarray:
        """Return the measures of the loaded model on a client's samples, (measures,)."""
        shards, module = self._parts.shards, self._parts.model.module
        module.eval()
        with torch.no_grad():
            sums = self._evaluator.sums(shards.client_test(client) if is_test else shards.client(client))
        module.train()
        of_name = dict(zip(self._evaluator.measures, sums, strict=True))
        return np.array([of_name[name][0] / of_name[name][1] for name in self._measures])


def _spread(values: np.ndarray, *, worst_first: bool) -> dict[str, float] | None:
    """Return mean, worst decile and variance of one number per client, (K,)."""
    if not len(values) or not np.isfinite(values).all():
        return None
    ordered = np.sort(values)
    worst = ordered[::-1] if worst_first else ordered
    return {
        "mean": float(values.mean()),
        "worst_decile": float(worst[: -(-len(values) // 10)].mean()),
        "variance": float(values.var()),
    }
