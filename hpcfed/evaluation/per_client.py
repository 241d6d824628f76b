"""Per-client evaluation: loss and accuracy of global, local and fine-tuned models on each client's own samples.

The models are the global one, the client's last one or the personal one of its method, and the global one after a few
steps of fine-tuning. A client's home rank measures it into the client's own slots, so the table is bit-identical on any
number of ranks. Fine-tuning has separate random streams and leaves training unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hpcfed.algorithms._evaluated import LAST
from hpcfed.client.solver import Task
from hpcfed.config.metrics import ALWAYS_MEASURED, CLIENT_COLUMNS, larger_is_better
from hpcfed.config.recipe import Evaluate
from hpcfed.evaluation.evaluate import Evaluator
from hpcfed.evaluation.measures import Layout, Value, value_of
from hpcfed.parts import Parts
from hpcfed.types import PERSONAL, Tilt

KEPT = {"last": LAST, "personal": PERSONAL}
"""Models that clients keep → their names in a client's state."""
ROWS = 1 << 12
"""Clients whose rows of the table are made together."""


@dataclass(frozen=True)
class ClientScores:
    """Results of a per-client evaluation; identical on all ranks.

    Attributes:
        models: the recipe's names of the measured models.
        sizes: samples of each client, (N,) int64, by split: ``train``, and ``test`` if clients have test sets; 0 of
            clients that do not count.
        directions: measures → whether larger values are better, None if unknown or a matrix.
        layout: of the measures' numbers.
        cells: these numbers, (N, models, splits, cells, 2) float64.
        names: of the clients, (N,).
    """

    models: tuple[str, ...]
    sizes: Mapping[str, np.ndarray]
    directions: Mapping[str, bool | None]
    layout: Layout
    cells: np.ndarray
    names: Sequence[str]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table."""
        return (*CLIENT_COLUMNS, *(name for name in self.directions if name not in ALWAYS_MEASURED))

    def rows(self, round: int) -> Iterator[list[Any]]:
        """Yield the table's rows, in `columns`: one per model, split and client with samples in it."""
        for place, model in enumerate(self.models):
            for number, (split, sizes) in enumerate(self.sizes.items()):
                for first in range(0, len(sizes), ROWS):
                    clients = first + np.flatnonzero(sizes[first : first + ROWS])
                    measures = self._texts(self.cells[clients, place, number])
                    filled = clients.tolist(), sizes[clients].tolist()
                    for client, size, (loss, accuracy, *own) in zip(*filled, measures, strict=True):
                        head = (round, client, model, split, loss, accuracy, size, self.names[client])
                        yield [*head, *own]

    def _texts(self, cells: np.ndarray) -> Iterator[tuple[str, ...]]:
        """Yield the texts of the table's measures of each client, from their pairs, (C, cells, 2)."""
        found = {}
        for name, shape in self.layout.shapes.items():
            pairs = cells[:, self.layout.places[name]]
            if shape:
                found[name] = [_cell(value_of(own, shape)) for own in pairs]
            else:
                found[name] = [repr(total / count) if count else "" for total, count in pairs[:, 0].tolist()]
        names = (*ALWAYS_MEASURED, *self.columns[len(CLIENT_COLUMNS) :])
        return zip(*(found.get(name, [""] * len(cells)) for name in names), strict=True)

    def summary(self) -> dict[str, Any]:
        """Return mean, worst decile and variance over clients, of each model, split and measure.

        All clients with samples have equal weights; a metric of the recipe leaves out clients for which it is
        undefined, and ``clients`` is the number of the others. The worst decile is the mean over the worst tenth of the
        clients, rounded up (Li et al., "Fair resource allocation in federated learning", ICLR 2020, Table 1); it is
        omitted where the better direction is unknown. The variance is divided by the number of clients. None if any
        client's value is not finite.
        """
        return {
            model: {
                split: {
                    measure: self._spread(measure, sizes > 0, place, number)
                    for measure, shape in self.layout.shapes.items()
                    if not shape
                }
                for number, (split, sizes) in enumerate(self.sizes.items())
            }
            for place, model in enumerate(self.models)
        }

    def _spread(self, measure: str, filled: np.ndarray, place: int, number: int) -> dict[str, float] | None:
        total, count = self.cells[filled, place, number, self.layout.places[measure].start].T
        defined = count != 0
        found = _spread(total[defined] / count[defined], larger_is_better=self.directions[measure])
        return found if found is None or measure in ALWAYS_MEASURED else {**found, "clients": int(defined.sum())}


class ClientEvaluator:
    """Measures models client by client.

    Args:
        section: the recipe's ``evaluate``.
        parts: of the simulation. Clients with a private part are measured with their own.
        evaluator: computes the measures.
    """

    def __init__(self, section: Evaluate, parts: Parts, evaluator: Evaluator):
        self._section, self._parts, self._evaluator = section.clients, parts, evaluator
        self._measures = evaluator.measures
        federation, counted = parts.federation, parts.cohorts.measured
        self._sizes = {"train": np.where(counted, federation.sizes, 0)}
        if federation.test_offsets is not None:
            self._sizes["test"] = np.where(counted, np.diff(federation.test_offsets), 0)
        known = {"loss": False, "accuracy": True}
        self._directions = {
            name: known[name] if name in known else larger_is_better(section.metrics[name])
            for name in self._measures.layout.shapes
        }
        self._names: Sequence[str] = ()

    @property
    def rows_of_a_model(self) -> int:
        """Rows of the table for each model of an evaluation."""
        return sum(int(np.count_nonzero(sizes)) for sizes in self._sizes.values())

    def __call__(self, w: Tensor, round: int) -> ClientScores:
        """Measure all clients after a round, with the global model `w`, (d,): one reduction."""
        world, models, federation = self._parts.world, self._section.models, self._parts.federation
        layout = self._measures.layout
        shape = (federation.num_clients, len(models), len(self._sizes), layout.size, 2)
        slots = np.zeros(shape, dtype=np.int64)
        cells = slots.view(np.float64)  # as bit patterns: the other ranks' zeros leave them as they are
        w = w.to(self._parts.model.vector.device)
        left = self._left(w, cells)
        home = self._parts.placement.at_home(world.rank)
        for client in home[left[home].any(axis=(1, 2))].tolist():
            for place, model in enumerate(models):
                if left[client, place].any():
                    self._load(model, w, round, client)
                for number in np.flatnonzero(left[client, place]).tolist():
                    self._measure(client, cells[client, place, number], is_test=number > 0)
        world.sum_in_place(slots)
        if not self._names:
            self._names = [" ".join(name.splitlines()) for name in federation.client_names()]
        for name in self._measures.whole:
            self._note_undefined(name, cells[:, 0, :, layout.places[name].start, 1])
        return ClientScores(tuple(models), self._sizes, self._directions, layout, cells, self._names)

    def _left(self, w: Tensor, cells: np.ndarray) -> np.ndarray:
        """Measure the global model on small clients, in tiles; return the cells still to be measured.

        Returns:
            (N, models, splits) bool.
        """
        models, model = self._section.models, self._parts.model
        left = np.stack([np.stack([sizes > 0 for sizes in self._sizes.values()], axis=1)] * len(models), axis=1)
        if "global" not in models:
            return left
        place = models.index("global")
        model.load(w)
        with self._measures.measuring():
            for number, split in enumerate(self._sizes):
                left[:, place, number] &= ~self._evaluator.measure_small(split, cells[:, place, number])
        return left

    def _note_undefined(self, name: str, counts: np.ndarray) -> None:
        """Note clients for which a measure is undefined, from its counts, (N, splits)."""
        for (split, sizes), count in zip(self._sizes.items(), counts.T, strict=True):
            absent = np.flatnonzero((sizes > 0) & (count == 0)).tolist()
            if absent:
                part = "training samples" if split == "train" else "test samples"
                self._evaluator.note_undefined(name, part, absent, int((sizes > 0).sum()))

    def _load(self, which: str, w: Tensor, round: int, client: int) -> None:
        """Load the model that `evaluate.clients.models` names."""
        if which == "fine-tuned" and self._parts.tuner is not None and self._section.fine_tune is not None:
            steps = self._section.fine_tune.steps if self._sizes["train"][client] else 0
            own = self._parts.private.of(client)
            task = Task(client, self._parts.shards.client(client), Tilt(), steps, guessed=0.0, own=own)
            next(self._parts.tuner.solve(w, [task], round))  # which leaves the client's last iterate in the model
        elif which in KEPT:
            state = self._parts.clients.get(client)
            kept = self._parts.initial_w if state is None else state[KEPT[which]]
            self._parts.model.load(kept, self._parts.private.of(client))
        else:
            self._parts.model.load(w, self._parts.private.of(client))

    def _measure(self, client: int, out: np.ndarray, *, is_test: bool) -> None:
        """Measure the loaded model on a client's samples; write pairs into `out`, (cells, 2)."""
        shards = self._parts.shards
        with self._measures.measuring():
            self._measures.cells(shards.client_test(client) if is_test else shards.client(client), client, out)


def _cell(value: Value) -> str:
    """Return a value as text that reads back as the same bits; a matrix as JSON."""
    return "" if value is None else repr(value)


def _spread(values: np.ndarray, *, larger_is_better: bool | None) -> dict[str, float] | None:
    """Return mean, worst decile and variance of one number per client, (K,)."""
    if not len(values) or not np.isfinite(values).all():
        return None
    ordered = np.sort(values)
    worst = ordered if larger_is_better else ordered[::-1]
    tenth = {} if larger_is_better is None else {"worst_decile": float(worst[: -(-len(values) // 10)].mean())}
    return {"mean": float(values.mean()), **tenth, "variance": float(values.var())}
