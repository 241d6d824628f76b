"""Losses and gradients of stacked linear models in portable arithmetic (`hpcfed.arithmetic`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfed.arithmetic.sums import contracted, sum_over_first
from hpcfed.client.batched.gradients import Stack
from hpcfed.client.shorts import Short
from hpcfed.models.portable import PortableLoss


class PortableNetwork:
    """A linear model and its loss, for R stacked clients:

        z = W x + b,   D = ∂f/∂z,   ∂f/∂W = Σ D x over samples,   ∂f/∂b = Σ D

    z and D of a minibatch are (C, R, B): classes first, as the loss wants them. A client's bits do not depend on the
    others of its tile, since sums never cross clients.
    """

    takes_short, fixed_slots = True, False

    def __init__(self, loss: PortableLoss):
        self._loss = loss

    def rooms(self, shapes: Sequence[torch.Size], step: int) -> list[torch.Size]:
        """Return the parameters' own shapes: no operation here sees an alignment."""
        return list(shapes)

    def gradients(self, parameters: Stack, x: Tensor, y: Tensor, out: Stack, short: Short | None = None) -> Tensor:
        """Write the gradients; see `hpcfed.client.batched.gradients.StackedNetwork`."""
        weight, *bias = parameters
        x = x.flatten(2)
        z = contracted(weight.permute(2, 1, 0).contiguous(), x.permute(2, 0, 1).contiguous())
        if bias:
            z += bias[0].t().unsqueeze(2)
        share = 1 / x.shape[1] if self._loss.reduction == "mean" else 1.0
        losses, slope = self._loss.with_slope(z, y)
        if short is not None:
            losses, slope = (short.selected(part, part.ndim - 2) for part in (losses, slope))
        slope = slope.mul_(share).to(x.dtype).permute(2, 0, 1).contiguous()
        out[0].copy_(contracted(slope, x.transpose(0, 1).contiguous()).transpose(0, 1))
        if bias:
            out[1].copy_(sum_over_first(slope).t())
        return (sum_over_first(losses.t().contiguous()) * share).to(x.dtype)
