"""FedDyn: a dynamic regulariser that makes the clients' optima agree with the server's.

    client i:   y ← w;  τ_i times:  y ← y − η (∇f_i(y; batch) − h_i + α (y − w));   Δ_i = w − y
                h_i ← h_i + α Δ_i              (= ∇L_i at its last model, were the local problem solved)
    server:     h ← h + α q(S) Δ̄;      w ← w − Δ̄ − h/α

    α     ``alpha``                h_i   client state, 0 at its first participation
    h     server state             q(S)  |S|/N with uniform weights

``alpha_scale: samples`` gives client i its own α_i = α / (n_i N / n), as the authors' code does; h/α keeps the plain α.

Reduced: d (Δ). State: h_i at clients (d,), h at the server (d,).

Not to be confused with FedProx, whose clients forget: without h_i and h this is FedProx with μ = α.

Reference: Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms._blocks import elementwise
from hpcfed.arithmetic.elementary import quotient
from hpcfed.types import ClientInfo, LocalResult, Means, Part, RoundContext, ServerUpdate, State, Tilt, Update

if TYPE_CHECKING:
    from torch import Tensor


class DynamicRegularizer(ClientRule):
    """The client's gradient plus α (y − w) − h_i."""

    choice: ClassVar[str | None] = None
    stateful: ClassVar[bool] = True
    weights: ClassVar[Literal["samples", "uniform"]] = "uniform"

    alpha: float = Field(gt=0)
    alpha_scale: Literal["none", "samples"] = "none"

    def begin(self, w: Tensor) -> State:
        return {"h": w.new_zeros(w.shape)}

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return Tilt(shift=-client["h"], mu=self._alpha_of(context.client))

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State:
        return {"h": client["h"] + self._alpha_of(context.client) * sent.named["delta"]}

    def _alpha_of(self, client: ClientInfo | None) -> float:
        if client is None or self.alpha_scale == "none":
            return self.alpha
        return self.alpha * (client.mean_samples / max(client.num_samples, 1))


class DynamicServer(Part):
    """h ← h + α q(S) Δ̄;  w ← w − Δ̄ − h/α."""

    counts_clients: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"sum"})

    alpha: float = Field(gt=0)
    """The clients' α: one key of the recipe."""

    def begin(self, w: Tensor) -> State:
        return {"h": w.new_zeros(w.shape)}

    @elementwise
    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        h = state["h"] + self.alpha * means.fraction * means.delta
        return ServerUpdate(w - means.delta - quotient(h, self.alpha), {"h": h})


LOCAL, SERVER = DynamicRegularizer, DynamicServer
TITLE, REFERENCES = "FedDyn", ("acar2021federated",)
EXAMPLE = {"alpha": 0.05}
