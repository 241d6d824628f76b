"""Losses and gradients of stacked linear models in portable arithmetic (`hpcfed.arithmetic`)."""

from __future__ import annotations

from torch import Tensor

from hpcfed.arithmetic.sums import contracted, sum_over_first
from hpcfed.client.batched.gradients import Stack
from hpcfed.models.portable import PortableLoss


class PortableNetwork:
    """A linear model and its loss, for R stacked clients:

        z = W x + b,   D = ∂f/∂z,   ∂f/∂W = Σ D x over samples,   ∂f/∂b = Σ D

    z and D of a minibatch are (C, R, B): classes first, as the loss wants them. A client's bits do not depend on the
    others of its group, since sums never cross clients.
    """

    def __init__(self, loss: PortableLoss):
        self._loss = loss

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack) -> Tensor:
        """Write the gradients; see `hpcfed.client.batched.gradients.StackedNetwork`."""
        weight, *bias = parameters
        x = x.flatten(2)
        z = contracted(weight.permute(2, 1, 0).contiguous(), x.permute(2, 0, 1).contiguous())
        if bias:
            z += bias[0].t().unsqueeze(2)
        share = 1 / x.shape[1] if self._loss.reduction == "mean" else 1.0
        losses, slope = self._loss.with_slope(z, y)
        slope = slope.mul_(share).to(x.dtype).permute(2, 0, 1).contiguous()
        out[0].copy_(contracted(slope, x.transpose(0, 1).contiguous()).transpose(0, 1))
        if bias:
            out[1].copy_(sum_over_first(slope).t())
        return (sum_over_first(losses.t().contiguous()) * share).to(x.dtype)
