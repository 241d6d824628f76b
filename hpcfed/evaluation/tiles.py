"""Outputs of a linear model or perceptron for many small clients at once, in tiles of fixed shapes.

The last bits of a matrix product may depend on its number of rows, and on a row's position. So each client's samples
fill a slot of B rows, and a tile of R slots goes through a layer as one batched product,

    (R, B, inputs) · (R, inputs, outputs),   B = least power of two ≥ `LEAST_ROWS` and ≥ the client's number of samples

R depends on B and the recipe alone; the layers' widths, which are padded with zeros, on the recipe alone. A slot is
filled up with copies of the client's last sample; slots without a client are computed and thrown away. Clients with
more than `most_samples` samples go through the model alone. With ``bits: portable`` no output depends on other rows, so
B is exactly the client's number of samples, and no slot is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.client.batched.gradients import linear_layers
from hpcfed.client.batched.matmul import Blas, Layer
from hpcfed.client.batched.tiles import rounded, width_step
from hpcfed.data.cache import Samples
from hpcfed.models.flat import FlatModel
from hpcfed.models.portable import PortableLinear
from hpcfed.ranks.accelerators import upload

LEAST_ROWS = 4
"""Number of rows of the smallest slot."""
TILE_NUMBERS = 1 << 18
"""Most input numbers of a tile, rows · features, so that they fit into a core's cache."""
WORK_OF_CALLS, ON_DEVICE = 1 << 20, 1 << 6
"""Work, samples · parameters of a client, that takes a CPU as long as the overhead of its calls: clients with more are
evaluated alone. The second number is the factor on this limit for devices other than CPUs."""


class Tile(NamedTuple):
    """Outputs of the clients in one tile.

    Attributes:
        clients: the client in each slot, as an index into the `sizes` of `ClientTiles.__call__`; if there are fewer
            than R, the last slots have no client, and their outputs no meaning.
        output, target: outputs (R, B, outputs per sample) and targets (R, B, …) of R slots of B rows; client k's
            samples are the first ``sizes[k]`` rows of its slot.
    """

    clients: np.ndarray
    output: Tensor
    target: Tensor


class ClientTiles:
    """Computes outputs of the loaded model for many small clients, in tiles.

    Args:
        model: a linear model or a perceptron.
        layers: the model's linear layers, with ReLU between them.
        batch_size: the recipe's ``evaluate.batch_size``; clients with more samples are not small.
        sized_for: device, CPU or GPU, whose limit on a small client's work applies; None: the model's device.
    """

    def __init__(
        self, model: FlatModel, layers: list[nn.Linear], batch_size: int, sized_for: torch.device | None = None
    ):
        self._module, self._layers, self._batch_size = model.module, layers, batch_size
        self._portable = isinstance(model.module, PortableLinear)
        self._vector, self._blas = model.vector, Blas()
        self._step = width_step(LEAST_ROWS, model.vector.element_size())
        self._rows = max(1, TILE_NUMBERS // layers[0].in_features)
        self._rooms: dict[int, Tensor] = {}
        work = WORK_OF_CALLS * (1 if (sized_for or model.vector.device).type == "cpu" else ON_DEVICE)
        fit = max(1, work // model.vector.numel())
        self.most_samples = min(batch_size, 1 << fit.bit_length() - 1)
        """Most samples that a client evaluated in a tile may have."""

    def takes(self, sizes: np.ndarray) -> np.ndarray:
        """Return which of C clients are evaluated in tiles, (C,) bool; `sizes`, (C,), are their numbers of samples."""
        return (sizes > 0) & (sizes <= self.most_samples)

    def __call__(self, sizes: np.ndarray, samples: Samples) -> Iterator[Tile]:
        """Yield tiles with the outputs of all clients for which `takes` is true.

        Args:
            sizes: number of samples of each client, (C,).
            samples: samples of all C clients, one client after another.
        """
        x, y = samples[0].flatten(1), samples[1]
        firsts, taken = np.cumsum(sizes) - sizes, self.takes(sizes)
        rooms = (
            sizes if self._portable else np.maximum(LEAST_ROWS, 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(int))
        )
        layers = [] if self._portable else self._padded()
        for rows in np.unique(rooms[taken]).tolist():
            clients = np.flatnonzero(taken & (rooms == rows))
            slots = max(1, self._rows // rows)
            for first in range(0, len(clients), slots):
                own = clients[first : first + slots]
                places = firsts[own, None] + np.minimum(np.arange(rows), sizes[own, None] - 1)
                if not self._portable:
                    places = np.concatenate([places, places[:1].repeat(slots - len(own), axis=0)])
                index = upload(torch.from_numpy(places.ravel()), x.device)
                output, target = self._outputs(x, index, rows, layers), y.index_select(0, index)
                shape = len(places), rows
                yield Tile(own, output.view(*shape, -1), target.view(*shape, *target.shape[1:]))

    def _outputs(self, x: Tensor, index: Tensor, rows: int, layers: list[Layer]) -> Tensor:
        """Return the outputs of one tile, (R · B, outputs per sample), contiguous.

        Args:
            x: flattened samples of all clients, (n, features).
            index: the row of `x` for each row of the tile, (R · B,).
            rows: B, the number of rows of a slot.
            layers: the padded layers; empty if arithmetic is portable.
        """
        if self._portable:
            return self._module(x.index_select(0, index))
        slots = len(index) // rows
        padded = layers[0].weight.shape[2]
        if padded == x.shape[1]:
            z = x.index_select(0, index).view(slots, rows, padded)
        else:
            if rows not in self._rooms:
                self._rooms[rows] = x.new_zeros(slots, rows, padded)
            z = self._rooms[rows]
            z[..., : x.shape[1]] = x.index_select(0, index).view(slots, rows, -1)
        for number, layer in enumerate(layers):
            if number:
                z = z.relu_()
            z = self._blas.outputs(_of(slots, layer), z)
        return z[..., : self._layers[-1].out_features].flatten(0, 1).contiguous()

    def _padded(self) -> list[Layer]:
        """Return the loaded model's layers, for one slot, with inputs and outputs padded with zeros."""
        found = []
        for layer in self._layers:
            outputs, inputs = layer.weight.shape
            weight = self._vector.new_zeros(1, rounded(outputs, self._step), rounded(inputs, self._step))
            weight[0, :outputs, :inputs] = layer.weight
            bias = None
            if layer.bias is not None:
                bias = self._vector.new_zeros(1, weight.shape[1])
                bias[0, :outputs] = layer.bias
            found.append(Layer(weight, weight.transpose(1, 2), bias, None if bias is None else bias.unsqueeze(1)))
        return found


def tiles_for(model: FlatModel, batch_size: int, sized_for: torch.device | None = None) -> ClientTiles | None:
    """Return the `ClientTiles` of a linear model or perceptron; None for other models."""
    if isinstance(model.module, PortableLinear):
        return ClientTiles(model, [model.module], batch_size, sized_for)
    layers = linear_layers(model.module)
    return None if layers is None else ClientTiles(model, layers, batch_size, sized_for)


def _of(slots: int, layer: Layer) -> Layer:
    """Expand a layer for one slot to a layer for `slots` slots that share its memory."""
    weight = layer.weight.expand(slots, -1, -1)
    bias = None if layer.bias is None else layer.bias.expand(slots, -1)
    return Layer(weight, weight.transpose(1, 2), bias, None if bias is None else bias.unsqueeze(1))
