"""FedAvg: average the clients' changes, and take a step of size η_g along the average.

    client i:   y ← w;  τ_i times:  y ← y − η ∇f_i(y; batch);   Δ_i = w − y
    server:     w ← w − η_g Δ̄,        Δ̄ = Σ_{i∈S} p_i Δ_i

    η     ``local.lr``             τ_i   ``local.steps``, ``local.epochs`` or ``budget``
    η_g   ``server_lr``            p_i   ``weights``

With ``local.momentum`` this is FedAvgCM, with ``guess`` beside it GeL.

Reduced: d (Δ). State: none.

Reference: McMahan et al., AISTATS 2017, Algorithm 1 (η_g = 1); η_g as in Reddi et al., ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.types import LocalResult, Means, Part, RoundContext, ServerUpdate, State, Tilt, Update

if TYPE_CHECKING:
    from torch import Tensor


class Plain(Part):
    """Local training on the client's own loss, reporting Δ_i."""

    choice: ClassVar[str | None] = "plain"
    stateful: ClassVar[bool] = False
    weights: ClassVar[Literal["samples", "uniform"]] = "samples"
    sent: ClassVar[int] = 1
    received: ClassVar[int] = 1
    full_gradient: ClassVar[bool] = False
    uses_effective_steps: ClassVar[bool] = False
    reports_delta: ClassVar[bool] = True
    scalars: ClassVar[tuple[str, ...]] = ()
    loss_at_w: ClassVar[bool] = False

    @property
    def prox_mu(self) -> float:
        return 0.0

    def vectors(self, alike: bool) -> tuple[str, ...]:
        return ()

    def begin(self, w: Tensor) -> State:
        return {}

    def begin_shared(self, w: Tensor) -> State:
        return {}

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return Tilt()

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        return Update(local.delta)

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        return None

    def share(self, shared: State, means: Means) -> State:
        return shared


class ServerStep(Part):
    """w ← w − η_g Δ̄."""

    choice: ClassVar[str | None] = "step"

    server_lr: float = Field(1.0, gt=0)

    def begin(self, w: Tensor) -> State:
        return {}

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        return ServerUpdate(w - self.server_lr * means.delta, state, self.server_lr)


LOCAL, SERVER = Plain, ServerStep
