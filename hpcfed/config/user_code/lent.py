"""Tensors lent to code of a user, which must not write to them: other clients and rounds have the same memory."""

from __future__ import annotations

from torch import Tensor

from hpcfed.types import State


class WriteDetector:
    """Notices writes to tensors, and to those of states, from when it is made; by torch's count of writes to each.

    Args:
        lent: by the names that a message has for them: ``w``, ``state 'h'``.
    """

    def __init__(self, **lent: Tensor | State):
        self._tensors = {
            f"{name} {key!r}" if key else name: tensor
            for name, found in lent.items()
            for key, tensor in ({"": found} if isinstance(found, Tensor) else found).items()
        }
        self._versions = [tensor._version for tensor in self._tensors.values()]

    def written(self) -> str | None:
        """Return the name of the first one that was written to; None if none was."""
        pairs = zip(self._tensors.items(), self._versions, strict=True)
        return next((name for (name, tensor), version in pairs if tensor._version != version), None)
