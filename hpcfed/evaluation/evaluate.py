"""Loss, accuracy and the recipe's metrics of one model, bit-identical on any number of ranks.

The test set is cut into chunks of ``evaluate.batch_size`` samples; each chunk, and each client's training set (in
batches of that size), is computed whole by one rank into its own slot, and every rank adds the slots in the same order.
Metrics that are no sums need all outputs at once: a client's are computed on its rank, those of the test set on rank 0
from all ranks' outputs in file order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.client.private_parts import PrivateParts
from hpcfed.config.metrics import undefined
from hpcfed.config.recipe import Evaluate
from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import first_of
from hpcfed.evaluation.blocks import ClientBlocks
from hpcfed.evaluation.measures import Measures, Value, counts, value_of
from hpcfed.evaluation.statistics import TrainingStatistics
from hpcfed.evaluation.tiles import tiles_for
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.ranks.placement import Placement
from hpcfed.ranks.world import World
from hpcfed.types import State

MAX_LISTED = 4
"""Clients named in a line."""
COLUMNS = ("test_loss", "test_accuracy", "train_loss", "train_accuracy")
"""Columns of the record that every task has; the recipe's ``evaluate.metrics`` follow, each of test and training."""
APART = "apart"
"""Column of clients that never take part and have test sets, where evaluations count the others alone."""


class Evaluator:
    """Measures models on the common test set and on all clients' training sets.

    On the test set a measure that is a sum is Σ sums / Σ counts. On the training sets every measure is the unweighted
    mean over the clients for which it is defined; a matrix of counts is their sum. Clients with private parts are
    measured with these, on their own test sets. Clients left out of scores (`counted`) are measured separately.

    Args:
        section: the recipe's ``evaluate``.
        loss: that of training, for `loss_of`.
        measures: loss, the task's accuracy if it has one, and the recipe's metrics.
        outputs: shape of the model's output for a sample.
        private: the clients' private parts, if they have any.
        counted: (N,) bool, clients whose data count in scores; all by default.
        present: (N,) bool, clients that the model was trained on, for ``statistics: training``; all by default.
        sized_for: the device whose rule says which clients are measured in tiles; default: the model's.
    """

    def __init__(
        self,
        section: Evaluate,
        model: FlatModel,
        loss: Loss,
        measures: Measures,
        shards: Shards,
        federation: Federation,
        placement: Placement,
        world: World,
        outputs: Sequence[int] = (),
        private: PrivateParts | None = None,
        counted: np.ndarray | None = None,
        present: np.ndarray | None = None,
        sized_for: torch.device | None = None,
    ):
        self._section = section
        self._model, self._private = model, private
        self.measures = measures
        self._tiles = tiles_for(model, section.batch_size, sized_for) if private is None else None
        self._loss, self._averages = loss, loss.reduction == "mean"
        self._shards = shards
        self._federation = federation
        self._counted = np.full(federation.num_clients, True) if counted is None else counted
        self._sizes = np.where(self._counted, federation.sizes, 0)
        self._placement = placement
        self._world = world
        self._batch_size = section.batch_size
        self._blocks: dict[str, ClientBlocks] = {}
        self._outputs = tuple(outputs)
        self._said: set[tuple[str, str]] = set()
        self._news: list[str] = []
        self._statistics = None
        if section.statistics == "training":
            sizes = federation.sizes if present is None else np.where(present, federation.sizes, 0)
            where = model, shards, sizes, placement, world, private
            self._statistics = TrainingStatistics(*where, section.batch_size, measures.begin)

    @property
    def num_samples(self) -> dict[str, int]:
        """Samples behind the scores: ``test``, without the test sets measured apart, and ``train``."""
        return {"test": self._federation.num_test_of(self._counted), "train": int(self._sizes.sum())}

    @property
    def nothing(self) -> dict[str, Value]:
        """Scores of a round that is not evaluated, all None."""
        return self._scores({}, {}) | (dict.fromkeys([APART]) if self._apart else {})

    def __call__(
        self, w: Tensor, *, test: bool, train: bool, meanwhile: Callable[[], object] = bool
    ) -> dict[str, Value]:
        """Measure the model `w`, (d,), on the test set, on the training sets, or both: one small reduction.

        Calls `meanwhile` before it waits for a device.

        Returns:
            Scores by their columns in the record; None if not asked for or undefined.
        """
        num_test = self._federation.num_test if test else 0
        bounds = self._test_bounds() if test else np.zeros(1, dtype=np.int64)
        num_chunks = len(bounds) - 1
        num_clients = self._federation.num_clients if train else 0
        if num_chunks + num_clients == 0:
            return self.nothing
        kept = num_test * prod(self._outputs) if self.measures.whole else 0
        shapes = (num_chunks, len(self.measures.sums), 2), (num_clients, self.measures.layout.size, 2), (kept,)
        slots = np.zeros(sum(map(prod, shapes)), dtype=np.int64)
        pieces = np.split(slots.view(np.float64), np.cumsum([prod(shape) for shape in shapes])[:-1])
        # summed as bit patterns, which other ranks' zeros leave unchanged
        chunks, clients, outputs = (piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True))
        self._model.load(w)
        with self.measures.measuring():
            for chunk in self._own_chunks(bounds):
                output = self.measures.of_samples(self._test_chunk(w, chunk), chunk, chunks[chunk])
                if kept:
                    rows = output.double().numpy().ravel()
                    start = int(bounds[chunk]) * prod(self._outputs)
                    outputs[start : start + len(rows)] = rows
            if train:
                in_tiles = self.measure_small("train", clients)
                for client in self._placement.at_home(self._world.rank).tolist():
                    if self._sizes[client] and not in_tiles[client]:
                        self._load_own(w, client)
                        self.measures.cells(self._shards.client(client), client, clients[client])
            meanwhile()
        self._world.sum_in_place(slots)
        whole = self._world.on_root(lambda: self._measured_whole(outputs)) if kept else {}
        of_test = self._of_test(chunks, whole)
        return self._scores(of_test, self._of_training(clients)) | self._of_others(chunks, whole)

    def averaged_for(self, w: Tensor) -> State:
        """Return the averaged buffers to measure the model `w`, (d,), with: those of ``evaluate.statistics``."""
        return self._model.averaged if self._statistics is None else self._statistics(w)

    @property
    def _by_client(self) -> bool:
        """Whether the test set is measured client by client: with private parts, or since some are reported apart."""
        own = self._private is not None or not self._counted.all()
        return own and self._federation.test_offsets is not None

    @property
    def _apart(self) -> list[int]:
        """Clients whose test sets are reported apart."""
        offsets = self._federation.test_offsets
        return [] if offsets is None else np.flatnonzero(~self._counted & (np.diff(offsets) > 0)).tolist()

    def _test_bounds(self) -> np.ndarray:
        """Return the boundaries of the test set's chunks, (chunks + 1,): ``evaluate.batch_size`` rows each.

        Where the test set is measured client by client, a chunk is a client's.
        """
        count, offsets = self._federation.num_test, self._federation.test_offsets
        if self._by_client and offsets is not None:
            return offsets
        return np.minimum(np.arange(-(-count // self._batch_size) + 1) * self._batch_size, count)

    def _own_chunks(self, bounds: np.ndarray) -> Sequence[int]:
        """Return the chunks that this rank measures: every P-th, or its clients'."""
        if self._by_client and len(bounds) > 1:
            mine = self._placement.at_home(self._world.rank)
            return mine[np.diff(bounds)[mine] > 0].tolist()
        return range(self._world.rank, len(bounds) - 1, self._world.size)

    def _test_chunk(self, w: Tensor, chunk: int) -> Samples:
        """Return a chunk of the test set; a client's with its private part loaded."""
        if not self._by_client:
            return self._shards.test_chunk(chunk, self._batch_size)
        self._load_own(w, chunk)
        return self._shards.client_test(chunk)

    def _load_own(self, w: Tensor, client: int) -> None:
        """Load a client's private part, where clients have one."""
        if self._private is not None:
            self._model.load(w, self._private.of(client))

    def measure_small(self, split: str, cells: np.ndarray) -> np.ndarray:
        """Measure a linear model or perceptron on many small clients at once (`hpcfed.evaluation.tiles`).

        Models with private parts, and all others, are measured client by client elsewhere.

        Args:
            split: ``train`` or ``test``.
            cells: pairs, (N, cells, 2); filled in for the clients that this rank measures.

        Returns:
            (N,) bool, the clients measured in tiles on any rank.
        """
        if self._tiles is None:
            return np.full(self._federation.num_clients, False)
        if split not in self._blocks:
            offsets = self._federation.test_offsets
            sizes = self._federation.sizes if split == "train" or offsets is None else np.diff(offsets)
            covered = self._tiles.takes(np.where(self._counted, sizes, 0))
            where = self._federation, self._shards, self._placement, self._world
            self._blocks[split] = ClientBlocks(split, covered, *where)
        covered = self._blocks[split].covered
        for clients, sizes, samples in self._blocks[split].own():
            found = self.measures.cells_of_several(self._tiles, clients, sizes, samples)
            cells[clients[covered[clients]]] = found[covered[clients]]
        return covered

    def loss_of(self, client: int, w: Tensor, samples: Samples, own: State) -> float:
        """Return f_i(w), w (d,), over a client's samples with its private part, by ``loss.reduction``; 0 without
        samples.
        """
        loss = self._loss.of_client(client)
        self._model.load(w, own)
        total, outputs = 0.0, []
        with self._model.evaluation(), torch.no_grad():
            self.measures.begin(client)
            for x, y in zip(*(tensor.split(self._batch_size) for tensor in samples), strict=True):
                output = self._model.module(x)
                if self._loss.whole:
                    outputs.append(output.cpu())
                else:
                    total += loss.summed(output, y)[0]
        if outputs:
            return self._loss.of_all(torch.cat(outputs), samples[1].cpu())
        return total / max(len(samples[1]), 1) if self._averages else total

    def note_undefined(self, name: str, part: str, clients: Sequence[int] = (), of: int = 0) -> None:
        """Note once that a measure is undefined on the test set, or on clients' samples of a part."""
        if (name, part) in self._said:
            return
        self._said.add((name, part))
        why = undefined(self._section.metrics.get(name, name))
        if not of:
            self._news.append(f"{name} is undefined on the {part}: {why}")
            return
        names = [self._federation.client_name(k) for k in clients[:MAX_LISTED]]
        whose = f"{len(clients)} of {of} clients ({first_of(names, MAX_LISTED, len(clients))})"
        outcome = "and so on all" if self.measures.layout.shapes.get(name) else "left out of its mean"
        self._news.append(f"{name} is undefined on the {part} of {whose}, {outcome}: {why}")

    def news(self) -> Iterator[str]:
        """Yield the notes on undefined measures that have not been yielded before."""
        while self._news:
            yield self._news.pop(0)

    def _of_test(self, chunks: np.ndarray, whole: Mapping[int | None, Mapping[str, Value]]) -> dict[str, Value]:
        """Return the measures on the test set, from each chunk's sums and counts, (chunks, S, 2), and from `whole`."""
        totals = (chunks[self._counted] if self._apart and len(chunks) else chunks).sum(axis=0)
        others = whole.get(None, {})
        for name, value in others.items():
            if value is None:
                self.note_undefined(name, "test set")
        return _quotients(self.measures.sums, totals) | {
            name: value for name, value in others.items() if value is not None
        }

    def _of_others(self, chunks: np.ndarray, whole: Mapping[int | None, Mapping[str, Value]]) -> dict[str, Any]:
        """Return the column ``apart``, measures on test sets of clients that do not count, by number; {} if none."""
        if not self._apart:
            return {}
        if not len(chunks):
            return {APART: None}
        found = {str(k): {**_quotients(self.measures.sums, chunks[k]), **whole.get(k, {})} for k in self._apart}
        return {APART: found}

    def _measured_whole(self, outputs: np.ndarray) -> dict[int | None, dict[str, Value]]:
        """Return the other measures from all outputs, (n · outputs,): on the test set, None, and on those apart.

        The test set is absent where all of it is apart.
        """
        self.measures.begin(0)
        num_test, offsets = self._federation.num_test, self._federation.test_offsets
        output = torch.from_numpy(outputs).to(self._model.vector.dtype).view(num_test, *self._outputs)
        target = self._shards.targets(self._federation.test(0, num_test)[1])
        rows: dict[int | None, Any] = {None: slice(None)}
        if self._apart and offsets is not None:
            rows |= {k: slice(*offsets[k : k + 2].tolist()) for k in self._apart}
            rows[None] = torch.from_numpy(np.repeat(self._counted, np.diff(offsets)))
        samples = {which: (output[own], target[own]) for which, own in rows.items()}
        return {
            which: {name: value_of(one.cells(*own), one.shape) for name, one in self.measures.whole.items()}
            for which, own in samples.items()
            if len(own[1])
        }

    def _of_training(self, clients: np.ndarray) -> dict[str, Value]:
        """Return the measures on the clients' training sets, from each client's pairs, (N, cells, 2)."""
        found: dict[str, Value] = {}
        filled = np.flatnonzero(self._sizes[: len(clients)])
        for name, place in self.measures.layout.places.items():
            pairs = clients[:, place]
            defined = pairs[:, 0, 1] != 0
            absent = filled[~defined[filled]]
            if len(absent) and name in self.measures.whole:
                self.note_undefined(name, "training samples", absent.tolist(), len(filled))
            total, count = pairs[defined].transpose(2, 1, 0)  # (cells, clients)
            if not total.size:
                continue
            if self.measures.layout.shapes[name]:
                if len(absent):  # a sum of some clients' counts would look like that of all
                    continue
                found[name] = counts(total.sum(axis=1).reshape(self.measures.layout.shapes[name]))
            else:
                summed = name == "loss" and not self._averages  # then f_i is a sum
                found[name] = float((total[0] if summed else total[0] / count[0]).mean())
        return found

    def _scores(self, test: Mapping[str, Value], train: Mapping[str, Value]) -> dict[str, Value]:
        found = {f"test_{name}": value for name, value in test.items()}
        found |= {f"train_{name}": value for name, value in train.items()}
        own = (f"{part}_{name}" for part in ("test", "train") for name in self._section.metrics)
        return {column: found.get(column) for column in (*COLUMNS, *own)}


def _quotients(names: Iterable[str], totals: np.ndarray) -> dict[str, Value]:
    """Divide sums by counts, (S, 2); return measures by name, without those of count 0."""
    return {name: float(total / count) for name, (total, count) in zip(names, totals, strict=True) if count}
