"""Losses and gradients of many clients at once: each with parameters, and a minibatch, of its own.

Clients are stacked along a first axis: R of them have each parameter as one tensor (R, …), and a minibatch (R, B, …).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from hpcfed.losses import Loss
from hpcfed.models.modules import FlatLinear, FlatSequential

LINEAR = (FlatLinear, nn.Linear)
Stack = Sequence[Tensor]
"""Each parameter of R clients, (R, …), in the module's order."""


class Network(Protocol):
    """A model and its loss, for stacked clients."""

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack) -> Tensor:
        """Write each client's gradients of its minibatch's loss into `out`; return the losses, (R,)."""
        ...


class Perceptron:
    """Linear layers with ReLU between them, their gradients written out:

        h_0 = x,   h_l = relu(h_{l−1} W_lᵀ + b_l),   z = h_{L−1} W_Lᵀ + b_L
        D_L = ∂f/∂z,   D_{l−1} = D_l W_l where h_{l−1} > 0,   ∂f/∂W_l = D_lᵀ h_{l−1},   ∂f/∂b_l = Σ D_l over samples

    so that a step of plain SGD is the products themselves, added where the parameters lie (fastest where a stack's
    memory has no gaps).

    Args:
        has_bias: of each layer, the first one first.
        loss: one that knows its ``slope``.
    """

    def __init__(self, has_bias: Sequence[bool], loss: Loss):
        if loss.slope is None:
            raise ValueError("a loss without a slope")
        self._has_bias = tuple(has_bias)
        self._loss, self._slope = loss, loss.slope

    @property
    def kind(self) -> Hashable:
        """What tells it from others of the same shapes."""
        return self._has_bias, self._slope, self._loss.reduction

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack) -> Tensor:
        """Write the gradients; see `Network`."""
        layers, slots = self._layers(parameters), self._layers(out)
        inputs, losses, slope = self._forward(layers, x, y)
        for number, incoming, outgoing in self._backward(layers, inputs, slope):
            weight, bias = slots[number]
            weight.copy_(torch.bmm(outgoing.transpose(1, 2), incoming))
            if bias is not None:
                bias.copy_(outgoing.sum(1))
        return losses

    def descend(self, parameters: Stack, x: Tensor, y: Tensor, keep: float, lr: float) -> Tensor:
        """Set the parameters to keep·parameters − lr·gradients; return the losses, (R,)."""
        layers = self._layers(parameters)
        inputs, losses, slope = self._forward(layers, x, y)
        for number, incoming, outgoing in self._backward(layers, inputs, slope):
            weight, bias = layers[number]
            weight.baddbmm_(outgoing.transpose(1, 2), incoming, beta=keep, alpha=-lr)
            if bias is not None:
                bias.mul_(keep).sub_(outgoing.sum(1), alpha=lr)
        return losses

    def _layers(self, stack: Stack) -> list[tuple[Tensor, Tensor | None]]:
        """Return each layer's weight (R, outputs, inputs) and bias (R, outputs)."""
        left = iter(stack)
        return [(next(left), next(left) if has_bias else None) for has_bias in self._has_bias]

    def _forward(
        self, layers: list[tuple[Tensor, Tensor | None]], x: Tensor, y: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the input of each layer, (R, B, …), the losses, (R,), and ∂f/∂z, (R, B, C)."""
        inputs, z = [], x.flatten(2)
        for number, (weight, bias) in enumerate(layers):
            if number:
                z = z.relu_()
            inputs.append(z)
            across = weight.transpose(1, 2)
            z = torch.bmm(z, across) if bias is None else torch.baddbmm(bias.unsqueeze(1), z, across)
        samples, targets = z.flatten(0, 1), y.flatten(0, 1)
        share = 1 / z.shape[1] if self._loss.reduction == "mean" else 1.0
        losses = self._loss.each(samples, targets).view(z.shape[:2]).sum(1).mul_(share)
        return inputs, losses, self._slope(samples, targets).reshape(z.shape).mul_(share)

    @staticmethod
    def _backward(
        layers: list[tuple[Tensor, Tensor | None]], inputs: list[Tensor], slope: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each layer's number, its input h and its D, the last layer first; then its parameters may change."""
        outgoing = slope
        for number in range(len(layers) - 1, -1, -1):
            incoming, current = inputs[number], outgoing
            if number:
                outgoing = torch.ops.aten.threshold_backward(torch.bmm(current, layers[number][0]), incoming, 0)
            yield number, incoming, current


class Vectorized:
    """Any module, by `torch.func.vmap`."""

    def __init__(self, module: nn.Module, loss: Loss):
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

        def of_one(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
            return loss.batch(functional_call(module, dict(zip(names, parameters, strict=True)), (x,)), y)

        self._of_many = vmap(grad_and_value(of_one))

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack) -> Tensor:
        """Write the gradients; see `Network`."""
        found, losses = self._of_many(tuple(parameters), x, y)
        for gradient, slot in zip(found, out, strict=True):
            slot.copy_(gradient)
        return losses


def perceptron_of(module: nn.Module, loss: Loss) -> Perceptron | None:
    """Return a module's `Perceptron`, where it is one and nothing else hangs on it; else None."""
    if loss.slope is None or any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return None
    parts: list[nn.Module] = []
    if type(module) in LINEAR:
        parts = [module]
    elif type(module) in (FlatSequential, nn.Sequential):
        parts = [part for part in module.children() if not _flattens(part)]
    linear, between = parts[::2], parts[1::2]
    if len(linear) != len(between) + 1 or any(type(part) is not nn.ReLU for part in between):
        return None
    if any(type(part) not in LINEAR for part in linear):
        return None
    parameters = list(module.parameters())
    if len(parameters) != sum(1 + (part.bias is not None) for part in linear):  # shared between layers
        return None
    if not all(parameter.requires_grad for parameter in parameters):
        return None
    return Perceptron([part.bias is not None for part in linear], loss)


def _flattens(part: nn.Module) -> bool:
    return type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
