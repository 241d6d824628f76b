"""Hash of what must be the same on every rank after a round; it travels in the next one's reduction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from torch import Tensor

from hpcfed.types import State


class StateHash:
    """The hash of a model, of states and of a text, taken when it is first asked for; they must not change till then.

    Args:
        w: the model, (d,), on the host.
        states: likewise.
        text: what else belongs to it.
    """

    def __init__(self, w: Tensor, states: Sequence[State], text: str):
        self._of: tuple[Tensor, Sequence[State], str] | None = (w, states, text)
        self._value = 0

    @property
    def value(self) -> int:
        """The hash, as a signed 64-bit integer."""
        if self._of is not None:
            w, states, text = self._of
            digest = xxhash.xxh3_64(w.numpy().data)
            digest.update(text.encode())
            for state in states:
                for name in sorted(state):
                    entries = state[name].numpy()
                    digest.update(entries.data if entries.ndim else entries.tobytes())
            self._value, self._of = int(np.uint64(digest.intdigest()).view(np.int64)), None
        return self._value

    def __str__(self) -> str:
        """As recorded: 64 bits, hexadecimal."""
        return f"{np.int64(self.value).view(np.uint64):016x}"
