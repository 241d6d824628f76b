"""Base classes of client and server rules, with FedAvg's defaults.

Rules of a method are final: another one wraps them (`hpcfed.algorithms._evaluated`) or starts from these bases.
Users import them as `hpcfed.ClientRule` and `hpcfed.ServerRule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from hpcfed.types import LocalResult, Means, Part, RoundContext, State, Tilt, Update

if TYPE_CHECKING:
    from torch import Tensor


class ClientRule(Part):
    """A stateless client that reports Δ_i and adds nothing to its gradients; see `hpcfed.types.LocalMethod`."""

    stateful: ClassVar[bool] = False
    weights: ClassVar[Literal["samples", "uniform"]] = "samples"
    sent: ClassVar[int] = 1
    received: ClassVar[int] = 1
    full_gradient: ClassVar[bool] = False
    uses_effective_steps: ClassVar[bool] = False
    reports_delta: ClassVar[bool] = True
    scalars: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[frozenset[str] | None] = None
    loss_at_w: ClassVar[bool] = False
    evaluates_elsewhere: ClassVar[bool] = False
    trains_personal: ClassVar[bool] = False
    """Whether each client trains a second model, by the tilt of `personal`; costs a solve more."""
    counts_clients: ClassVar[bool] = False
    """Whether it reads N or n, as `ClientInfo.mean_samples`; see `hpcfed.types.Method.counts_clients`."""

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

    def personal(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        """Return the tilt of the second solve, on the same minibatches.

        Its last iterate is ``local.personal``, which `next_state` keeps under the name `hpcfed.types.PERSONAL`.
        """
        raise NotImplementedError

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        return Update(local.delta)

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        return None

    def share(self, shared: State, means: Means) -> State:
        return shared


class ServerRule(Part):
    """A server without a state; `step` is the rule's own. See `hpcfed.types.ServerMethod`."""

    client_scalars: ClassVar[bool] = False
    reads_delta_sq: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset()
    final_model: ClassVar[str] = "last"
    counts_clients: ClassVar[bool] = False
    """Whether it reads N or n, as ``means.fraction``; see `hpcfed.types.Method.counts_clients`."""

    def begin(self, w: Tensor) -> State:
        return {}
