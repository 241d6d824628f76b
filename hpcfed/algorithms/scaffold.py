"""SCAFFOLD: control variates steer each client along the average of all clients' gradients.

    client i:   y ← w;  τ_i times:  y ← y − η (∇f_i(y; batch) + c − c_i);   Δ_i = w − y
                Ψ_i = c − Δ_i / (‖a_i‖₁ η);      c_i ← c_i − Ψ_i
    server:     w ← w − η_g Δ̄;      c ← c − q(S) Ψ̄,      so that c = Σ_i q_i c_i over all clients

    ‖a_i‖₁     effective steps: how far client i moves, over −η, if all its gradients are 1: τ_i for plain SGD
    η_g        ``server_lr``
    q(S)       |S|/N with uniform weights

Where ‖a_i‖₁ is the same for all of a cohort, Ψ̄ = c − Δ̄ / (‖a‖₁ η) follows from Δ̄ and is not sent. With momentum, a
guess or unequal τ_i the paper's τ_i becomes ‖a_i‖₁: c_i is then still an average of the client's gradients.

``correction: after-momentum`` is the code of NIID-Bench, Flower's baseline and others: momentum, clip and weight decay
know nothing of c − c_i, which is added to each step, and Ψ_i = c − Δ_i / (τ_i η): c_i averages steps, not gradients.

    v ← ρ v + g(y; batch);      y ← y − η (v + c − c_i)

``c_scale: samples`` is FedDyn's code where clients differ in size: with s_i = n_i N / n, client i adds c / s_i − c_i to
its gradients, and the server takes the mean of s_i Ψ_i. ``uniform`` is NIID-Bench's beside ``weights: samples``: the
server takes the mean of Ψ_i / s_i, so that c = Σ_i c_i / N. ``none`` is the paper.

Reduced: d (Δ), or 2d (Δ, Ψ) in a round whose ‖a_i‖₁ differ, or with ``c_scale`` or ``correction: after-momentum``.
State: c_i at clients (d,), c at the server (d,), both 0 at first. Sent and received are counted twice, as in papers.

Reference: Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020,
Algorithm 1, option II. NIID-Bench: Li et al., "Federated learning on non-IID data silos", ICDE 2022, and its code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.arithmetic.elementary import quotient
from hpcfed.types import ClientInfo, LocalResult, Means, RoundContext, State, Tilt, Update

if TYPE_CHECKING:
    from torch import Tensor


class ControlVariates(ClientRule):
    """The client's gradient plus c − c_i."""

    choice: ClassVar[str | None] = "scaffold"
    stateful: ClassVar[bool] = True
    weights: ClassVar[Literal["samples", "uniform"]] = "uniform"
    sent: ClassVar[int] = 2
    received: ClassVar[int] = 2
    uses_effective_steps: ClassVar[bool] = True
    counts_clients: ClassVar[bool] = True
    carried: ClassVar[frozenset[str] | None] = frozenset({"psi"})
    later: ClassVar[frozenset[str]] = frozenset({"c_scale", "correction"})

    correction: Literal["inside", "after-momentum"] = "inside"
    c_scale: Literal["none", "samples", "uniform"] = "none"

    def vectors(self, alike: bool) -> tuple[str, ...]:
        follows = alike and self.c_scale == "none" and self.correction == "inside"
        return () if follows else ("psi",)

    def begin(self, w: Tensor) -> State:
        return {"c": w.new_zeros(w.shape)}

    def begin_shared(self, w: Tensor) -> State:
        return {"c": w.new_zeros(w.shape)}

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        c = shared["c"] if self.c_scale != "samples" else quotient(shared["c"], _relative_size(context.client))
        return Tilt(shift=c - client["c"]) if self.correction == "inside" else Tilt(after_momentum=c - client["c"])

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        if not self.vectors(context.alike):
            return Update(local.delta)
        psi = self._psi_of(local, local.delta, shared)
        return Update(local.delta, {"psi": psi if self.c_scale == "none" else psi * self._factor(context.client)})

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State:
        psi = sent.vectors.get("psi")
        if psi is None:
            psi = self._psi_of(local, sent.named["delta"], shared)
        elif self.c_scale != "none":
            own, factor = self._psi_of(local, local.delta, shared), self._factor(context.client)
            psi = own + quotient(psi - own * factor, factor)  # own, but for what was lost on its way
        return {"c": client["c"] - psi}

    def share(self, shared: State, means: Means) -> State:
        psi = means.vectors.get("psi")
        if psi is None:
            psi = _psi(shared["c"], means.delta, means.effective_steps, means.lr)
        return {"c": shared["c"] - means.fraction * psi}

    def _psi_of(self, local: LocalResult, delta: Tensor, shared: State) -> Tensor:
        return _psi(shared["c"], delta, local.effective_steps if self.correction == "inside" else local.steps, local.lr)

    def _factor(self, client: ClientInfo | None) -> float:
        """Return the multiple of Ψ_i that is sent."""
        size = _relative_size(client)
        return size if self.c_scale == "samples" else 1 / size


def _relative_size(client: ClientInfo | None) -> float:
    """s_i = n_i N / n; of a client without samples that of one sample, since c is divided by it."""
    return 1.0 if client is None else max(client.num_samples, 1) / client.mean_samples


def _psi(c: Tensor, delta: Tensor, effective_steps: float | None, lr: float) -> Tensor:
    """c − Δ / (‖a‖₁ η); 0 for a client that took no step and so learned nothing."""
    return c - quotient(delta, effective_steps * lr) if effective_steps else c.new_zeros(c.shape)


LOCAL, SERVER = ControlVariates, ServerStep
TITLE, REFERENCES = "SCAFFOLD", ("karimireddy2020scaffold",)
EXAMPLE = {"server_lr": 1.2}
