"""Linear maps: linear and logistic regression, and the quadratic of FedExP's two-dimensional toy problem."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from hpcfed.models import Spec

if TYPE_CHECKING:
    from torch import nn


class Linear(Spec):
    """x ↦ W x + b, with W (outputs, features) and b (outputs,); parameters named ``weight`` and ``bias``.

    With a squared loss this is linear regression, with cross-entropy (multinomial) logistic regression.
    """

    bias: bool = True

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a `torch.nn.Linear` that flattens its input."""
        from hpcfed.models.modules import FlatLinear

        return FlatLinear(prod(features), outputs, bias=self.bias)


class Quadratic(Spec):
    """w ↦ aᵀw for a sample a: with the squared loss client i's objective is the quadratic ½‖A_i w − b_i‖².

    FedExP's toy problem, its eq. (12), is twice that: F_1 = (3w_1 + w_2 − 3)², F_2 = (w_1 + w_2 − 3)².
    One parameter, ``weight`` (outputs, features).
    """

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a `torch.nn.Linear` without bias."""
        return Linear(bias=False).build(features, outputs)


MODELS = {"linear": Linear, "logistic": Linear, "quadratic": Quadratic}
