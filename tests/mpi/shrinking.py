"""A method whose reports shrink by 1e-18 from round to round, which its server undoes: each round is run twice."""

from __future__ import annotations

from itertools import count

from hpcfed.algorithms.feddyn import DynamicRegularizer
from hpcfed.types import Method, Part, ServerUpdate, Update

SHRINKS = 1e-18
"""By more than two words of float64 sums leave room for."""


class Shrinking(DynamicRegularizer):
    """FedDyn's clients; Δ_i is multiplied by a scale that the server keeps for them."""

    def begin_shared(self, w):
        return {"scale": w.new_ones(())}

    def report(self, local, w, shared, client, context):
        return Update(local.delta * shared["scale"])

    def next_state(self, sent, local, w, shared, client, context):
        return super().next_state(Update(local.delta), local, w, shared, client, context)

    def share(self, shared, means):
        return {"scale": shared["scale"] * SHRINKS}


class Undone(Part):
    """w ← w − Δ̄ / scale."""

    def begin(self, w):
        return {"scale": w.new_ones(())}

    def step(self, w, state, means, context):
        return ServerUpdate(w - means.delta / state["scale"], {"scale": state["scale"] * SHRINKS})


def method() -> Method:
    return Method("Shrinking", Shrinking(alpha=0.05), Undone())


CALLS = count()


class Restless(Shrinking):
    """Client 2 reports another update at each call: a longer one, or its entries in another order."""

    way: str

    def report(self, local, w, shared, client, context):
        update = super().report(local, w, shared, client, context)
        if context.client.client == 2:
            number = next(CALLS)
            update.delta = update.delta.roll(number) if self.way == "order" else update.delta * (1 + number / 8)
        return update


def restless(way: str) -> Method:
    return Method("Restless", Restless(alpha=0.05, way=way), Undone())
