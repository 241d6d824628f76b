"""Private parameters and buffers as part of a client's state, for any method: FedBN, FedPer, local heads.

They wrap a method, which sees only the shared parameters and its own part of a state. A client begins with those of the
initial model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from hpcfed.client.state_store import ClientStates
from hpcfed.models.flat import PRIVATE_PREFIX, FlatModel
from hpcfed.types import LocalMethod, LocalResult, Method, RoundContext, State, TileMethod, Tilt, Trained, Update

if TYPE_CHECKING:
    from torch import Tensor


def private_part(state: State) -> State:
    """Return the private parameters and buffers in a client's state."""
    return {name: tensor for name, tensor in state.items() if name.startswith(PRIVATE_PREFIX)}


def method_part(state: State) -> State:
    """Return the method's part of a client's state."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(PRIVATE_PREFIX)}


@dataclass(frozen=True)
class PrivateParts:
    """The private parts of clients at home on this rank."""

    model: FlatModel
    clients: ClientStates

    def of(self, client: int) -> State:
        """Return a client's private part: the initial one before its first participation, empty if there is none."""
        state = self.clients.get(client) if self.model.own else None
        return self.model.own if state is None else private_part(state)


class _KeepPrivate:
    """A local method whose clients' states have a private part, too."""

    def __init__(self, inner: LocalMethod, initial: State):
        self._inner, self._initial = inner, initial
        self.stateful = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, w: Tensor) -> State:
        return {**self._inner.begin(w), **self._initial}

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return self._inner.tilt(w, shared, method_part(client), context)

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        return self._inner.report(local, w, shared, method_part(client), context)

    def report_tile(self, trained: Sequence[Trained], w: Tensor, shared: State) -> list[Update]:
        own = [(local, method_part(client), context) for local, client, context in trained]
        return cast("TileMethod", self._inner).report_tile(own, w, shared)

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State:
        before = method_part(client)
        after = self._inner.next_state(sent, local, w, shared, before, context)
        return {**(before if after is None else after), **local.own}


def keeping_private(method: Method, initial: State) -> Method:
    """Return the method with `initial`, private parameters and buffers, in the first state of its clients."""
    return replace(method, local=cast("LocalMethod", _KeepPrivate(method.local, initial)))
