"""FedDyn: a dynamic regulariser that makes the clients' optima agree with the server's.

    client i:   y ← w;  τ_i times:  y ← y − η (∇f_i(y; batch) − h_i + α (y − w));   Δ_i = w − y
                h_i ← h_i + α Δ_i              (= ∇L_i at its last model, were the local problem solved)
    server:     h ← h + α q(S) Δ̄;      w ← w − Δ̄ − h/α

    α     ``alpha``                h_i   client state, 0 at its first participation
    h     server state             q(S)  |S|/N with uniform weights

``alpha_scale: samples`` gives client i its own α_i = α / (n_i N / n), as the authors' code does; h/α keeps the plain α.

Reduced: d (Δ). State: h_i at clients (d,), h at the server (d,).

Not to be confused with FedProx, whose clients forget: without h_i and h this is FedProx with μ = α.

Reference: Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, Algorithm 1
(its −h is our h: Δ has the opposite sign).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.algorithms.fedavg import Plain
from hpcfed.types import ClientInfo, LocalResult, Means, Part, Report, ServerUpdate, State, Tilt

if TYPE_CHECKING:
    from torch import Tensor


class DynamicRegularizer(Plain):
    """The client's gradient plus α (y − w) − h_i."""

    choice: ClassVar[str | None] = None
    stateful: ClassVar[bool] = True
    weights: ClassVar[Literal["samples", "uniform"]] = "uniform"

    alpha: float = Field(gt=0)
    alpha_scale: Literal["none", "samples"] = "none"

    def begin(self, w: Tensor) -> State:
        return {"h": w.new_zeros(w.shape)}

    def tilt(self, w: Tensor, shared: State, client: State, who: ClientInfo) -> Tilt:
        return Tilt(shift=-client["h"], mu=self._alpha_of(who))

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, who: ClientInfo) -> Report:
        return Report({"delta": local.delta}, {"h": client["h"] + self._alpha_of(who) * local.delta})

    def _alpha_of(self, who: ClientInfo) -> float:
        return self.alpha * (who.mean_samples / max(who.num_samples, 1) if self.alpha_scale == "samples" else 1.0)


class DynamicServer(Part):
    """h ← h + α q(S) Δ̄;  w ← w − Δ̄ − h/α."""

    alpha: float = Field(gt=0)

    def begin(self, w: Tensor) -> State:
        return {"h": w.new_zeros(w.shape)}

    def step(self, w: Tensor, state: State, means: Means) -> ServerUpdate:
        h = state["h"] + self.alpha * means.fraction * means.delta
        return ServerUpdate(w - means.delta - h / self.alpha, {"h": h})


LOCAL, SERVER = DynamicRegularizer, DynamicServer
