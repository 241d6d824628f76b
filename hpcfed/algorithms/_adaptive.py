"""FedOpt's server: an adaptive optimizer that takes the averaged change for a gradient.

    m ← β₁ m + (1 − β₁) Δ̄;      v ← the method's own;      w ← w − η_g m / (√v + τ)

    η_g   ``server_lr``        β₁   ``beta1``        τ   ``tau``, degree of adaptivity

The defaults are the paper's; these are what authors' code does:

    ``v0``         tau2   v starts at τ² (the algorithm)          zero      at 0 (the experiments)
    ``second``     delta  v follows Δ̄²                             m         it follows m²
    ``root``       plain  √v + τ                                   padded    √(v + τ)
    ``debias``     none                                            constant  m / (1 − β₁), v / (1 − β₂), in every round

and ``debias: adam`` is the bias correction of Adam itself: m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ) in step t, that of round t
unless rounds without clients came before; t − 1 is a scalar of the state. With
``v0: zero`` FedAdam's step is that of ``torch.optim.Adam`` with ε = τ, and FedYogi's that of Optax but for the start:
Optax's m and v begin at 1e-6.

Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfed.algorithms._blocks import elementwise
from hpcfed.arithmetic.elementary import power, quotient, sqrt
from hpcfed.types import Means, Part, RoundContext, ServerUpdate, State

if TYPE_CHECKING:
    from torch import Tensor


class Adaptive(Part):
    """The step that FedAdagrad, FedAdam and FedYogi share."""

    server_lr: float = Field(1.0, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    tau: float = Field(1e-3, ge=0)
    v0: Literal["tau2", "zero"] = "tau2"
    second: Literal["delta", "m"] = "delta"
    root: Literal["plain", "padded"] = "plain"
    debias: Literal["none", "constant", "adam"] = "none"

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the next v, (d,), from v and the entries of Δ̄² or m²."""

    def scale_of_v(self, steps: int) -> float:
        """1 − β₂ᵗ after t steps; 1 for rules without β₂."""
        return 1.0

    def begin(self, w: Tensor) -> State:
        v = w.new_full(w.shape, self.tau * self.tau if self.v0 == "tau2" else 0.0)
        counted = {"steps": w.new_zeros(())} if self.debias == "adam" else {}
        return {"m": w.new_zeros(w.shape), "v": v, **counted}

    @elementwise
    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        m = self.beta1 * state["m"] + (1 - self.beta1) * means.delta
        v = self.second_moment(state["v"], (means.delta if self.second == "delta" else m).square())
        direction, spread, after = m, v, {"m": m, "v": v}
        if self.debias != "none":
            steps = 1
            if self.debias == "adam":
                after["steps"] = state["steps"] + 1
                steps = int(after["steps"])
            direction = quotient(m, 1 - power(self.beta1, steps))
            spread = quotient(v, self.scale_of_v(steps))
        below = sqrt(spread + self.tau) if self.root == "padded" else sqrt(spread) + self.tau
        moved = (direction / below).where(below > 0, 0.0)  # with τ = 0 an entry that never changed would be 0/0
        return ServerUpdate(w - self.server_lr * moved, after, self.server_lr)


class Decaying(Adaptive):
    """With a β₂ that forgets."""

    beta2: float = Field(0.99, ge=0, lt=1)

    def scale_of_v(self, steps: int) -> float:
        return 1 - power(self.beta2, steps)
