"""FedAdam: FedAvg's clients, Adam at the server.

    client i:   as FedAvg
    server:     m ← β₁ m + (1 − β₁) Δ̄;      v ← β₂ v + (1 − β₂) Δ̄²;      w ← w − η_g m / (√v + τ)

    η_g   ``server_lr``        β₁   ``beta1``        β₂   ``beta2``        τ   ``tau``

Authors' variants: ``v0``, ``second``, ``root`` and ``debias`` of `hpcfed.algorithms._adaptive`; FedExP's code uses
``v0: zero``, ``second: m``, ``root: padded`` and ``debias: constant``.

Reduced: d (Δ). State: m and v at the server (d,).

Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hpcfed.algorithms._adaptive import Decaying
from hpcfed.algorithms.fedavg import Plain

if TYPE_CHECKING:
    from torch import Tensor


class AdamServer(Decaying):
    """v ← β₂ v + (1 − β₂) Δ̄²."""

    choice: ClassVar[str | None] = "adam"

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


LOCAL, SERVER = Plain, AdamServer
TITLE, REFERENCES = "FedAdam", ("reddi2021adaptive",)
EXAMPLE = {"server_lr": 0.02, "second": "m", "debias": "constant"}
