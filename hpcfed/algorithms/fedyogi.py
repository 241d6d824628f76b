"""FedYogi: FedAvg's clients, Yogi at the server; GeL's adaptive baseline.

    client i:   as FedAvg
    server:     m ← β₁ m + (1 − β₁) Δ̄;      v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²);      w ← w − η_g m / (√v + τ)

    η_g   ``server_lr``        β₁   ``beta1``        β₂   ``beta2``        τ   ``tau``

Authors' variants: ``v0``, ``second``, ``root`` and ``debias`` of `hpcfed.algorithms._adaptive`.

Reduced: d (Δ). State: m and v at the server (d,).

Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hpcfed.algorithms._adaptive import Decaying
from hpcfed.algorithms.fedavg import Plain

if TYPE_CHECKING:
    from torch import Tensor


class YogiServer(Decaying):
    """v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)."""

    choice: ClassVar[str | None] = "yogi"

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()


LOCAL, SERVER = Plain, YogiServer
TITLE, REFERENCES = "FedYogi", ("reddi2021adaptive",)
EXAMPLE = {"server_lr": 0.03}
