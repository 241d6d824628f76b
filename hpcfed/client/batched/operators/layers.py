"""Operators with parameters: linear layers, convolutions, normalisations, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpcfed.client.batched.operators import columns
from hpcfed.client.batched.operators.base import Operator, Pass, Sink

aten = torch.ops.aten


def _in_order_on_a_gpu(x: Tensor) -> Tensor:
    """Return x with its channels before its pixels on a GPU, whose group norms take no other order."""
    return x if x.device.type == "cpu" else x.contiguous()


def _trained(*parameters: int | None) -> tuple[int, ...]:
    return tuple(parameter for parameter in parameters if parameter is not None)


@dataclass
class Linear(Operator):
    """z = x Wᵀ + b of x (R·M, …, inputs)."""

    source: int
    output: int
    weight: int
    bias: int | None
    passes_on: bool

    def __post_init__(self) -> None:
        self.inputs, self.outputs = (self.source,), (self.output,)
        self.parameters = _trained(self.weight, self.bias)

    def forward(self, run: Pass) -> None:
        x, layer = run.value(self.source), run.parameters.layer(self.weight, self.bias)
        rows = x.reshape(run.parameters.slots, -1, x.shape[-1])
        run.saved[self.output] = rows
        run.values[self.output] = run.parameters.matmul.outputs(layer, rows).view(*x.shape[:-1], layer.weight.shape[1])

    def backward(self, run: Pass, sink: Sink) -> None:
        gradient, rows = run.grads[self.output], run.saved[self.output]
        assert gradient is not None
        assert isinstance(rows, Tensor)
        outgoing = gradient.reshape(*rows.shape[:2], gradient.shape[-1])
        if self.passes_on:
            layer = run.parameters.layer(self.weight, self.bias)
            run.give(self.source, run.parameters.matmul.backward(layer, outgoing).view(run.value(self.source).shape))
        if self.bias is not None:
            sink.add(self.bias, outgoing.sum(1))
        sink.product(self.weight, outgoing, rows)


@dataclass
class Convolution(Operator):
    """A convolution: slot by slot, since one call for all has no faster kernel on a CPU; on a GPU by products."""

    source: int
    output: int
    weight: int
    bias: int | None
    passes_on: bool
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def __post_init__(self) -> None:
        self.inputs, self.outputs = (self.source,), (self.output,)
        self.parameters = _trained(self.weight, self.bias)
        self._rest = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups)

    def forward(self, run: Pass) -> None:
        x, weights = run.value(self.source), run.parameters.own[self.weight]
        biases = [None] * len(weights) if self.bias is None else run.parameters.own[self.bias]
        if len(weights) == 1:
            run.values[self.output] = aten.convolution(x, weights[0], biases[0], *self._rest)
            return
        if self._by_products(x):
            stacks = run.parameters.stacks
            bias = None if self.bias is None else stacks[self.bias]
            z, run.saved[self.output] = columns.outputs(self._windows(run), x, stacks[self.weight], bias)
            run.values[self.output] = z
            return
        parts = zip(x.chunk(len(weights)), weights, biases, strict=True)
        run.values[self.output] = torch.cat([aten.convolution(*part, *self._rest) for part in parts])

    def backward(self, run: Pass, sink: Sink) -> None:
        gradient, x, weights = run.grads[self.output], run.value(self.source), run.parameters.own[self.weight]
        assert gradient is not None
        if isinstance(seen := run.saved[self.output], Tensor):
            weight = run.parameters.stacks[self.weight]
            about = self._windows(run), gradient, x, seen, weight
            dx, of_weight, of_bias = columns.slopes(*about, passes_on=self.passes_on)
            if dx is not None:
                run.give(self.source, dx)
            if self.bias is not None:
                sink.add(self.bias, of_bias)
            sink.add(self.weight, of_weight)
            return
        sizes = None if self.bias is None else [weights[0].shape[0]]
        wanted = [self.passes_on, True, self.bias is not None]
        parts = zip(gradient.chunk(len(weights)), x.chunk(len(weights)), weights, strict=True)
        found = [aten.convolution_backward(*part, sizes, *self._rest, wanted) for part in parts]
        if self.passes_on:
            run.give(self.source, found[0][0] if len(found) == 1 else torch.cat([one[0] for one in found]))
        if self.bias is not None:
            sink.add(self.bias, torch.stack([one[2] for one in found]))
        sink.add(self.weight, found[0][1].unsqueeze(0) if len(found) == 1 else torch.stack([one[1] for one in found]))

    def _by_products(self, x: Tensor) -> bool:
        return x.device.type != "cpu" and self.groups == 1

    def _windows(self, run: Pass) -> columns.Windows:
        kernel = tuple(run.parameters.stacks[self.weight].shape[3:])
        return columns.Windows(kernel, self.stride, self.padding, self.dilation)


Rows = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of a value by slot, (R, M, …), and of parameters beside it, (R, 1, …)."""


@dataclass
class Normalisation(Operator):
    """(x − mean)/√(var + ε), times γ, plus β; over what, its kinds say."""

    source: int
    output: int
    weight: int | None
    bias: int | None
    passes_on: bool

    def __post_init__(self) -> None:
        self.inputs, self.outputs = (self.source,), (self.output,)
        self.parameters = _trained(self.weight, self.bias)

    def forward(self, run: Pass) -> None:
        x = _in_order_on_a_gpu(run.value(self.source))
        if run.parameters.slots == 1:
            y, *statistics = self._normalised(x, *self._affine(run))
            run.saved[self.output] = statistics
        else:
            normal, *statistics = self._normalised(x, None, None)
            y = _affine(normal, run, self.weight, self.bias, self._rows(run, x))
            run.saved[self.output] = normal, *statistics
        run.values[self.output] = y

    def backward(self, run: Pass, sink: Sink) -> None:
        gradient, x = run.grads[self.output], run.value(self.source)
        assert gradient is not None
        saved: Sequence[Tensor] = run.saved[self.output]  # type: ignore[assignment]
        if run.parameters.slots == 1:
            wanted = [self.passes_on, self.weight is not None, self.bias is not None]
            dx, *found = self._slopes(gradient, x, saved, *self._affine(run), wanted)
            for parameter, one in zip((self.weight, self.bias), found, strict=True):
                if parameter is not None:
                    sink.add(parameter, one.unsqueeze(0))
        else:
            normal, *statistics = saved
            inner = _affine_backward(gradient, normal, run, sink, self.weight, self.bias, self._rows(run, x))
            dx = self._slopes(inner, x, statistics, None, None, [True, False, False])[0]
        if self.passes_on:
            run.give(self.source, dx)

    def _affine(self, run: Pass) -> tuple[Tensor | None, Tensor | None]:
        """Return γ and β of the one client."""
        weight, bias = (None if one is None else run.parameters.own[one][0] for one in (self.weight, self.bias))
        return weight, bias

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Sequence[Tensor]:
        """Return the output, and the mean and 1/√(var + ε) of each part of x that is normalised by itself."""
        raise NotImplementedError

    def _slopes(
        self,
        gradient: Tensor,
        x: Tensor,
        statistics: Sequence[Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: Sequence[bool],
    ) -> Sequence[Tensor]:
        """Return the gradients of x, γ and β, as far as they are wanted."""
        raise NotImplementedError

    def _rows(self, run: Pass, x: Tensor) -> Rows:
        """Return the shapes of x by slot, and of γ and β beside it."""
        raise NotImplementedError


@dataclass
class LayerNorm(Normalisation):
    """Over the last axes of x."""

    shape: Sequence[int]
    eps: float

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Sequence[Tensor]:
        return aten.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def _slopes(
        self,
        gradient: Tensor,
        x: Tensor,
        statistics: Sequence[Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: Sequence[bool],
    ) -> Sequence[Tensor]:
        return aten.native_layer_norm_backward(gradient, x, self.shape, *statistics, weight, bias, wanted)

    def _rows(self, run: Pass, x: Tensor) -> Rows:
        slots = run.parameters.slots
        return (slots, -1, *self.shape), (slots, 1, *self.shape)


@dataclass
class GroupNorm(Normalisation):
    """Over groups of the channels of x, (R·B, C, …)."""

    groups: int
    eps: float

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Sequence[Tensor]:
        return aten.native_group_norm(x, weight, bias, *_samples_channels_pixels(x), self.groups, self.eps)

    def _slopes(
        self,
        gradient: Tensor,
        x: Tensor,
        statistics: Sequence[Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: Sequence[bool],
    ) -> Sequence[Tensor]:
        if x.device.type == "cpu" and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        else:
            gradient, x = gradient.contiguous(), x.contiguous()
        about = *_samples_channels_pixels(x), self.groups, wanted
        return aten.native_group_norm_backward(gradient, x, *statistics, weight, *about)

    def _rows(self, run: Pass, x: Tensor) -> Rows:
        slots = run.parameters.slots
        return (slots, -1, *x.shape[1:]), (slots, 1, x.shape[1], *(1,) * (x.dim() - 2))


def _samples_channels_pixels(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], prod(x.shape[2:])


def _affine(normal: Tensor, run: Pass, weight: int | None, bias: int | None, rows: Rows) -> Tensor:
    """Return γ·normal + β, with each slot's own."""
    stacks, y = run.parameters.stacks, normal.reshape(rows[0])
    if weight is not None:
        y = y * stacks[weight].view(rows[1])
    if bias is not None:
        y = y + stacks[bias].view(rows[1])
    return y.view(normal.shape) if y.is_contiguous() else y.reshape(normal.shape)


def _affine_backward(
    gradient: Tensor, normal: Tensor, run: Pass, sink: Sink, weight: int | None, bias: int | None, rows: Rows
) -> Tensor:
    """Give γ and β their gradients; return that of the normalised value."""
    shaped = gradient.reshape(rows[0])
    summed = [axis for axis in range(1, len(rows[1])) if rows[1][axis] == 1]
    inner = shaped
    if weight is not None:
        stack = run.parameters.stacks[weight]
        inner = shaped * stack.view(rows[1])
        sink.add(weight, (shaped * normal.reshape(rows[0])).sum(summed).view(stack.shape))
    if bias is not None:
        sink.add(bias, shaped.sum(summed).view(run.parameters.stacks[bias].shape))
    return inner.reshape(gradient.shape)


@dataclass
class Embedding(Operator):
    """Rows of a table (V, E) by tokens (R·M, …)."""

    source: int
    output: int
    weight: int
    passes_on: bool

    def __post_init__(self) -> None:
        self.inputs, self.outputs, self.parameters = (self.source,), (self.output,), (self.weight,)

    def forward(self, run: Pass) -> None:
        tokens, table, slots = run.value(self.source), run.parameters.stacks[self.weight], run.parameters.slots
        if slots > 1:
            first = torch.arange(0, slots * table.shape[1], table.shape[1], device=tokens.device)
            tokens = (tokens.reshape(slots, -1) + first.unsqueeze(1)).view(tokens.shape)
        run.saved[self.output] = tokens
        run.values[self.output] = aten.embedding(table.flatten(0, 1), tokens)

    def backward(self, run: Pass, sink: Sink) -> None:
        gradient, table, tokens = run.grads[self.output], run.parameters.stacks[self.weight], run.saved[self.output]
        assert gradient is not None
        rows = len(table) * table.shape[1]
        sink.add(self.weight, aten.embedding_dense_backward(gradient, tokens, rows, -1, False).view(table.shape))
