"""Linear models and their losses in portable arithmetic (`hpcfed.arithmetic`): the same bits on every machine.

Losses are computed in float64, with classes or outputs as the first axis, so that their sums are of whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.elementary import exp, log, log1p
from hpcfed.arithmetic.sums import contracted, sum_over_first
from hpcfed.models.losses import Loss
from hpcfed.models.modules import FlatLinear

LossAndSlope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""z (C, …) float64 and target (…) or (C, …) → the loss of each sample, (…), and its derivative by z, (C, …)."""


def cross_entropy(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ_c exp(z_c − max z) − (z_target − max z) of classes, (…), and softmax(z) − one-hot."""
    shifted = z - z.amax(0)
    powers = exp(shifted)
    total = sum_over_first(powers.clone())
    place = target.unsqueeze(0)
    slope = powers / total
    own = slope.gather(0, place) - 1
    return log(total) - shifted.gather(0, place)[0], slope.scatter_(0, place, own)


def binary_cross_entropy(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c max(z, 0) − z y + log(1 + exp(−|z|)) of labels y, (C, …), and sigmoid(z) − y."""
    power = exp(-z.abs())
    each = (z.clamp(min=0) - z * target) + log1p(power)
    return sum_over_first(each), torch.where(z >= 0, 1.0, power) / (power + 1) - target


def squared(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """½ Σ_c (z − y)² of numbers y, (C, …), and z − y."""
    slope = z - target
    return sum_over_first(slope * slope) * 0.5, slope


LOSSES: dict[str, LossAndSlope] = {
    "cross-entropy": cross_entropy,
    "binary-cross-entropy": binary_cross_entropy,
    "squared": squared,
}
"""By the recipe's ``loss.name``."""


@dataclass(frozen=True)
class PortableLoss(Loss):
    """A loss with its slope in portable arithmetic.

    `batch`, of autograd, is the library's: replays look at gradients with it; nothing is trained by it.
    """

    name: str = ""

    def with_slope(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return each sample's loss, (…), and its derivative, (C, …), in float64; see `LossAndSlope`.

        Args:
            z: outputs, (C, …).
            target: classes (…), or numbers (…, C).
        """
        wanted = target if self.name == "cross-entropy" else target.reshape(*z.shape[1:], -1).movedim(-1, 0).double()
        return LOSSES[self.name](z.double(), wanted)

    def summed(self, output: Tensor, target: Tensor) -> tuple[float, float]:
        """Return the loss as a metric; see `Loss`."""
        return float(sum_over_first(self.each(output, target).clone())), len(target)


def portable_loss(name: str, loss: Loss) -> PortableLoss:
    """Return a built-in loss in portable arithmetic."""

    def each(output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled() and output.requires_grad:
            return loss.each(output, target)
        return found.with_slope(output.t(), target)[0]

    fused = loss.fused
    found = PortableLoss(each, loss.reduction, fused, loss.inverse_link, loss.encode, name=name)
    return found


class PortableLinear(FlatLinear):
    """x ↦ W x + b by products and sums in a stated order; where autograd looks on, the library's."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(input)
        x = input.flatten(1).t().contiguous().unsqueeze(1)
        z = contracted(self.weight.t().unsqueeze(2), x, in_pieces=not torch.jit.is_tracing())[:, 0]
        return (z if self.bias is None else z + self.bias.unsqueeze(1)).t().contiguous()


def portable_linear(features: int, outputs: int, *, bias: bool, seed: int) -> PortableLinear:
    """Return a linear layer with the initial values of `torch.nn.Linear` from torch's generator at this seed.

    torch multiplies and adds in one operation where the processor can, so its own last bits depend on the machine.
    """
    module = PortableLinear(features, outputs, bias=bias)
    torch.default_generator.manual_seed(seed)
    with torch.no_grad():
        root = math.sqrt(features)
        _draw(module.weight, math.sqrt(3.0) * (math.sqrt(2.0 / (1 + math.sqrt(5) ** 2)) / root))
        if module.bias is not None:
            _draw(module.bias, 1 / root)
    return module


def _draw(parameter: Tensor, bound: float) -> None:
    """Draw numbers between −bound and bound, as ``uniform_`` does in float32, rounding after each operation."""
    low, width = np.float32(-bound), np.float32(bound) - np.float32(-bound)
    parameter.random_(0, 1 << 24).mul_(2.0**-24).mul_(float(width)).add_(float(low))
