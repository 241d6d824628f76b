"""Operators without parameters: activations, pooling, reshapes, sums, dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcfed.client.batched.operators.base import Operator, Pass, Sink

aten = torch.ops.aten


@dataclass
class _Unary(Operator):
    """An operator of one value.

    Attributes:
        source, output: numbers of values.
        passes_on: whether a gradient is wanted.
    """

    source: int
    output: int
    passes_on: bool

    def __post_init__(self) -> None:
        self.inputs, self.outputs = (self.source,), (self.output,)
        self.parameters = ()

    def forward(self, run: Pass) -> None:
        run.values[self.output] = self.of(run, run.value(self.source))

    def backward(self, run: Pass, sink: Sink) -> None:
        gradient = run.grads[self.output]
        if self.passes_on and gradient is not None:
            run.give(self.source, self.slope(run, gradient))

    def of(self, run: Pass, x: Tensor) -> Tensor:
        """Return the output."""
        raise NotImplementedError

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        """Return the gradient of the input, from that of the output."""
        raise NotImplementedError


@dataclass
class Relu(_Unary):
    """max(x, 0), in the memory of x where nothing else reads it."""

    in_place: bool

    def of(self, run: Pass, x: Tensor) -> Tensor:
        return x.relu_() if self.in_place else x.relu()

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        return aten.threshold_backward(gradient, run.value(self.output), 0)


Slope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""gradient of y, x, y → gradient of x."""


@dataclass
class Activation(_Unary):
    """An elementwise function with a kernel for its gradient."""

    function: Callable[[Tensor], Tensor]
    back: Slope

    def of(self, run: Pass, x: Tensor) -> Tensor:
        return self.function(x)

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        return self.back(gradient, run.value(self.source), run.value(self.output))


def _gelu(approximate: str) -> tuple[Callable[[Tensor], Tensor], Slope]:
    return (
        lambda x: aten.gelu(x, approximate=approximate),
        lambda g, x, y: aten.gelu_backward(g, x, approximate=approximate),
    )


ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Slope]] = {
    "tanh": (torch.tanh, lambda g, x, y: aten.tanh_backward(g, y)),
    "sigmoid": (torch.sigmoid, lambda g, x, y: aten.sigmoid_backward(g, y)),
    "silu": (aten.silu, lambda g, x, y: aten.silu_backward(g, x)),
    "gelu none": _gelu("none"),
    "gelu tanh": _gelu("tanh"),
}
"""By the function's name, and that of an approximation."""


@dataclass
class MaxPool(_Unary):
    """The largest number of each window."""

    arguments: tuple[Any, ...]
    """Window, stride, padding, dilation, whether the last windows may be cut."""

    def of(self, run: Pass, x: Tensor) -> Tensor:
        y, run.saved[self.output] = aten.max_pool2d_with_indices(x, *self.arguments)
        return y

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        x, places = run.value(self.source), run.saved[self.output]
        return aten.max_pool2d_with_indices_backward(gradient, x, *self.arguments, places)


@dataclass
class Reshape(_Unary):
    """The same numbers in another shape."""

    function: Callable[[Tensor, Pass], Tensor]

    def of(self, run: Pass, x: Tensor) -> Tensor:
        return self.function(x, run)

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        return gradient.reshape(run.value(self.source).shape)


@dataclass
class Permute(_Unary):
    """The same numbers with axes in another order."""

    axes: Sequence[int]

    def of(self, run: Pass, x: Tensor) -> Tensor:
        return x.permute(*self.axes)

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        back = sorted(range(len(self.axes)), key=lambda axis: self.axes[axis])
        return gradient.permute(*back)


@dataclass
class Layout(_Unary):
    """The same numbers, in another memory format."""

    memory_format: torch.memory_format

    def of(self, run: Pass, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self.memory_format)

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class Dropout(_Unary):
    """Numbers times a mask of 0 and 1/(1−p)."""

    place: int
    p: float

    def of(self, run: Pass, x: Tensor) -> Tensor:
        return x * run.masks[self.place].view(x.shape)

    def slope(self, run: Pass, gradient: Tensor) -> Tensor:
        return gradient * run.masks[self.place].view(gradient.shape)


@dataclass
class Sum(Operator):
    """a + b, of one shape."""

    terms: tuple[int, int]
    output: int
    passes_on: tuple[bool, bool]

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.terms, (self.output,)
        self.parameters = ()

    def forward(self, run: Pass) -> None:
        run.values[self.output] = run.value(self.terms[0]) + run.value(self.terms[1])

    def backward(self, run: Pass, sink: Sink) -> None:
        gradient = run.grads[self.output]
        assert gradient is not None
        for term, passes_on in zip(self.terms, self.passes_on, strict=True):
            if passes_on:
                run.give(term, gradient)
