"""Losses and gradients of many clients at once, each with its own parameters and minibatch.

Clients are stacked along a first axis: R of them have each parameter as one tensor (R, …), and a minibatch (R, B, …).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from hpcfed.client.batched.matmul import Blas, Layer
from hpcfed.client.batched.tiles import rounded
from hpcfed.client.shorts import Short
from hpcfed.models.losses import Loss, softmax
from hpcfed.models.modules import FlatLinear, FlatSequential

LINEAR = (FlatLinear, nn.Linear)
SMALL_SUM = 400
"""Entries of D below which its sum over samples is taken as a product with ones, one operation in place of three.

Torch computes such a product itself; a larger one is for BLAS, where a client's bits would depend on its group.
"""
Stack = Sequence[Tensor]
"""Each parameter of R clients, (R, …), in the module's order."""


class StackedNetwork(Protocol):
    """A model and its loss, for stacked clients.

    Attributes:
        takes_short: whether fillers of a minibatch can be selected away, since its loss is a sum over samples.
        fixed_slots: whether a client's bits may depend on its slot, which then follows from its place in the cohort.
    """

    takes_short: bool
    fixed_slots: bool

    def rooms(self, shapes: Sequence[torch.Size], step: int) -> list[torch.Size]:
        """Return the shapes that parameters of these shapes have in a tile, whose widths are multiples of `step`."""
        ...

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack, short: Short | None = None) -> Tensor:
        """Write each client's gradients of its minibatch's loss into `out`; return the losses, (R,).

        `parameters` and `out` have the shapes that `rooms` returned, and are 0 outside of the parameters.
        """
        ...


class Perceptron:
    """Linear layers with ReLU between them, their gradients written out:

        h_0 = x,   h_l = relu(h_{l−1} W_lᵀ + b_l),   z = h_{L−1} W_Lᵀ + b_L
        D_L = ∂f/∂z,   D_{l−1} = D_l W_l where h_{l−1} > 0,   ∂f/∂W_l = D_lᵀ h_{l−1},   ∂f/∂b_l = Σ D_l over samples

    so that a step of plain SGD is the products themselves, added where the parameters lie (fastest where a stack's
    memory has no gaps).

    Widths may be rounded up by zeros, which stay zeros; outputs are the first C columns of z.

    Args:
        places: of each layer's weight and bias among the parameters, None without bias; the first layer first.
        outputs: C.
        loss: one with a canonical link, `inverse_link` and `encode`.
        matmul: what computes the products.
    """

    takes_short, fixed_slots = True, False
    account = "read as a perceptron"

    def __init__(self, places: Sequence[tuple[int, int | None]], outputs: int, loss: Loss, matmul: Blas):
        if loss.inverse_link is None or loss.encode is None:
            raise ValueError("a loss without a canonical link")
        self._places, self._outputs, self._matmul = tuple(places), outputs, matmul
        self._loss, self._inverse_link, self._encode = loss, loss.inverse_link, loss.encode
        self._couples_outputs, self._averages = loss.inverse_link is softmax, loss.reduction == "mean"
        self._hidden: dict[int, Tensor] = {}
        self._ones: dict[tuple[int, int], Tensor] = {}

    def rooms(self, shapes: Sequence[torch.Size], step: int) -> list[torch.Size]:
        """Return the shapes with each width rounded up; see `StackedNetwork`."""
        return [torch.Size(rounded(width, step) for width in shape) for shape in shapes]

    def layers(self, stack: Stack) -> list[Layer]:
        """Return the layers that parameters make up."""
        layers = []
        for of_weight, of_bias in self._places:
            weight, bias = stack[of_weight], None if of_bias is None else stack[of_bias]
            layers.append(Layer(weight, weight.transpose(1, 2), bias, None if bias is None else bias.unsqueeze(1)))
        return layers

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack, short: Short | None = None) -> Tensor:
        """Write the gradients; see `StackedNetwork`."""
        layers = self.layers(parameters)
        inputs, z = self._forward(layers, x.flatten(2))
        slope = self._slope(z, self.encoded(y, layers), short, self.weights(y)).mul_(self.share(x.shape[1]))
        for slot, incoming, outgoing in self._backward(layers, self.layers(out), inputs, slope):
            self._matmul.gradient(outgoing, incoming, slot.weight)
            if slot.bias is not None:
                torch.sum(outgoing, 1, out=slot.bias)
        return self.losses(z, y, short)

    def clipped(self, layers: Sequence[Layer], x: Tensor, y: Tensor, clip: float, slots: Sequence[Layer]) -> Tensor:
        """Write the sum of samples' gradients, of norms of at most `clip` each, to `slots`; return their losses, (B,).

        Nothing as large as a sample's gradient is formed, since ‖D_s h_sᵀ‖ = ‖D_s‖ ‖h_s‖.

        Args:
            layers, slots: of one client, what `layers` returned for parameters, and for where the sums go.
            x, y: a minibatch, (1, B, …) each.
            clip: C.

        Reference: Goodfellow, "Efficient per-example gradient computations", 2015.
        """
        inputs, z = self._forward(layers, x.flatten(2))
        slope = self._slope(z, self.encoded(y, layers), None, self.weights(y))
        found = list(self._backward(layers, slots, inputs, slope))
        squares = torch.zeros(z.shape[:2], dtype=torch.float64, device=z.device)
        for slot, incoming, outgoing in found:
            of_input = incoming.double().square().sum(2) + (slot.bias is not None)
            squares += outgoing.double().square().sum(2) * of_input
        factors = (clip / squares.sqrt()).clamp(max=1.0).to(z).unsqueeze(2)
        for slot, incoming, outgoing in found:
            shortened = outgoing * factors
            self._matmul.gradient(shortened, incoming, slot.weight)
            if slot.bias is not None:
                torch.sum(shortened, 1, out=slot.bias)
        return self._loss.each(self._used(z).flatten(0, 1), y.flatten(0, 1))

    def descend(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        encoded: Tensor,
        keep: float,
        lr: float,
        scale: float = 1.0,
        short: Short | None = None,
        weights: Tensor | None = None,
        *,
        hidden: bool = False,
    ) -> Tensor:
        """Set V to keep·V − lr·gradients, where the parameters are scale·V.

        Args:
            layers: what `layers` returned for V.
            x: (R, B, inputs).
            encoded: (R, B, C), what `encoded` returned.
            keep, lr, scale: the factors.
            short: which rows are samples, where not all are.
            weights: of the samples, what `weights` returned.
            hidden: what `hide` returned.

        Returns:
            z before the step, (R, B, outputs), from which `losses` computes the losses.
        """
        inputs, z = self._forward(layers, x, scale)
        slope = self._slope(z, encoded, short, weights, hidden=hidden)
        step, alone = -lr * self.share(x.shape[1]), x.shape[0] == 1
        for layer, incoming, outgoing in self._backward(layers, layers, inputs, slope):
            self._matmul.descend(layer, outgoing, incoming, keep, step)
            if layer.row is not None and alone and outgoing.shape[1] * outgoing.shape[2] < SMALL_SUM:
                layer.row.baddbmm_(self._ones_for(outgoing), outgoing, beta=keep, alpha=step)
            elif layer.bias is not None:
                if keep != 1:
                    layer.bias.mul_(keep)
                layer.bias.add_(outgoing.sum(1), alpha=step)
            step *= scale  # D of the layers below is taken through V, not scale·V
        return z

    def hide(self, layers: Sequence[Layer]) -> bool:
        """Set the bias of what is no output to −∞, which softmax makes 0; return whether there is such a bias.

        It stays there: its gradient is 0, and any factor of it positive.
        """
        bias = layers[-1].bias
        if bias is None or not self._couples_outputs or bias.shape[1] == self._outputs:
            return False
        bias[:, self._outputs :] = -torch.inf
        return True

    def changes(
        self, layers: Sequence[Layer], x: Tensor, y: Tensor, step: Tensor, short: Short | None = None
    ) -> tuple[Tensor, list[tuple[Layer, Tensor, Tensor]]]:
        """Return z, (R, B, outputs), and what `apply` adds to the parameters: `step` · gradients.

        Args:
            layers: what `layers` returned.
            x, y: minibatches, (R, B, inputs) and (R, B, …).
            step: a factor, a scalar on the device.
            short: which rows are samples, where not all are.
        """
        inputs, z = self._forward(layers, x)
        slope = self._slope(z, self.encoded(y, layers), short, self.weights(y)).mul_(step)
        return z, list(self._backward(layers, layers, inputs, slope))

    def apply(self, changes: Sequence[tuple[Layer, Tensor, Tensor]]) -> None:
        """Add to each layer of `changes` the products of its D and h."""
        for layer, incoming, outgoing in changes:
            self._matmul.descend(layer, outgoing, incoming, 1.0, 1.0)
            if layer.bias is not None:
                layer.bias.add_(outgoing.sum(1))

    def encoded(self, y: Tensor, layers: Sequence[Layer]) -> Tensor:
        """Return targets (R, B, …) as the numbers that they stand for, (R, B, C): classes one-hot, (R, B, outputs)."""
        last = layers[-1].weight
        like = last.new_empty(0, last.shape[1] if self._couples_outputs else self._outputs)
        return self._encode(y.flatten(0, 1), like).view(*y.shape[:2], -1)

    def weights(self, y: Tensor) -> Tensor | None:
        """Return the weights of samples with targets (R, B, …), (R, B, 1); None where a sample has none."""
        of_samples = self._loss.weight_of
        return None if of_samples is None else of_samples(y.flatten(0, 1)).view(*y.shape[:2], 1)

    def losses(self, z: Tensor, y: Tensor, short: Short | None = None) -> Tensor:
        """Return the loss of each minibatch, (R,), from z (R, B, outputs) and targets (R, B, …)."""
        return self.losses_of_steps(z.unsqueeze(1), y.unsqueeze(1), [short]).squeeze(1)

    def losses_of_steps(self, z: Tensor, y: Tensor, short: Sequence[Short | None]) -> Tensor:
        """Return the losses of S steps at once, (R, S), from z (R, S, B, outputs) and targets (R, S, B, …)."""
        each = self._loss.each(self._used(z).flatten(0, 2), y.flatten(0, 2)).view(z.shape[:3])
        for step, of_step in enumerate(short):
            if of_step is not None:
                of_step.selected(each[:, step])
        return each.sum(2).mul_(self.share(z.shape[2]))

    def _used(self, z: Tensor) -> Tensor:
        """Return the columns of z that are outputs, (R, B, C)."""
        return z if z.shape[-1] == self._outputs else z[..., : self._outputs]

    def _slope(
        self, z: Tensor, encoded: Tensor, short: Short | None, weights: Tensor | None, *, hidden: bool = False
    ) -> Tensor:
        """Return ∂f/∂z but for the share of a sample, (R, B, outputs), 0 in columns that are no outputs."""
        if hidden or z.shape[2] == self._outputs:
            slope = self._inverse_link(z).sub_(encoded)
        elif self._couples_outputs:  # rows of whole registers take a fifth of the time
            slope = self._inverse_link(z + self._minus_infinity(z)).sub_(encoded)
        else:
            slope = torch.zeros_like(z)
            torch.sub(self._used(self._inverse_link(z)), encoded, out=self._used(slope))
        if weights is not None:
            slope.mul_(weights)
        return slope if short is None else short.selected(slope)

    def _minus_infinity(self, z: Tensor) -> Tensor:
        """Return −∞ for the columns of z that are no outputs, and 0 for the others, (outputs,)."""
        width = z.shape[2]
        if width not in self._hidden:
            self._hidden[width] = z.new_full((width,), -torch.inf)
            self._hidden[width][: self._outputs] = 0
        return self._hidden[width]

    def _ones_for(self, outgoing: Tensor) -> Tensor:
        """Return ones (R, 1, B), for D (R, B, outputs)."""
        rows, batch, _ = outgoing.shape
        if (rows, batch) not in self._ones:
            self._ones[rows, batch] = outgoing.new_ones(rows, 1, batch)
        return self._ones[rows, batch]

    def share(self, batch: int) -> float:
        """Return what a sample's loss counts for in its minibatch's."""
        return 1 / batch if self._averages else 1.0

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
    """Any module, by `torch.func.vmap`.

    Its kernels see where a slot begins, so that slots are fixed. Fillers of a minibatch need a module whose outputs are
    each of one sample (`mixes_samples`).
    """

    fixed_slots = True

    def __init__(self, module: nn.Module, loss: Loss, *, mixes: bool = False):
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.takes_short = not (loss.is_own or loss.whole or mixes)

        def outputs(parameters: tuple[Tensor, ...], x: Tensor) -> Tensor:
            return functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

        def of_one(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
            return loss.batch(outputs(parameters, x), y)

        def of_short(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor, fillers: Tensor, factor: Tensor) -> Tensor:
            each = loss.each(outputs(parameters, x), y)
            return each.masked_fill(fillers, 0).sum() * (factor / len(y) if loss.reduction == "mean" else factor)

        self._of_many, self._of_short = (vmap(grad_and_value(function)) for function in (of_one, of_short))
        self._averages = loss.reduction == "mean"
        self._whole: dict[tuple[int, int], Short] = {}

    def rooms(self, shapes: Sequence[torch.Size], step: int) -> list[torch.Size]:
        """Return the parameters' own shapes: a module knows no others."""
        return list(shapes)

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack, short: Short | None = None) -> Tensor:
        """Write the gradients; see `StackedNetwork`."""
        if not self.takes_short:
            found, losses = self._of_many(tuple(parameters), x, y)
        else:  # by the same operations where a neighbour's minibatch is short and where none is
            short = short or self._not_short(x, parameters[0])
            found, losses = self._of_short(tuple(parameters), x, y, short.fillers, short.factors)
        for gradient, slot in zip(found, out, strict=True):
            slot.copy_(gradient)
        return losses

    def _not_short(self, x: Tensor, like: Tensor) -> Short:
        """Return `Short` of minibatches (R, B, …) without fillers, for numbers like those."""
        rows, batch = x.shape[:2]
        if (rows, batch) not in self._whole:
            self._whole[rows, batch] = Short(np.full(rows, batch), batch, self._averages, like)
        return self._whole[rows, batch]


def mixes_samples(module: nn.Module, x: Tensor) -> bool:
    """Whether a sample's output depends on the others of its minibatch, as with BatchNorm; tried on two samples.

    Args:
        module: in training.
        x: one sample, (1, …), for its shape and dtype.
    """
    first, second = x.clone(), x.clone()
    if x.is_floating_point():
        draws = torch.Generator().manual_seed(0)
        first, second = (torch.randn(x.shape, generator=draws, dtype=x.dtype).to(x.device) for _ in range(2))
    with torch.no_grad():
        try:
            together, apart = module(torch.cat([first, second])), torch.cat([module(first), module(second)])
        except (RuntimeError, ValueError):  # of one sample, which BatchNorm refuses
            return True
    return not torch.allclose(together, apart, rtol=1e-2, atol=1e-4)


def linear_layers(module: nn.Module) -> list[nn.Linear] | None:
    """Return the linear layers of a module that has no others, and ReLU between them; None for any other module."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return None
    parts: list[nn.Module] = []
    if type(module) in LINEAR:
        parts = [module]
    elif type(module) in (FlatSequential, nn.Sequential):
        parts = [part for part in module.children() if not _flattens(part)]
    linear = [part for part in parts[::2] if isinstance(part, nn.Linear) and type(part) in LINEAR]
    between = parts[1::2]
    if len(linear) != len(parts[::2]) or len(linear) != len(between) + 1:
        return None
    return linear if all(type(part) is nn.ReLU for part in between) else None


def _flattens(part: nn.Module) -> bool:
    return type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
