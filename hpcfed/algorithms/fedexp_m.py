"""FedExP-M: FedExP with momentum at the server.

    client i:   as FedExP
    server:     m_t = mean ‖Δ_i‖²;      v ← Δ̄ + β v
                η_g = (m_t + Σ_{k<t} (β/2)^(t−k) m_k) / (2 (‖v‖² + ε)),      w ← w − η_g v

    β     ``beta``                 ε     ``eps``; ``eps_scale`` and ``eps_decay`` as in FedExP

The sum needs no history: M_t = m_t + (β/2) M_{t−1}. Unlike FedExP's, this η_g has no lower bound of 1.

Reduced: d (Δ); ‖Δ_i‖² comes with every Δ_i (`Means.mean_delta_sq`). State: v (d,) and M at the server, 0 at first.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, appendix F, eq. (115).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpcfed.algorithms.fedavg import Plain
from hpcfed.algorithms.fedexp import Epsilon
from hpcfed.arithmetic.sums import squared_norm
from hpcfed.types import Means, RoundContext, ServerUpdate, State

if TYPE_CHECKING:
    from torch import Tensor


class ExtrapolatedMomentum(Epsilon):
    """η_g from discounted mean squared norms and the squared norm of the momentum."""

    choice: ClassVar[str | None] = "fedexp-m"

    beta: float = Field(0.9, ge=0, lt=1)

    def begin(self, w: Tensor) -> State:
        return {"v": w.new_zeros(w.shape), "M": w.new_zeros(())}

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        v = means.delta + self.beta * state["v"]
        discounted = means.mean_delta_sq + self.beta / 2 * state["M"]
        below = 2.0 * (squared_norm(v) + self.eps_of(means))
        eta_g = float(discounted) / below if below > 0 else 1.0
        return ServerUpdate(w - eta_g * v, {"v": v, "M": discounted}, eta_g)


LOCAL, SERVER = Plain, ExtrapolatedMomentum
TITLE, REFERENCES = "FedExP-M", ("jhunjhunwala2023fedexp",)
EXAMPLE = {"eps": 0.01, "beta": 0.5}
