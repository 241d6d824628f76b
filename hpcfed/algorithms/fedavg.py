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

from typing import TYPE_CHECKING, Any, ClassVar, final

from pydantic import Field

from hpcfed.algorithms._base import ClientRule, ServerRule
from hpcfed.algorithms._blocks import elementwise
from hpcfed.types import Means, RoundContext, ServerUpdate, State

if TYPE_CHECKING:
    from torch import Tensor


@final
class Plain(ClientRule):
    """Local training on the client's own loss, reporting Δ_i. Final: other rules derive from `ClientRule`."""

    choice: ClassVar[str | None] = "plain"

    def __init_subclass__(cls, **keywords: Any) -> None:
        raise TypeError(f"{cls.__name__} derives from Plain, which is final: derive it from hpcfed.ClientRule")


class ServerStep(ServerRule):
    """w ← w − η_g Δ̄."""

    choice: ClassVar[str | None] = "step"

    server_lr: float = Field(1.0, gt=0)

    @elementwise
    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        return ServerUpdate(w - self.server_lr * means.delta, state, self.server_lr)


LOCAL, SERVER = Plain, ServerStep
TITLE, REFERENCES = "FedAvg", ("mcmahan2017communication",)
EXAMPLE = {"server_lr": 1.5}
