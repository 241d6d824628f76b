"""FedAvg: average the clients' changes, and take a step of size η_g along the average.

    client i:   y ← w;  τ_i times:  y ← y − η ∇f_i(y; batch);   Δ_i = w − y
    server:     w ← w − η_g Δ̄,        Δ̄ = Σ_{i∈S} p_i Δ_i

    η     ``local.lr``             τ_i   ``local.steps``, ``local.epochs`` or ``budget``
    η_g   ``server_lr``            p_i   ``weights``

Reduced: Δ, one vector (d,). State: none. With ``local.momentum`` this is FedAvgCM.

Reference: McMahan et al., AISTATS 2017, Algorithm 1 (η_g = 1); η_g as in Reddi et al., ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.types import Local, Means, Part, Report, State, Stepped, Tilt, Who

if TYPE_CHECKING:
    from torch import Tensor


class Plain(Part):
    """Local training on the client's own loss, reporting Δ_i."""

    vectors: ClassVar[tuple[str, ...]] = ("delta",)
    stateful: ClassVar[bool] = False
    weights: ClassVar[Literal["samples", "uniform"]] = "samples"
    sent: ClassVar[int] = 1
    received: ClassVar[int] = 1

    def begin(self, w: Tensor) -> State:
        return {}

    def tilt(self, w: Tensor, server: State, client: State, who: Who) -> Tilt:
        return Tilt()

    def report(self, local: Local, w: Tensor, server: State, client: State, who: Who) -> Report:
        return Report({"delta": local.delta})


class ServerStep(Part):
    """w ← w − η_g Δ̄."""

    server_lr: float = Field(1.0, gt=0)

    def begin(self, w: Tensor) -> State:
        return {}

    def step(self, w: Tensor, state: State, means: Means) -> Stepped:
        return Stepped(w - self.server_lr * means.delta, state, self.server_lr)


LOCAL, SERVER = Plain, ServerStep
