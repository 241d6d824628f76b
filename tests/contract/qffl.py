"""q-FFL in one file outside the package: clients with a larger loss weigh more.

    client i:   F_i = f_i(w);   reports  F_i^q Δ_i/η  and  h_i = q F_i^(q−1) ‖Δ_i/η‖² + F_i^q/η
    server:     w ← w − mean(F_i^q Δ_i/η) / mean h_i

State: the round's largest h_i at the server, for the record's hash alone: tests see there that ranks agree on each h_i.

Reference: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020, Algorithm 2.
"""

from __future__ import annotations

from pydantic import Field

from hpcfed import ClientRule, ServerRule
from hpcfed.types import Method, ServerUpdate, Update


class Fair(ClientRule):
    loss_at_w = True
    scalars = ("h",)
    weights = "uniform"

    q: float = Field(ge=0)

    def report(self, local, w, shared, client, context):
        g, weight = local.delta / context.lr, context.loss**self.q
        h = self.q * context.loss ** (self.q - 1) * float(g.dot(g)) + weight / context.lr
        return Update(weight * g, scalars={"h": h})


class FairStep(ServerRule):
    client_scalars = True

    def begin(self, w):
        return {"largest": w.new_zeros(())}

    def step(self, w, state, means, context):
        largest = w.new_tensor(means.client_scalars["h"].max())
        step, each = 1 / means.scalars["h"], means.client_scalars["h"]
        spread = {"h_min": float(each.min()), "h_max": float(each.max())}
        return ServerUpdate(w - step * means.delta, {"largest": largest}, step, metrics=spread)


def method(q: float) -> Method:
    return Method("q-FFL", Fair(q=q), FairStep())
