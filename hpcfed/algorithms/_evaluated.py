"""The evaluated model: the last one, or an average that is never fed back into training.

    last             w^t
    last-two         (w^t + w^{t−1}) / 2                             FedExP, Section 5
    cohort-average   Σ_{i∈S} p_i y_i = w^{t−1} − Δ̄                   nothing more is sent
    client-average   Σ_i q_i y_i over all clients' last models       FedDyn, A.2; initial model where never trained
    step-average     Σ_s η_g^s w^s / Σ_s η_g^s, s = 0 … t − 1        FedExP, Theorem 1; η_g = 1 where a method has none

The last two keep a state of their own, so they wrap a method. ``client-average`` needs each client's last model and one
more reduced vector: A ← A + q(S) mean(y_i − y_i,old), with A the initial model before round 1. ``step-average`` adds
two entries to the server's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from hpcfed.types import (
    AVERAGE,
    LAST,
    MOVED,
    STEP_AVERAGE,
    STEPS,
    LocalMethod,
    LocalResult,
    Means,
    Method,
    RoundContext,
    ServerMethod,
    ServerUpdate,
    State,
    TileMethod,
    Trained,
    Update,
)

if TYPE_CHECKING:
    from torch import Tensor

LAST_ROUND: Mapping[str, tuple[str, ...]] = {"last-two": ("previous",), "cohort-average": ("previous", "mean_delta")}
"""What of the last round the evaluated model is made of, besides w."""


class _WithClientAverage:
    """A local method that also keeps each client's last model, and with the server the average of them all."""

    def __init__(self, inner: LocalMethod):
        self._inner = inner
        self.stateful = self.counts_clients = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def vectors(self, alike: bool) -> tuple[str, ...]:
        return (*self._inner.vectors(alike), MOVED)

    def begin(self, w: Tensor) -> State:
        return {LAST: w, **self._inner.begin(w)}

    def begin_shared(self, w: Tensor) -> State:
        return {AVERAGE: w, **self._inner.begin_shared(w)}

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        update = self._inner.report(local, w, shared, client, context)
        return self._moved(update, local, w, client)

    def report_tile(self, trained: Sequence[Trained], w: Tensor, shared: State) -> list[Update]:
        updates = cast("TileMethod", self._inner).report_tile(trained, w, shared)
        return [self._moved(one, local, w, own) for one, (local, own, _) in zip(updates, trained, strict=True)]

    def _moved(self, update: Update, local: LocalResult, w: Tensor, client: State) -> Update:
        return replace(update, vectors={**update.vectors, MOVED: (w - local.delta) - client[LAST]})

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State:
        own = _without(client, LAST)
        after = self._inner.next_state(sent, local, w, shared, own, context)
        return {**(own if after is None else after), LAST: w - local.delta}

    def share(self, shared: State, means: Means) -> State:
        average = shared[AVERAGE] + means.fraction * means.vectors[MOVED]
        return {**self._inner.share(_without(shared, AVERAGE), means), AVERAGE: average}


def with_client_average(method: Method) -> Method:
    """Return the method with the average over all clients' last models as part of its shared state."""
    return replace(method, local=cast("LocalMethod", _WithClientAverage(method.local)))


class _WithStepAverage:
    """A server method that also keeps the average of the models that its steps began with, weighted by their η_g."""

    def __init__(self, inner: ServerMethod):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, w: Tensor) -> State:
        return {STEP_AVERAGE: w, STEPS: w.new_zeros(()), **self._inner.begin(w)}

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        update = self._inner.step(w, _without(state, STEP_AVERAGE, STEPS), means, context)
        weight = 1.0 if update.server_lr is None else update.server_lr
        total = state[STEPS] + weight
        share = weight / total.where(total > 0, 1.0)  # 0 while no step has moved
        average = state[STEP_AVERAGE] + share * (w - state[STEP_AVERAGE])
        return replace(update, state={**update.state, STEP_AVERAGE: average, STEPS: total})


def with_step_average(method: Method) -> Method:
    """Return the method with the average of its iterates as part of the server's state."""
    return replace(method, server=cast("ServerMethod", _WithStepAverage(method.server)))


def _without(state: State, *names: str) -> State:
    """Return a state without the wrapper's own tensors."""
    return {name: tensor for name, tensor in state.items() if name not in names}


def evaluated_model(which: str, w: Tensor, last: State, shared: State, server: State) -> Tensor:
    """Return the model that ``evaluate.model`` names, (d,): float64, or `w` itself.

    Args:
        which: the recipe's ``evaluate.model``.
        w: model after the round's step, (d,), in the run's dtype.
        last: what `LAST_ROUND` names: ``previous``, the model before the step, likewise; ``mean_delta``, Δ̄, float64.
        shared: the shared state, after the step.
        server: the server's own state after it.
    """
    if which == "last-two":
        return (w.double() + last["previous"].double()) / 2
    if which == "cohort-average":
        return last["previous"].double() - last["mean_delta"]
    if which == "client-average":
        return shared[AVERAGE]
    if which == "step-average":
        return server[STEP_AVERAGE]
    return w
