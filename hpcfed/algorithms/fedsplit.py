"""FedSplit: Peaceman-Rachford splitting; clients and server reflect each other's answers until they agree.

    client i:   y ← 2w − z_i;  τ_i times:  y ← y − η (∇f_i(y; batch) + (y − (2w − z_i)) / s)
                z_i' = z_i + 2 (y − w)
    server:     "act"  w ← w − mean(w − z_i') = mean z_i' over the cohort
                "all"  w ← w + q(S) mean(z_i' − z_i) = w − 2 q(S) Δ̄,      so that w = Σ_i q_i z_i over all clients

"act" with a part of the clients is no contraction where a client's loss has flat directions: there the answer y is
2w − z_i, its reflection moves z_i without bound, and w grows by a constant factor a round (for 7 of 20 clients with
rank-deficient least squares about 2^(1/6), with exact proximal operators, too). "all" stays bounded.

    s     ``s``, step of the proximal operator          ``variant``   act | all (equal when all take part)

Reduced: d (w − z_i') by "act", d (Δ) by "all". State: z_i at clients (d,), the *initial* model at first participation.

Reference: Pathak and Wainwright, "FedSplit: an algorithmic framework for fast federated optimization", NeurIPS 2020,
Algorithm 1, eqs. (9a)-(9c); partial participation in the two ways of FedDyn's experiments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms._blocks import elementwise
from hpcfed.types import LocalResult, Means, Part, RoundContext, ServerUpdate, State, Tilt, Update

if TYPE_CHECKING:
    from torch import Tensor

Variant = Literal["act", "all"]


class Reflection(ClientRule):
    """The proximal step of 2w − z_i, started there."""

    choice: ClassVar[str | None] = None
    stateful: ClassVar[bool] = True
    weights: ClassVar[Literal["samples", "uniform"]] = "uniform"
    reads: ClassVar[frozenset[str]] = frozenset({"carried_twice"})

    s: float = Field(1.0, gt=0)
    variant: Variant = "act"

    @property
    def reports_delta(self) -> bool:  # type: ignore[override]
        return self.variant == "all"

    def vectors(self, alike: bool) -> tuple[str, ...]:
        return () if self.variant == "all" else ("residual",)

    def begin(self, w: Tensor) -> State:
        return {"z": w}

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return Tilt(mu=1 / self.s, anchor=2 * w - client["z"], from_anchor=True)

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        if self.variant == "all":
            return Update(local.delta)
        return Update(None, {"residual": w - (client["z"] - 2 * local.delta)})

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State:
        if sent.delta is not None:
            return {"z": client["z"] - 2 * sent.delta}
        z = client["z"] - 2 * local.delta
        return {"z": z - (sent.vectors["residual"] - (w - z))}  # 0 but for what was lost on its way


class SplitServer(Part):
    """The mean of the z_i, over the cohort or over all clients."""

    variant: Variant = "act"

    @property
    def counts_clients(self) -> bool:
        return self.variant == "all"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"sum"} if self.variant == "all" else ())

    def begin(self, w: Tensor) -> State:
        return {}

    @elementwise
    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        if self.variant == "all":
            return ServerUpdate(w - 2 * means.fraction * means.delta, state)
        return ServerUpdate(w - means.vectors["residual"], state)


LOCAL, SERVER = Reflection, SplitServer
TITLE, REFERENCES = "FedSplit", ("pathak2020fedsplit",)
EXAMPLE = {"s": 0.7, "variant": "all"}
