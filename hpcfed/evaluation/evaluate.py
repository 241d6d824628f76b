"""Loss, accuracy and the recipe's metrics of one model, bit-identical on any number of ranks.

The test set is cut into chunks of ``evaluate.batch_size`` samples. One rank measures a whole chunk, or a client's whole
training set in batches of this size, and writes the sums into a slot; every rank adds all slots in the same order.
Metrics that are not sums need all outputs at once: on a client's samples they are computed by the client's rank, on the
test set by rank 0, which gathers the outputs in file order.
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
"""Most clients named in a line of `Evaluator.news`."""
COLUMNS = ("test_loss", "test_accuracy", "train_loss", "train_accuracy")
"""Columns of scores in every record; ``test_`` and ``train_`` columns of the recipe's ``evaluate.metrics`` follow."""
APART = "apart"
"""Column of the clients that are left out of all other scores: each client's scores on its own test set."""


class Evaluator:
    """Measures models on the common test set and on all clients' training sets.

    On the test set, a measure that is a sum over samples is Σ sums / Σ counts over chunks. On the training sets, a
    measure is the unweighted mean over the clients for which it is defined; a matrix of counts is summed over clients.
    If the model has private parts, a client's samples are measured with the client's part. Clients for which `counted`
    is False enter no score; the column `APART` has the measures of each of them on its test set.

    Args:
        section: the recipe's ``evaluate``.
        model: holds the parameters being measured.
        loss: the training loss, for `loss_of`.
        measures: computes loss, accuracy (if the task has one), and the recipe's metrics.
        shards, federation: the samples.
        placement, world: decide which clients this rank measures.
        outputs: shape of the model's output for one sample.
        private: the clients' private parts; None if the model has none.
        counted: (N,) bool, clients whose data count in the scores; None: all.
        present: (N,) bool, the clients that train; ``statistics: training`` uses their samples; None: all.
        sized_for: device whose size limit for clients in tiles applies (see `ClientTiles`); None: the model's device.
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
        """``test`` and ``train`` → number of samples behind the scores; clients that are not `counted` add none."""
        return {"test": self._federation.num_test_of(self._counted), "train": int(self._sizes.sum())}

    @property
    def nothing(self) -> dict[str, Value]:
        """Scores of a round without an evaluation: each column of the record → None."""
        return self._scores({}, {}) | (dict.fromkeys([APART]) if self._apart else {})

    def __call__(
        self, w: Tensor, *, test: bool, train: bool, meanwhile: Callable[[], object] = bool
    ) -> dict[str, Value]:
        """Measure the model `w`, (d,), on the test set, the training sets, or both; collective, with one reduction.

        Args:
            test, train: whether to measure on the test set, and on the training sets.
            meanwhile: called once this rank's work is queued on the GPU, before the host waits for the results; not
                called if there is nothing to measure.

        Returns:
            Column of the record → score; None if the score was not requested or is undefined.
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
        self._note_data_not_finite(chunks, bounds)
        whole = self._world.on_root(lambda: self._measured_whole(outputs)) if kept else {}
        of_test = self._of_test(chunks, whole)
        return self._scores(of_test, self._of_training(clients)) | self._of_others(chunks, whole)

    def averaged_for(self, w: Tensor) -> State:
        """Return the averaged buffers with which the model `w`, (d,), is to be evaluated.

        With ``statistics: training`` they are re-estimated (`TrainingStatistics`); else they are the current ones.
        """
        return self._model.averaged if self._statistics is None else self._statistics(w)

    @property
    def _by_client(self) -> bool:
        """Whether the test set is measured client by client: if models have private parts or clients are left out."""
        own = self._private is not None or not self._counted.all()
        return own and self._federation.test_offsets is not None

    @property
    def _apart(self) -> list[int]:
        """Numbers of the clients in the column `APART`: left out of the other scores, and with test samples."""
        offsets = self._federation.test_offsets
        return [] if offsets is None else np.flatnonzero(~self._counted & (np.diff(offsets) > 0)).tolist()

    def _test_bounds(self) -> np.ndarray:
        """Return the first row of each chunk of the test set, then the number of all rows, (chunks + 1,).

        A chunk has at most ``evaluate.batch_size`` rows, or is one client's test set if `_by_client` is true.
        """
        count, offsets = self._federation.num_test, self._federation.test_offsets
        if self._by_client and offsets is not None:
            return offsets
        return np.minimum(np.arange(-(-count // self._batch_size) + 1) * self._batch_size, count)

    def _own_chunks(self, bounds: np.ndarray) -> Sequence[int]:
        """Return the numbers of the chunks that this rank measures: its clients' chunks, or every P-th on P ranks."""
        if self._by_client and len(bounds) > 1:
            mine = self._placement.at_home(self._world.rank)
            return mine[np.diff(bounds)[mine] > 0].tolist()
        return range(self._world.rank, len(bounds) - 1, self._world.size)

    def _test_chunk(self, w: Tensor, chunk: int) -> Samples:
        """Return a chunk's test samples; if the chunk is a client's test set, load the client's private part."""
        if not self._by_client:
            return self._shards.test_chunk(chunk, self._batch_size)
        self._load_own(w, chunk)
        return self._shards.client_test(chunk)

    def _load_own(self, w: Tensor, client: int) -> None:
        """Load the model `w`, (d,), with a client's private part; do nothing if the model has no private parts."""
        if self._private is not None:
            self._model.load(w, self._private.of(client))

    def measure_small(self, split: str, cells: np.ndarray) -> np.ndarray:
        """Measure a linear model or perceptron on many small clients at once, in tiles (`hpcfed.evaluation.tiles`).

        If the model is of another kind or has private parts, no client is measured.

        Args:
            split: ``train`` or ``test``: the samples to measure on.
            cells: output, (N, cells, 2): see `Measures.cells`; this rank fills in the clients that it measures.

        Returns:
            (N,) bool, the clients that some rank measures in this call; the caller must measure the others.
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
        """Return a client's training loss f_i(w): the mean or sum over its samples, as set by ``loss.reduction``.

        It is 0 if the client has no samples.

        Args:
            client: the client's number.
            w: the model, (d,).
            samples: the client's samples.
            own: the client's private part.
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
        """Add to `news` a line that a measure is undefined; later calls with the same measure and part add nothing.

        Args:
            name: the measure's name.
            part: where the measure is undefined: ``test set``, ``training samples`` or ``test samples``.
            clients: numbers of the clients for which the measure is undefined.
            of: number of clients with samples in the part; 0 if the measure is undefined on the part as a whole.
        """
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

    def _note_data_not_finite(self, chunks: np.ndarray, bounds: np.ndarray) -> None:
        """Add to `news` the first chunk whose sums, (chunks, S, 2), are not finite because its x is not.

        Samples are read again for this in the first evaluation alone that has such sums.
        """
        not_finite = np.flatnonzero(~np.isfinite(chunks).all(axis=(1, 2))).tolist()
        if not not_finite or ("x", "test set") in self._said:
            return
        self._said.add(("x", "test set"))
        for chunk in not_finite:
            start, stop = bounds[chunk : chunk + 2].tolist()
            x, _ = self._federation.test(start, stop)
            if flaws := int(np.count_nonzero(~np.isfinite(x))):
                what = f"/test/x has numbers that are not finite: {flaws:,} in rows {start:,} to {stop - 1:,}"
                self._news.append(f"{what}; its scores count such samples, too: mend them, or leave them out")
                return

    def news(self) -> Iterator[str]:
        """Yield the lines on undefined measures and data that were added since the last call."""
        while self._news:
            yield self._news.pop(0)

    def _of_test(self, chunks: np.ndarray, whole: Mapping[int | None, Mapping[str, Value]]) -> dict[str, Value]:
        """Return the test set's measures, from each chunk's S sums and counts, (chunks, S, 2), and from `whole`."""
        totals = (chunks[self._counted] if self._apart and len(chunks) else chunks).sum(axis=0)
        others = whole.get(None, {})
        for name, value in others.items():
            if value is None:
                self.note_undefined(name, "test set")
        return _quotients(self.measures.sums, totals) | {
            name: value for name, value in others.items() if value is not None
        }

    def _of_others(self, chunks: np.ndarray, whole: Mapping[int | None, Mapping[str, Value]]) -> dict[str, Any]:
        """Return the column `APART`: number of each client left out, as text → the measures on its test set.

        The column is None if test sets were not measured. Without clients left out there is no column: {}.
        """
        if not self._apart:
            return {}
        if not len(chunks):
            return {APART: None}
        found = {str(k): {**_quotients(self.measures.sums, chunks[k]), **whole.get(k, {})} for k in self._apart}
        return {APART: found}

    def _measured_whole(self, outputs: np.ndarray) -> dict[int | None, dict[str, Value]]:
        """Return the measures that need all samples at once, from the outputs of all n test samples, (n · outputs,).

        Returns:
            None → the measures on the test set; number of each client left out → the measures on the client's test
            set. The key None is missing if no counted client has test samples.
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
        """Return the training sets' measures from the clients' cells, (N, cells, 2).

        A number is missing if it is undefined for all clients; a matrix, if it is undefined for any client.
        """
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
    """Return name → sum / count, from one (sum, count) per name, (S, 2); names with a count of 0 are left out."""
    return {name: float(total / count) for name, (total, count) in zip(names, totals, strict=True) if count}
