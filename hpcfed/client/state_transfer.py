"""The transfer of clients' states to the ranks that train the clients next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcfed.client.state_store import ClientStates
from hpcfed.ranks.world import World
from hpcfed.types import State


class Move(NamedTuple):
    """A client whose state goes from one rank to another."""

    client: int
    source: int
    target: int


class Moves:
    """Moves states while ranks train, a round at a time; the same moves are begun on every rank.

    Args:
        clients: the states at this rank.
        initial: returns a client's initial state, with the names, shapes and types of all; it is sent for a client that
            has never replaced it.
        world: the ranks.
    """

    def __init__(self, clients: ClientStates, initial: Callable[[], State], world: World):
        self._clients, self._initial, self._world = clients, initial, world
        self._like = {name: (tensor.shape, tensor.dtype) for name, tensor in initial().items()}
        self._sent: list[int] = []
        self._arriving: dict[int, dict[str, Tensor]] = {}
        self._wait: Callable[[], None] | None = None

    def begin(self, moves: Sequence[Move]) -> frozenset[int]:
        """Send what leaves this rank; return the clients whose states arrive, and are here after `finish`."""
        outgoing: list[tuple[Tensor, int]] = []
        incoming: list[tuple[Tensor, int]] = []
        for client, source, target in moves:
            if source == self._world.rank:
                state = self._clients.get(client) or self._initial()
                outgoing += [(state[name].cpu().contiguous(), target) for name in self._like]
                self._sent.append(client)
            elif target == self._world.rank:
                arriving = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self._like.items()}
                incoming += [(tensor, source) for tensor in arriving.values()]
                self._arriving[client] = arriving
        if outgoing or incoming:
            self._wait = self._world.exchange(outgoing, incoming)
        return frozenset(self._arriving)

    def finish(self) -> None:
        """Wait until everything has arrived, and keep it here; forget what has left."""
        if self._wait is None:
            return
        self._wait()
        self._clients.forget(self._sent)
        self._clients.commit(self._arriving)
        self._sent, self._arriving, self._wait = [], {}, None
