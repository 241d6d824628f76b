"""Weight of a client by its samples, up to a bound: what noise allows in the place of ``weights: samples``.

    v ← v min(n_i / ŵ, 1)

    ŵ     ``cap``

Behind ``clip`` a client's norm stays at most C, whatever its samples are. Packed: as before. State: none.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from hpcfed.types import State
from hpcfed.updates._base import CARRIED, NORMS, PartContext, Vectors
from hpcfed.updates._clipping import factors_like
from hpcfed.updates._tile import SentTile, TilePart


class Weight(TilePart):
    """A factor of at most 1."""

    keeps: ClassVar[frozenset[str]] = frozenset({NORMS, CARRIED})

    cap: int = Field(ge=1)

    def send_tile(
        self, vectors: Vectors, states: Sequence[State], shared: State, contexts: Sequence[PartContext]
    ) -> SentTile:
        factors = [min(1.0, context.client.num_samples / self.cap) for context in contexts if context.client]
        weighted = {name: stack * factors_like(stack, factors) for name, stack in vectors.items()}
        return SentTile(weighted, [{}] * len(states))


UPDATE = Weight
TITLE, REFERENCES = "weights of at most 1", ("mcmahan2018learning",)
EXAMPLE = {"cap": 30}
