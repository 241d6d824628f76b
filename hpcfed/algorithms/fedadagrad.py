"""FedAdagrad: FedAvg's clients, Adagrad at the server.

    client i:   as FedAvg
    server:     m ← β₁ m + (1 − β₁) Δ̄;      v ← v + Δ̄²;      w ← w − η_g m / (√v + τ)

    η_g   ``server_lr``        β₁   ``beta1``, default 0        τ   ``tau``

Authors' variants: ``v0``, ``second``, ``root`` and, with β₁, ``debias`` of `hpcfed.algorithms._adaptive`; FedExP's
code uses ``v0: zero`` and ``root: padded``.

Reduced: d (Δ). State: m and v at the server (d,).

Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from hpcfed.algorithms._adaptive import Adaptive
from hpcfed.algorithms.fedavg import Plain

if TYPE_CHECKING:
    from torch import Tensor


class Adagrad(Adaptive):
    """v ← v + Δ̄²."""

    choice: ClassVar[str | None] = "adagrad"

    beta1: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _has_a_bias(self) -> Adagrad:
        if self.debias != "none" and self.beta1 == 0:
            raise ValueError("'beta1' above 0 beside 'debias': without it m has no bias, and v has none")
        return self

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


LOCAL, SERVER = Plain, Adagrad
TITLE, REFERENCES = "FedAdagrad", ("reddi2021adaptive",)
EXAMPLE = {"server_lr": 0.05, "v0": "zero", "root": "padded"}
