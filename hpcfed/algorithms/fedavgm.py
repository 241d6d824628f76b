"""FedAvg-M: FedAvg with momentum at the server.

    client i:   as FedAvg
    server:     v ← β v + Δ̄;      w ← w − η_g v

    β     ``beta``                 η_g   ``server_lr``

Reduced: d (Δ). State: v at the server (d,), 0 at first. β = 0 is FedAvg, bit for bit.

Not to be confused with FedAvgCM, whose momentum is the clients' (``local.momentum``) and ends with the round.

Reference: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, Section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpcfed.algorithms._blocks import elementwise
from hpcfed.algorithms.fedavg import Plain
from hpcfed.types import Means, Part, RoundContext, ServerUpdate, State

if TYPE_CHECKING:
    from torch import Tensor


class Momentum(Part):
    """v ← β v + Δ̄;  w ← w − η_g v."""

    choice: ClassVar[str | None] = "momentum"

    server_lr: float = Field(1.0, gt=0)
    beta: float = Field(0.9, ge=0, lt=1)

    def begin(self, w: Tensor) -> State:
        return {"v": w.new_zeros(w.shape)}

    @elementwise
    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        v = self.beta * state["v"] + means.delta
        return ServerUpdate(w - self.server_lr * v, {"v": v}, self.server_lr)


LOCAL, SERVER = Plain, Momentum
TITLE, REFERENCES = "FedAvg-M", ("hsu2019measuring",)
EXAMPLE = {"beta": 0.7}
