"""Which model is evaluated: the last one, or an average that is never fed back into training.

    last             w^t
    last-two         (w^t + w^{t−1}) / 2                             FedExP, Section 5
    cohort-average   Σ_{i∈S} p_i y_i = w^{t−1} − Δ̄                   nothing more is sent
    client-average   Σ_i q_i y_i over all clients' last models       FedDyn's code; initial model where never trained

The last needs a client state (the client's last model) and one more reduced vector, so it wraps a method rather than
being told by it: A ← A + q(S) mean(y_i − y_i,old), with A the initial model before round 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.types import Local, LocalMethod, Means, Method, Report, ServerMethod, State, Stepped, Tilt, Who

if TYPE_CHECKING:
    from torch import Tensor

LAST, MOVED, AVERAGE = "last-model", "moved", "client-average"


class _RememberLast:
    """A local method that also keeps each client's last model and reports how far it moved since."""

    def __init__(self, inner: LocalMethod):
        self.inner = inner
        self.vectors = (*inner.vectors, MOVED)
        self.stateful = True
        self.weights = inner.weights
        self.sent, self.received = inner.sent, inner.received  # the record's own vector is not the method's

    def begin(self, w: Tensor) -> State:
        return {LAST: w, **self.inner.begin(w)}

    def tilt(self, w: Tensor, server: State, client: State, who: Who) -> Tilt:
        return self.inner.tilt(w, server, client, who)

    def report(self, local: Local, w: Tensor, server: State, client: State, who: Who) -> Report:
        told = self.inner.report(local, w, server, client, who)
        last = w - local.delta
        return Report({**told.vectors, MOVED: last - client[LAST]}, {**(told.state or {}), LAST: last})


@dataclass(frozen=True)
class _FollowAverage:
    """A server method that also follows the average of all clients' last models."""

    inner: ServerMethod

    def begin(self, w: Tensor) -> State:
        return {AVERAGE: w, **self.inner.begin(w)}

    def step(self, w: Tensor, state: State, means: Means) -> Stepped:
        stepped = self.inner.step(w, state, means)
        average = state[AVERAGE] + means.fraction * means.vectors[MOVED]
        return Stepped(stepped.w, {**stepped.state, AVERAGE: average}, stepped.server_lr)


def following_clients(method: Method) -> Method:
    """Return the method with the average over all clients' last models as part of its server state."""
    return Method(method.name, _RememberLast(method.local), _FollowAverage(method.server))


def evaluated_model(which: str, w: Tensor, previous: Tensor, mean_delta: Tensor, server: State) -> Tensor:
    """Return the model that ``evaluate.model`` names, (d,): float64, or `w` itself.

    Args:
        which: the recipe's ``evaluate.model``.
        w: model after the round's step, (d,), in the run's dtype.
        previous: model before it, likewise.
        mean_delta: Δ̄ of the round, float64.
        server: server state after the step.
    """
    if which == "last-two":
        return (w.double() + previous.double()) / 2
    if which == "cohort-average":
        return previous.double() - mean_delta
    if which == "client-average":
        return server[AVERAGE]
    return w
