"""Per-client evaluation: loss and accuracy of global, local and fine-tuned models on each client's own samples.

``evaluate.clients.models`` names the models: the global model; the client's model after its last training; the client's
personal model, if the method trains one; the global model fine-tuned by a few steps. Each client is measured by one
rank, so the table is bit-identical on any number of ranks. Fine-tuning has its own random streams and does not affect
training.
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
from hpcfed.errors import placed
from hpcfed.evaluation.evaluate import Evaluator
from hpcfed.evaluation.measures import Layout, Value, value_of
from hpcfed.parts import Parts
from hpcfed.types import PERSONAL, Tilt

KEPT = {"last": LAST, "personal": PERSONAL}
"""Models stored for each client: name in the recipe → key in the client's state."""
ROWS = 1 << 12
"""Number of clients whose rows of the table are formatted together."""


@dataclass(frozen=True)
class ClientScores:
    """Results of a per-client evaluation; identical on all ranks.

    Attributes:
        models: names of the measured models, as in ``evaluate.clients.models``.
        sizes: split → number of samples of each client, (N,) int64, 0 for clients that are not evaluated; the splits
            are ``train`` and, if clients have test sets, ``test``.
        directions: measure → whether larger values are better; None if this is unknown, as it is for a matrix.
        layout: position of each measure in the last two axes of `cells`.
        cells: the measures, (N, models, splits, cells, 2) float64: see `Measures.cells`.
        names: names of the clients, (N,).
    """

    models: tuple[str, ...]
    sizes: Mapping[str, np.ndarray]
    directions: Mapping[str, bool | None]
    layout: Layout
    cells: np.ndarray
    names: Sequence[str]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of ``clients.csv``."""
        return (*CLIENT_COLUMNS, *(name for name in self.directions if name not in ALWAYS_MEASURED))

    def rows(self, round: int) -> Iterator[list[Any]]:
        """Yield the rows of ``clients.csv``, one per model, split, and client with samples in the split."""
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
        """Yield each client's measures as texts for ``clients.csv``, "" if undefined, from `cells`, (C, cells, 2)."""
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
        """Return model → split → measure → mean, worst decile and variance over clients; matrices are left out.

        Mean and variance are over the C clients with a value, with equal weights; for a metric of the recipe, which may
        be undefined for some clients, C is the entry ``clients``. The worst decile is the mean over the ⌈C/10⌉ clients
        with the worst values (Li et al., "Fair resource allocation in federated learning", ICLR 2020, Table 1); it is
        omitted if it is unknown whether larger values are better. The variance is Σ (value − mean)² / C. A measure's
        entry is None if no client has a value, or if a value is not finite.
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
    """Evaluates global models, clients' stored models, and fine-tuned models on each client's samples.

    A global or stored model is measured with the client's private parameters, if the model has any.

    Args:
        section: the recipe's ``evaluate``.
        parts: the parts of the simulation, such as the clients' states, private parameters and samples.
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
        """Number of rows of ``clients.csv`` that one evaluation writes for each model."""
        return sum(int(np.count_nonzero(sizes)) for sizes in self._sizes.values())

    def __call__(self, w: Tensor, round: int) -> ClientScores:
        """Measure all clients after `round`; `w`, (d,), is the global model. Collective, with one reduction."""
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
        """Measure the global model on small clients, in tiles, into `cells`; return what remains to be measured.

        Returns:
            (N, models, splits) bool, True if the client has samples in the split and the model is not yet measured.
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
        """Report clients with samples for which a measure is undefined, that is, with a 0 in `counts`, (N, splits)."""
        for (split, sizes), count in zip(self._sizes.items(), counts.T, strict=True):
            absent = np.flatnonzero((sizes > 0) & (count == 0)).tolist()
            if absent:
                part = "training samples" if split == "train" else "test samples"
                self._evaluator.note_undefined(name, part, absent, int((sizes > 0).sum()))

    def _load(self, which: str, w: Tensor, round: int, client: int) -> None:
        """Load a client's model `which`, a name in ``evaluate.clients.models``; `w`, (d,), is the global model."""
        if which == "fine-tuned" and self._parts.tuner is not None and self._section.fine_tune is not None:
            steps = self._section.fine_tune.steps if self._sizes["train"][client] else 0
            own = self._parts.private.of(client)
            task = Task(client, self._parts.shards.client(client), Tilt(), steps, guessed=0.0, own=own)
            with placed(f"round {round}, client {client}, fine-tuning"):
                next(self._parts.tuner.solve(w, [task], round))  # which leaves the client's last iterate in the model
        elif which in KEPT:
            state = self._parts.clients.get(client)
            kept = self._parts.initial_w if state is None else state[KEPT[which]]
            self._parts.model.load(kept, self._parts.private.of(client))
        else:
            self._parts.model.load(w, self._parts.private.of(client))

    def _measure(self, client: int, out: np.ndarray, *, is_test: bool) -> None:
        """Measure the loaded model on a client's samples; write its cells into `out`, (cells, 2)."""
        shards = self._parts.shards
        with self._measures.measuring():
            self._measures.cells(shards.client_test(client) if is_test else shards.client(client), client, out)


def _cell(value: Value) -> str:
    """Return a value as text that reads back as the same bits; "" if it is None (undefined); a matrix as JSON."""
    return "" if value is None else repr(value)


def _spread(values: np.ndarray, *, larger_is_better: bool | None) -> dict[str, float] | None:
    """Return mean, worst decile and variance of one value per client, (K,); None if K = 0 or a value is not finite.

    The worst decile is omitted if `larger_is_better` is None, that is, unknown.
    """
    if not len(values) or not np.isfinite(values).all():
        return None
    ordered = np.sort(values)
    worst = ordered if larger_is_better else ordered[::-1]
    tenth = {} if larger_is_better is None else {"worst_decile": float(worst[: -(-len(values) // 10)].mean())}
    return {"mean": float(values.mean()), **tenth, "variance": float(values.var())}
