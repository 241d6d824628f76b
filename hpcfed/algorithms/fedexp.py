"""FedExP: FedAvg with a server step chosen each round by extrapolation.

    client i:   as FedAvg
    server:     η_g = max{1, mean ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))},    w ← w − η_g Δ̄

    ε     ``eps``

``exact_projection`` drops the 2: η_g = max{1, mean ‖Δ_i‖² / (‖Δ̄‖² + ε)}, the step of the extrapolated parallel
projection method, for clients that solve their problem to convergence.
``eps_scale: cohort`` (|S|·ε) and ``eps_decay`` (ε·eps_decay^t) are what the authors' code does.

The iterates oscillate, and the result is the average of the last two, never fed back: ``evaluate.model: last-two``, the
default here. Algorithm 1 averages over clients alike; p_i is n_i/n by default, as in the authors' code and for FedAvg,
from which FedExP then differs by its step alone: ``weights: uniform`` is Algorithm 1 where clients differ in size.

Reduced: d (Δ); ‖Δ_i‖² comes with every Δ_i (`Means.mean_delta_sq`). State: none.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP: speeding up federated averaging via extrapolation", ICLR 2023,
Algorithm 1, eq. (9); eq. (106) has no 2; Section 5 on the last two iterates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpcfed.algorithms._blocks import elementwise
from hpcfed.algorithms.fedavg import Plain
from hpcfed.arithmetic.elementary import power
from hpcfed.types import Means, Part, RoundContext, ServerUpdate, State

if TYPE_CHECKING:
    from torch import Tensor


class Epsilon(Part):
    """ε, with the authors' scale and decay. Rules with it have the average of the last two iterates as their result."""

    final_model: ClassVar[str] = "last-two"
    reads: ClassVar[frozenset[str]] = frozenset({"mean_delta_sq"})

    eps: float = Field(1e-3, ge=0)
    eps_scale: Literal["one", "cohort"] = "one"
    eps_decay: float = Field(1.0, gt=0, le=1)

    def eps_of(self, means: Means) -> float:
        """ε of the round."""
        decay = power(self.eps_decay, means.round)
        return self.eps * decay * (means.cohort_size if self.eps_scale == "cohort" else 1)


class Extrapolation(Epsilon):
    """η_g from the ratio of the mean squared norm to the squared norm of the mean."""

    choice: ClassVar[str | None] = "fedexp"
    reads_delta_sq: ClassVar[bool] = True

    exact_projection: bool = False

    def begin(self, w: Tensor) -> State:
        return {}

    @elementwise
    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        eta_g = self.server_lr(means)
        return ServerUpdate(w - eta_g * means.delta, state, eta_g)

    def server_lr(self, means: Means) -> float:
        """η_g of the round; 1 where nothing moved and ε is 0."""
        below = (1.0 if self.exact_projection else 2.0) * (means.delta_sq + self.eps_of(means))
        return max(1.0, means.mean_delta_sq / below) if below > 0 else 1.0


LOCAL, SERVER = Plain, Extrapolation
TITLE, REFERENCES = "FedExP", ("jhunjhunwala2023fedexp",)
EXAMPLE = {"eps": 0.001}
