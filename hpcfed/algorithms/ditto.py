"""Ditto: FedAvg, beside which each client trains a model of its own that is held near the server's.

    client i:   as FedAvg;  and  τ_i times, from the last round's v_i:  v_i ← v_i − η (∇f_i(v_i; batch) + μ (v_i − w))
    server:     w ← w − η_g Δ̄

    μ     ``mu``, the paper's λ         v_i   client state, the initial model at first        η_g   ``server_lr``

Both take the same minibatches, and as many. v_i is the client's result: ``evaluate.clients.models: [personal]``
measures it, ``private/client-i.safetensors`` keeps it, and ``hpcfed.load(run).module_of(i)`` returns it.

Reduced: d (Δ). State: v_i at clients (d,). w is FedAvg's, bit for bit.

Reference: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021,
Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import PERSONAL, LocalResult, RoundContext, State, Tilt, Update

if TYPE_CHECKING:
    from torch import Tensor


class PersonalModel(ClientRule):
    """A second model at each client, with its gradient plus μ (v − w)."""

    choice: ClassVar[str | None] = "ditto"
    stateful: ClassVar[bool] = True
    carried: ClassVar[frozenset[str]] = frozenset()
    trains_personal: ClassVar[bool] = True

    mu: float = Field(ge=0)

    def begin(self, w: Tensor) -> State:
        return {PERSONAL: w}

    def personal(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        v = client[PERSONAL]
        return Tilt(shift=self.mu * (v - w), mu=self.mu, anchor=v, from_anchor=True)

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State:
        assert local.personal is not None
        return {PERSONAL: local.personal}


LOCAL, SERVER = PersonalModel, ServerStep
TITLE, REFERENCES = "Ditto", ("li2021ditto",)
EXAMPLE = {"mu": 0.3}
