"""FedProx: FedAvg whose clients are held near the server's model by a quadratic term.

    client i:   y ← w;  τ_i times:  y ← y − η (∇f_i(y; batch) + μ (y − w));   Δ_i = w − y
    server:     w ← w − η_g Δ̄

    μ     ``mu``                   η_g   ``server_lr``

Reduced: d (Δ). State: none. μ = 0 is FedAvg, bit for bit.

Reference: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2 and eq. (2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import RoundContext, State, Tilt

if TYPE_CHECKING:
    from torch import Tensor


class Prox(ClientRule):
    """The client's gradient plus μ (y − w)."""

    choice: ClassVar[str | None] = "prox"

    mu: float = Field(ge=0)

    @property
    def prox_mu(self) -> float:
        return self.mu

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return Tilt(mu=self.mu)


LOCAL, SERVER = Prox, ServerStep
TITLE, REFERENCES = "FedProx", ("li2020federated",)
EXAMPLE = {"mu": 0.1}
