"""Parts whose code is of all clients of a tile at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcfed.types import State
from hpcfed.updates._base import PartContext, Sent, UpdatePart, Vectors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SentTile:
    """Answer of a part for the R clients of a tile.

    Attributes:
        vectors, places: as `Sent` has them, stacked, (R, n) and (R, k).
        states, scalars: of each client; no scalars if the part has none.
    """

    vectors: Vectors
    states: Sequence[State]
    places: Vectors = field(default_factory=dict)
    scalars: Sequence[Mapping[str, float]] = ()


class TilePart(UpdatePart):
    """A part that says what it sends for the clients of a tile at once; each one's bits are those of a tile of one."""

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        alone = {name: vector.unsqueeze(0) for name, vector in vectors.items()}
        sent = self.send_tile(alone, [state], shared, [context])
        found, places = ({name: stack[0] for name, stack in own.items()} for own in (sent.vectors, sent.places))
        return Sent(found, sent.states[0], places, sent.scalars[0] if sent.scalars else {})

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        """Return the answers for R clients, whose vectors are stacked, (R, n)."""
        raise NotImplementedError


def send_tile(
    part: UpdatePart, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
) -> SentTile:
    """Return a part's answers for R clients, whose vectors are stacked, (R, n): together, or of a part that knows one
    client at a time one after another.
    """
    import torch

    if isinstance(part, TilePart):
        return part.send_tile(vectors, states, shared, contexts)
    each = [
        part.send({name: stack[row] for name, stack in vectors.items()}, states[row], shared, context)
        for row, context in enumerate(contexts)
    ]
    sent, places = (
        {name: torch.stack([one[name] for one in found]) for name in found[0]}
        for found in ([one.vectors for one in each], [one.places for one in each])
    )
    return SentTile(sent, [one.state for one in each], places, [one.scalars for one in each])


def places_of(contexts: Sequence[PartContext], name: str) -> list[Tensor] | None:
    """Return the entries of a vector that each client sends, (k,) int64; None where none were chosen."""
    return [context.places[name] for context in contexts] if name in contexts[0].places else None
