"""The torch modules behind the models' specs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class FlatLinear(nn.Linear):
    """A linear layer on samples of any shape: (B, …) → (B, outputs)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class FlatSequential(nn.Sequential):
    """Layers one after another on samples of any shape: (B, …) → (B, outputs)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


def perceptron_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Return linear layers of the given widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]
