"""The multilayer perceptron of FedDyn's MNIST and EMNIST-L experiments, of any widths."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from pydantic import Field

from hpcfed.models import Spec, Width

if TYPE_CHECKING:
    from torch import nn


class Mlp(Spec):
    """Linear layers with ReLU between them: features → hidden[0] → … → outputs.

    Parameters are named as in a `torch.nn.Sequential` that alternates the two: ``0.weight``, ``0.bias``, ``2.weight``.
    """

    hidden: list[Width] = Field(default_factory=lambda: [200, 100], max_length=1000)

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the perceptron; it flattens its input."""
        from hpcfed.models.modules import FlatSequential, perceptron_layers

        return FlatSequential(*perceptron_layers([prod(features), *self.hidden, outputs]))


MODELS = {"mlp": Mlp}
