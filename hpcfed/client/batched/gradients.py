"""Losses and gradients of many clients at once: each with parameters, and a minibatch, of its own.

Clients are stacked along a first axis: R of them have each parameter as one tensor (R, …), and a minibatch (R, B, …).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from hpcfed.client.batched.matmul import Blas, Layer
from hpcfed.models.losses import Loss
from hpcfed.models.modules import FlatLinear, FlatSequential

LINEAR = (FlatLinear, nn.Linear)
SMALL_SUM = 400
"""Entries of D below which its sum over samples is taken as a product with ones, one operation in place of three.

Torch computes such a product itself; a larger one is for BLAS, where a client's bits would depend on its group.
"""
Stack = Sequence[Tensor]
"""Each parameter of R clients, (R, …), in the module's order."""


class StackedNetwork(Protocol):
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
        loss: one with a canonical link, `inverse_link` and `encode`.
        matmul: what computes the products.
    """

    def __init__(self, has_bias: Sequence[bool], loss: Loss, matmul: Blas):
        if loss.inverse_link is None or loss.encode is None:
            raise ValueError("a loss without a canonical link")
        self._has_bias, self._matmul = tuple(has_bias), matmul
        self._loss, self._inverse_link, self._encode = loss, loss.inverse_link, loss.encode
        self._ones: dict[tuple[int, int], Tensor] = {}

    @property
    def kind(self) -> Hashable:
        """Hash key: distinguishes networks of equal shapes."""
        return self._has_bias, self._inverse_link, self._encode, self._loss.reduction, type(self._matmul)

    def layers(self, stack: Stack) -> list[Layer]:
        """Return the layers that parameters make up."""
        left, layers = iter(stack), []
        for has_bias in self._has_bias:
            weight, bias = next(left), next(left) if has_bias else None
            layers.append(Layer(weight, weight.transpose(1, 2), bias, None if bias is None else bias.unsqueeze(1)))
        return layers

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack) -> Tensor:
        """Write the gradients; see `StackedNetwork`."""
        layers = self.layers(parameters)
        inputs, z = self._forward(layers, x.flatten(2))
        slope = self._inverse_link(z).sub_(self.encoded(y, layers)).mul_(self._share(x.shape[1]))
        for slot, incoming, outgoing in self._backward(layers, self.layers(out), inputs, slope):
            self._matmul.gradient(outgoing, incoming, slot.weight)
            if slot.bias is not None:
                torch.sum(outgoing, 1, out=slot.bias)
        return self.losses(z, y)

    def descend(
        self, layers: Sequence[Layer], x: Tensor, encoded: Tensor, keep: float, lr: float, scale: float = 1.0
    ) -> Tensor:
        """Set V to keep·V − lr·gradients, where the parameters are scale·V.

        Args:
            layers: what `layers` returned for V.
            x: (R, B, inputs).
            encoded: (R, B, C), what `encoded` returned.
            keep, lr, scale: the factors.

        Returns:
            z before the step, (R, B, C), from which `losses` tells the losses.
        """
        inputs, z = self._forward(layers, x, scale)
        slope, step = self._inverse_link(z).sub_(encoded), -lr * self._share(x.shape[1])
        for layer, incoming, outgoing in self._backward(layers, layers, inputs, slope):
            self._matmul.descend(layer, outgoing, incoming, keep, step)
            if layer.row is not None and outgoing.shape[1] * outgoing.shape[2] < SMALL_SUM:
                layer.row.baddbmm_(self._ones_for(outgoing), outgoing, beta=keep, alpha=step)
            elif layer.bias is not None:
                if keep != 1:
                    layer.bias.mul_(keep)
                layer.bias.add_(outgoing.sum(1), alpha=step)
            step *= scale  # D of the layers below is taken through V, not scale·V
        return z

    def encoded(self, y: Tensor, layers: Sequence[Layer]) -> Tensor:
        """Return targets (R, B, …) as the numbers that they stand for, (R, B, C): classes one-hot."""
        return self._encode(y.flatten(0, 1), layers[-1].across).view(*y.shape[:2], -1)

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each minibatch, (R,), from z (R, B, C) and targets (R, B, …)."""
        each = self._loss.each(z.flatten(0, 1), y.flatten(0, 1))
        return each.view(z.shape[:2]).sum(1).mul_(self._share(z.shape[1]))

    def _ones_for(self, outgoing: Tensor) -> Tensor:
        """Return ones (R, 1, B), for D (R, B, outputs)."""
        rows, batch, _ = outgoing.shape
        if (rows, batch) not in self._ones:
            self._ones[rows, batch] = outgoing.new_ones(rows, 1, batch)
        return self._ones[rows, batch]

    def _share(self, batch: int) -> float:
        """What a sample's loss counts for in its minibatch's."""
        return 1 / batch if self._loss.reduction == "mean" else 1.0

    def _forward(self, layers: Sequence[Layer], x: Tensor, scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
        """Return the input of each layer, (R, B, …), and z, (R, B, C), of parameters scale·layers."""
        inputs, z = [], x
        for number, layer in enumerate(layers):
            if number:
                z = z.relu_()
            inputs.append(z)
            z = self._matmul.outputs(layer, z, scale)
        return inputs, z

    def _backward(
        self, layers: Sequence[Layer], slots: Sequence[Layer], inputs: Sequence[Tensor], slope: Tensor
    ) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """Yield each layer's slot, its input h and its D, the last layer first; then its parameters may change."""
        outgoing = slope
        for number in range(len(layers) - 1, -1, -1):
            incoming, current = inputs[number], outgoing
            if number:
                slope_within = self._matmul.backward(layers[number], current)
                outgoing = torch.ops.aten.threshold_backward(slope_within, incoming, 0)
            yield slots[number], incoming, current


class Vectorized:
    """Any module, by `torch.func.vmap`."""

    def __init__(self, module: nn.Module, loss: Loss):
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

        def of_one(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
            return loss.batch(functional_call(module, dict(zip(names, parameters, strict=True)), (x,)), y)

        self._of_many = vmap(grad_and_value(of_one))

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack) -> Tensor:
        """Write the gradients; see `StackedNetwork`."""
        found, losses = self._of_many(tuple(parameters), x, y)
        for gradient, slot in zip(found, out, strict=True):
            slot.copy_(gradient)
        return losses


def perceptron_of(module: nn.Module, loss: Loss, matmul: Blas) -> Perceptron | None:
    """Return a module's `Perceptron`; None for other layers, and for one with hooks, frozen or shared parameters."""
    if loss.inverse_link is None or any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
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
    return Perceptron([part.bias is not None for part in linear], loss, matmul)


def _flattens(part: nn.Module) -> bool:
    return type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
