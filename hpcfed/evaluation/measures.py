"""Measures of a model on samples: loss, the task's accuracy, and the recipe's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.sums import sum_over_first
from hpcfed.client.precision import computing
from hpcfed.config.user_code.generators import seed_generators
from hpcfed.data.cache import Samples
from hpcfed.evaluation.metrics import WholeMetric
from hpcfed.evaluation.tiles import ClientTiles
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import ACCURACY, RIGHT, BatchMetric, Loss
from hpcfed.reduce.rows import read_together
from hpcfed.rng import Purpose

Value = float | list[Any] | None
"""A measure's value: a number, a matrix as nested lists, or None if it is undefined."""


@dataclass(frozen=True)
class Layout:
    """Position of each measure in an array of cells, (cells, 2), with one cell per number (see `Measures.cells`).

    Attributes:
        shapes: name of the measure → shape of its value; () for a single number.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def places(self) -> dict[str, slice]:
        """Name of the measure → the slice of its cells."""
        ends = list(accumulate((prod(shape) for shape in self.shapes.values()), initial=0))
        return {name: slice(*ends[k : k + 2]) for k, name in enumerate(self.shapes)}

    @property
    def size(self) -> int:
        """Number of cells, one for each number in the measures' values."""
        return sum(prod(shape) for shape in self.shapes.values())


class Measures:
    """Computes measures of a model: those that are sums over samples, and those that need all samples at once.

    Args:
        model: the model; measured with the parameters that are loaded at the time.
        loss: the loss.
        task: the federation's task, which determines the kind of accuracy.
        sums, whole: the recipe's metrics by name: sums over samples, and functions of all samples' outputs.
        batch_size: number of samples that go through the model together.
        seed: seeds torch's, NumPy's and Python's global generators, from which user code draws; None: no seeding.
        precision: number format of the model's matrix products, such as ``float32``.

    Attributes:
        sums: all measures that are sums over samples, by name, including loss and accuracy if they are such sums.
        whole: all measures that need all samples at once, by name.
        layout: position of each measure in an array of cells.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        task: str,
        sums: Mapping[str, BatchMetric],
        whole: Mapping[str, WholeMetric],
        batch_size: int,
        seed: int | None = None,
        precision: str = "float32",
    ):
        accuracy = ACCURACY.get(task) if model.findings.has_known_outputs else None
        self.sums: dict[str, BatchMetric] = {
            **({} if loss.whole else {"loss": loss.summed}),
            **({"accuracy": accuracy} if accuracy is not None else {}),
            **sums,
        }
        self.whole = {**({"loss": WholeMetric(loss.of_all)} if loss.whole else {}), **whole}
        self.layout = Layout(dict.fromkeys(self.sums, ()) | {name: metric.shape for name, metric in self.whole.items()})
        each = {"loss": None if loss.is_own else loss.by_sample, "accuracy": RIGHT.get(task)}
        self._by_sample = {name: one for name, one in each.items() if one and name in self.sums.keys() - sums.keys()}
        totals = {"loss": loss.total, "accuracy": RIGHT.get(task)}
        self._totals = {name: one for name, one in totals.items() if one and name in self.sums.keys() - sums.keys()}
        self._unread: list[tuple[np.ndarray, Tensor]] = []
        self._client_sums = {name: one for name, one in self.sums.items() if name not in self._by_sample}
        self._model, self._batch_size, self._seed = model, batch_size, seed
        self._computing = computing(precision, model.vector.device, of_one_model=False)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Block in which the model is in evaluation mode, without gradients, with matrix products in `precision`.

        Sums computed on a GPU are written to their arrays only when the block ends.
        """
        with self._model.evaluation(), torch.no_grad(), self._computing():
            self._unread.clear()
            yield
            self._read()

    def _read(self) -> None:
        """Copy all sums that are still on the GPU to the host at once, and add them to their arrays."""
        read = read_together([total for _, total in self._unread])
        for (place, _), total in zip(self._unread, read, strict=True):
            place += total
        self._unread.clear()

    def begin(self, unit: int) -> None:
        """Prepare to measure client or chunk number `unit`: seed global generators, reset the module's hidden state."""
        self._model.forget()
        if self._seed is not None:
            seed_generators(self._model.vector.device, self._seed, Purpose.EVALUATION, client=unit)

    def cells(self, samples: Samples, unit: int, out: np.ndarray) -> None:
        """Measure the loaded model on the `samples` of client or chunk `unit`; write all measures to `out`, (cells, 2).

        A measure in `sums` has one cell, (sum, count); one in `whole` has a cell (number, 1) for each number of its
        value, or (0, 0) if it is undefined. Sums computed on a GPU are in `out` only when `measuring` ends.
        """
        output = self.of_samples(samples, unit, out[: len(self.sums)])
        if self.whole:
            target = samples[1].cpu()
            out[len(self.sums) :] = np.concatenate([one.cells(output, target) for one in self.whole.values()])

    def cells_of_several(
        self, tiles: ClientTiles, clients: np.ndarray, sizes: np.ndarray, samples: Samples
    ) -> np.ndarray:
        """Measure C clients in tiles; return their cells, (C, cells, 2); zeros for clients too large for a tile.

        A client's cells do not depend on the other clients. Loss and accuracy are pairwise sums over samples
        (`hpcfed.arithmetic.sums`); all other measures, including the user's, are computed client by client.

        Args:
            tiles: computes the model's outputs.
            clients: client numbers, (C,).
            sizes: number of samples of each client, (C,).
            samples: samples of all C clients, one client after another.
        """
        places, found = self.layout.places, np.zeros((len(sizes), self.layout.size, 2))
        for own, output, target in tiles(sizes, samples):
            output = _in_full(output)
            filled, both = output.shape[:2], (output.flatten(0, 1), target.flatten(0, 1))
            fillers = np.arange(filled[1]) >= sizes[own, None]
            of_samples = [by_sample(*both) for by_sample in self._by_sample.values()]
            read = read_together(of_samples) if output.device.type != "cpu" else [each.numpy() for each in of_samples]
            for name, values in zip(self._by_sample, read, strict=True):
                values = values.reshape(filled)[: len(own)].astype(np.float64)
                values[fillers] = 0
                found[own, places[name].start, 0] = sum_over_first(np.ascontiguousarray(values.T))
                found[own, places[name].start, 1] = sizes[own]
            if self._client_sums or self.whole:
                for slot, place in enumerate(own.tolist()):
                    rows = (part[slot, : sizes[place]].clone() for part in (output, target))
                    found[place] += self._own_cells(int(clients[place]), *rows)
        return found

    def _own_cells(self, client: int, output: Tensor, target: Tensor) -> np.ndarray:
        """Return a client's cells, (cells, 2), filled in for measures that are not computed per sample; else zeros."""
        self.begin(client)
        places, found = self.layout.places, np.zeros((self.layout.size, 2))
        for name, measure in self._client_sums.items():
            found[places[name]] = measure(output, target)
        for name, metric in self.whole.items():
            found[places[name]] = metric.cells(output.cpu(), target.cpu())
        return found

    def of_samples(self, samples: Samples, unit: int, out: np.ndarray) -> Tensor:
        """Measure the S `sums` on the `samples` of client or chunk `unit`; write each (sum, count) to `out`, (S, 2).

        Sums computed on a GPU are in `out` only when `measuring` ends.

        Returns:
            The model's outputs on the n samples, (n, …), on the host; an empty tensor if `whole` is empty.
        """
        self.begin(unit)
        out[:], outputs, on_host = 0, [], self._model.vector.device.type == "cpu"
        for x, y in zip(*(tensor.split(self._batch_size) for tensor in samples), strict=True):
            output = _in_full(self._model.module(x))
            for row, (name, measure) in zip(out, self.sums.items(), strict=True):
                if on_host or name not in self._totals:
                    row += measure(output, y)
                else:
                    self._unread.append((row[:1], self._totals[name](output, y).sum()))
                    row[1] += len(y)
            if self.whole:
                outputs.append(output.cpu())
        return torch.cat(outputs) if outputs else torch.empty(0)


def _in_full(output: Tensor) -> Tensor:
    """Return outputs in bfloat16 as float32, in which losses are computed; others unchanged."""
    return output.float() if output.dtype is torch.bfloat16 else output


def value_of(pairs: np.ndarray, shape: tuple[int, ...]) -> Value:
    """Return a measure's value from its cells, (cells, 2); None if it is undefined, that is, if a cell's count is 0.

    If `shape` is (), the value is the quotient of the only cell, sum / count; else it is a matrix of counts, of this
    shape, as nested lists of int.
    """
    if not pairs[:, 1].all():
        return None
    if shape:
        return counts(pairs[:, 0].reshape(shape))
    return float(pairs[0, 0] / pairs[0, 1])


def counts(matrix: np.ndarray) -> list[Any]:
    """Return a matrix of counts, rounded, as nested lists of int."""
    return np.rint(matrix).astype(np.int64).tolist()
