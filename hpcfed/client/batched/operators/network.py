"""The `StackedNetwork` of a program's operators."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hpcfed.client.batched.matmul import Blas
from hpcfed.client.batched.operators.base import Descending, IntoGradients, Parameters, Pass, Sink
from hpcfed.client.batched.operators.build import Operators
from hpcfed.client.batched.operators.dropping import Dropping
from hpcfed.client.batched.operators.general import General
from hpcfed.client.shorts import Short
from hpcfed.models.losses import Loss, softmax

Stack = Sequence[Tensor]
MANY_CALLS = 10
"""One operator in so many that calls autograd by itself takes what others gain, where clients are trained alone: with 8
of 46 a two-layer transformer takes 1.11 of a bare loop, by the module itself 0.95."""


class OperatorNetwork:
    """A module by its operators, and its loss, for stacked clients.

    The loss's gradient by the outputs is written out where it has a canonical link, else autograd's of the loss alone.
    Kernels see where a slot begins, so slots are fixed.

    Args:
        operators: the module's.
        loss: the loss.
        mixes: whether a sample's output depends on the others of its minibatch.
        matmul: what computes products.

    Attributes:
        takes_short, fixed_slots: see `hpcfed.client.batched.gradients.StackedNetwork`.
        by_slot: whether several clients can be trained at once.
        work: multiplications of a sample, forwards.
        calls: operators, whose calls a step takes.
        numbers: of a sample's values and of its convolutions' columns, all together.
        masks: of the dropouts.
        gains: whether one client alone gains by its operators, few of which are calls of the module's own.
        memory_format: of images, as the recipe names it.
        keys: numbers, of 32 bits, from which a client's masks of a step follow.
    """

    fixed_slots = True
    account = "read as operators"

    def __init__(self, operators: Operators, loss: Loss, matmul: Blas, *, mixes: bool):
        self._operators, self._loss, self._matmul = operators, loss, matmul
        self.by_slot, self.work, self.masks = operators.by_slot and not mixes, operators.work, operators.masks
        self.calls, self.numbers = len(operators.each), operators.numbers
        own = [one for one in operators.each if isinstance(one, General) and one.takes_gradients]
        self.gains = len(own) * MANY_CALLS < len(operators.each)
        self.memory_format = "auto"
        self._is_dense = operators.output_axes > 2  # a sample has more losses than one
        self.by_slot = self.by_slot and not self._is_dense
        self.takes_short = not (loss.is_own or loss.whole or mixes or self._is_dense)
        self._parameters: Parameters | None = None
        self._dropping = Dropping(operators.masks)
        self.keys = self._dropping.keys

    def rooms(self, shapes: Sequence[torch.Size], step: int) -> list[torch.Size]:
        """Return the parameters' own shapes."""
        return list(shapes)

    def gradients(
        self,
        parameters: Stack,
        x: Tensor,
        y: Tensor,
        out: Stack,
        short: Short | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Write the gradients; see `hpcfed.client.batched.gradients.StackedNetwork`."""
        stacked = self._stacked(parameters)
        return self._step(stacked, x, y, IntoGradients(out, stacked.matmul), short, keys)

    def descend(
        self,
        parameters: Stack,
        x: Tensor,
        y: Tensor,
        keep: float,
        lr: float,
        short: Short | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Set the parameters to keep·y − lr·gradients; return the losses, (R,)."""
        stacked = self._stacked(parameters)
        sink = Descending(stacked, self._operators.shared, keep, lr)
        return self._step(stacked, x, y, sink, short, keys)

    def outputs(self, parameters: Stack, x: Tensor, masks: Sequence[Tensor] = ()) -> tuple[Pass, Tensor]:
        """Return a pass forwards over x (R, B, …), and the outputs, (R·B, …)."""
        run = Pass(self._stacked(parameters), self._operators.count, x.flatten(0, 1), masks)
        for operator in self._operators.each:
            operator.forward(run)
        return run, run.value(self._operators.output)

    def masks_of(self, keys: Tensor, batch: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the dropouts' masks of a step, from keys (R, keys)."""
        return self._dropping.masks(keys, batch, dtype)

    def back(self, run: Pass, slope: Tensor, sink: Sink) -> None:
        """Go back over a pass from the gradient of its outputs."""
        run.give(self._operators.output, slope)
        for operator in reversed(self._operators.each):
            if any(run.grads[number] is not None for number in operator.outputs):
                operator.backward(run, sink)
            for number in operator.outputs:  # is needed no more
                run.grads[number] = run.values[number] = run.saved[number] = None
        sink.end()

    def _stacked(self, parameters: Stack) -> Parameters:
        if self._parameters is None or self._parameters.stacks is not parameters:
            self._parameters = Parameters(parameters, self._matmul)
        return self._parameters

    def _step(
        self, parameters: Parameters, x: Tensor, y: Tensor, sink: Sink, short: Short | None, keys: Tensor | None
    ) -> Tensor:
        slots, batch = x.shape[:2]
        if keys is None and self.keys:
            raise ValueError("a step with dropout needs keys")
        masks = () if keys is None else self._dropping.masks(keys, batch, parameters.dtype)
        run, z = self.outputs(parameters.stacks, x, masks)
        losses, slope = self._loss_and_slope(z, y.flatten(0, 1), slots, batch, short)
        self.back(run, slope, sink)
        return losses

    def _loss_and_slope(
        self, z: Tensor, y: Tensor, slots: int, batch: int, short: Short | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses, (R,), and the gradient of the outputs, z's shape."""
        share = 1 / batch if self._loss.reduction == "mean" else 1.0
        if self._is_canonical(z):
            rows = z.reshape(slots * batch, -1)
            assert self._loss.inverse_link is not None
            assert self._loss.encode is not None
            slope = self._loss.inverse_link(rows).sub_(self._loss.encode(y, rows))
            if self._loss.weight_of is not None:
                slope.mul_(self._loss.weight_of(y).unsqueeze(1))
            slope = slope.view(z.shape)
            each = self._loss.each(z, y)
        else:
            with torch.enable_grad():
                outer = z.detach().requires_grad_()
                inner = outer.clone() if self._loss.is_own else outer  # which a loss of the user's may write to
                total = self._loss.each(inner, y) if self.takes_short else self._loss.batch(inner, y)
                slope = torch.autograd.grad(total.sum(), outer)[0]
            each = total.detach()
            if each.dim() == 0:  # with the share of its samples in it
                return each.view(1), slope
        each = each.view(slots, batch)
        if short is not None:
            short.selected(each)
            short.selected(slope.view(slots, batch, prod(slope.shape[1:])))
        return each.sum(1).mul_(share), slope.mul_(share)

    def _is_canonical(self, z: Tensor) -> bool:
        link = self._loss.inverse_link
        return link is not None and (z.dim() == 2 or (z.dim() == 1 and link is not softmax))
