"""Masks of dropout, each number of which has an address: the client's keys of the step, and its place in the minibatch.

A mask is a hash of integers, so it is the same in any slot, beside any neighbours, and on any device:

    h = place ⊕ k₁,   h ← c₁ (h ⊕ h≫16),   h ← c₂ (h ⊕ h≫15 ⊕ k₂),   h ← h ⊕ h≫16,   kept where h ≥ 2³² p − 2³¹

k₁ and k₂, 32 bits each, come from the client's stream of the round. Shifts and constants are those of C. Wellons' hash
of small bias ("lowbias32", 2018); h is signed in the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpcfed.client.batched.operators.build import Mask

FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
KEYS = 2
"""Of a mask."""


class Dropping:
    """Makes the masks of a step.

    Args:
        masks: of the dropouts, in their order.

    Attributes:
        keys: that a client has for a step.
    """

    def __init__(self, masks: Sequence[Mask]):
        self._masks, self.keys = tuple(masks), KEYS * len(masks)
        self._places: dict[int, Tensor] = {}

    def masks(self, keys: Tensor, batch: int, dtype: torch.dtype) -> list[Tensor]:
        """Return masks of 0 and 1/(1−p), (R·B, …).

        Args:
            keys: of each slot, (R, keys) int32.
            batch: B.
            dtype: of the masks.
        """
        return [
            self._mask(mask, keys[:, KEYS * number : KEYS * (number + 1)], batch, dtype)
            for number, mask in enumerate(self._masks)
        ]

    def _mask(self, mask: Mask, keys: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
        count = batch * prod(mask.shape)
        if count not in self._places:
            self._places[count] = torch.arange(count, dtype=torch.int32, device=keys.device)
        hashed = self._places[count] ^ keys[:, :1]
        hashed.bitwise_xor_(_shifted(hashed, 16)).mul_(FIRST)
        hashed.bitwise_xor_(_shifted(hashed, 15)).bitwise_xor_(keys[:, 1:]).mul_(SECOND)
        hashed.bitwise_xor_(_shifted(hashed, 16))
        kept = hashed >= int(mask.p * (1 << 32)) - (1 << 31)
        return kept.to(dtype).mul_(1 / (1 - mask.p)).view(len(keys) * batch, *mask.shape)


class GivenMasks(TorchFunctionMode):
    """Has a module's dropouts take these masks, in their order."""

    def __init__(self, masks: Sequence[Tensor]):
        super().__init__()
        self._masks = iter(masks)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.dropout:
            return func(*args, **kwargs)
        given = {"training": True, "p": 0.5, **dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
        if not (given["training"] and given["p"]):
            return given["input"]
        return given["input"] * next(self._masks).view(given["input"].shape)


def _shifted(hashed: Tensor, count: int) -> Tensor:
    """Return numbers of 32 bits shifted to the right, zeros from the left."""
    return (hashed >> count).bitwise_and_((1 << (32 - count)) - 1)


def drawn_keys(count: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Return the keys of a client's steps, (steps, count) int32."""
    return rng.integers(-(1 << 31), 1 << 31, size=(steps, count), dtype=np.int32)
