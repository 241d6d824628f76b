"""A pass over operators, forwards and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcfed.client.batched.matmul import Blas, Layer, OneClient


class Parameters:
    """The stacked parameters of a pass, each (R, …), with the views of them that operators take.

    Args:
        stacks: each parameter, (R, …).
        matmul: what computes products.
    """

    def __init__(self, stacks: Sequence[Tensor], matmul: Blas):
        self.stacks = stacks
        self.matmul = OneClient() if type(matmul) is Blas and len(stacks[0]) == 1 else matmul
        self.slots, self.dtype = len(stacks[0]), stacks[0].dtype
        self._layers: dict[tuple[int, int | None], Layer] = {}
        self.own = [list(stack.unbind()) for stack in stacks]

    def layer(self, weight: int, bias: int | None) -> Layer:
        """Return a linear layer of R clients."""
        key = weight, bias
        if key not in self._layers:
            matrix, row = self.stacks[weight], None if bias is None else self.stacks[bias]
            self._layers[key] = Layer(matrix, matrix.transpose(1, 2), row, None if row is None else row.unsqueeze(1))
        return self._layers[key]


class Sink(Protocol):
    """Takes the gradients of parameters, each as soon as nothing else needs the parameter."""

    def product(self, weight: int, outgoing: Tensor, incoming: Tensor) -> None:
        """Take Dᵀ h, (R, outputs, inputs), of D (R, M, outputs) and h (R, M, inputs)."""
        ...

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take a gradient (R, …)."""
        ...

    def end(self) -> None:
        """Finish the step: all gradients are here."""
        ...


class IntoGradients:
    """Writes gradients into stacks; 0 where there is none."""

    def __init__(self, out: Sequence[Tensor], matmul: Blas):
        self._out, self._matmul, self._is_set = out, matmul, [False] * len(out)

    def product(self, weight: int, outgoing: Tensor, incoming: Tensor) -> None:
        """Take a product; see `Sink`."""
        if self._is_set[weight]:
            self._out[weight].baddbmm_(outgoing.transpose(1, 2), incoming)
        else:
            self._matmul.gradient(outgoing, incoming, self._out[weight])
        self._is_set[weight] = True

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take a gradient; see `Sink`."""
        if self._is_set[parameter]:
            self._out[parameter].add_(gradient)
        else:
            self._out[parameter].copy_(gradient)
        self._is_set[parameter] = True

    def end(self) -> None:
        """Set what has no gradient to 0."""
        for out, is_set in zip(self._out, self._is_set, strict=True):
            if not is_set:
                out.zero_()


class Descending:
    """Steps the parameters themselves: y ← keep·y − lr·gradient, in the product where there is one.

    Parameters that several operators use wait for the last gradient.
    """

    def __init__(self, parameters: Parameters, shared: frozenset[int], keep: float, lr: float):
        self._parameters, self._shared, self._keep, self._lr = parameters, shared, keep, lr
        self._waiting: dict[int, Tensor] = {}
        self._is_done = [False] * len(parameters.stacks)

    def product(self, weight: int, outgoing: Tensor, incoming: Tensor) -> None:
        """Take a product; see `Sink`."""
        if weight in self._shared:
            self.add(weight, torch.bmm(outgoing.transpose(1, 2), incoming))
            return
        self._is_done[weight] = True
        layer = self._parameters.layer(weight, None)
        self._parameters.matmul.descend(layer, outgoing, incoming, self._keep, -self._lr)

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take a gradient; see `Sink`."""
        if parameter not in self._shared:
            self._step(parameter, gradient)
        elif parameter in self._waiting:
            self._waiting[parameter] = self._waiting[parameter] + gradient
        else:
            self._waiting[parameter] = gradient

    def end(self) -> None:
        """Step what has waited, and decay what has no gradient."""
        for parameter, gradient in self._waiting.items():
            self._step(parameter, gradient)
        if self._keep != 1:
            for stack, is_done in zip(self._parameters.stacks, self._is_done, strict=True):
                if not is_done:
                    stack.mul_(self._keep)

    def _step(self, parameter: int, gradient: Tensor) -> None:
        self._is_done[parameter] = True
        stack = self._parameters.stacks[parameter]
        if self._keep != 1:
            stack.mul_(self._keep)
        stack.add_(gradient, alpha=-self._lr)


class Pass:
    """One pass over the operators.

    Attributes:
        parameters: of all slots.
        values, grads, saved: of each value, its tensor, its gradient so far, and what its operator keeps.
        samples: R·B.
        masks: of each dropout, in their order, (R·B, …), 0 or 1/(1−p).
        sink: where parameters' gradients go.
    """

    __slots__ = ("grads", "masks", "parameters", "samples", "saved", "sink", "values")

    def __init__(self, parameters: Parameters, count: int, x: Tensor, masks: Sequence[Tensor] = ()):
        self.parameters, self.samples, self.masks = parameters, len(x), masks
        self.values: list[Tensor | None] = [None] * count
        self.grads: list[Tensor | None] = [None] * count
        self.saved: list[object] = [None] * count
        self.values[0] = x

    def value(self, number: int) -> Tensor:
        """Return a value, which an earlier operator has set."""
        found = self.values[number]
        assert found is not None
        return found

    def give(self, number: int, gradient: Tensor) -> None:
        """Add to a value's gradient."""
        before = self.grads[number]
        self.grads[number] = gradient if before is None else before + gradient


class Operator:
    """One function of a program.

    Attributes:
        inputs, outputs: numbers of values.
        parameters: those that it trains, by their places among all.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]

    def forward(self, run: Pass) -> None:
        """Set the outputs."""
        raise NotImplementedError

    def backward(self, run: Pass, sink: Sink) -> None:
        """Give the inputs, and the parameters, their gradients."""
        raise NotImplementedError
