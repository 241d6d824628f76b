"""Short minibatches in a tile: fewer samples than the tile's shape has room for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpcfed.ranks.accelerators import upload


class Short:
    """Which rows of a tile's minibatches (R, B, …) are samples; the rest are fillers, copies of a sample.

    What fillers give is selected away, never multiplied by 0. Averages over B rows become averages over the samples by
    a factor B / samples, which is 1 where a minibatch is not short, and so changes no bit there.

    Args:
        sizes: samples of each slot's minibatch, (R,).
        width: B.
        averages: whether a loss is an average over samples, else a sum.
        like: a tensor of the run's dtype, on its device.

    Attributes:
        fillers: which rows are no samples, (R, B) bool.
        factors: (R,).
    """

    def __init__(self, sizes: np.ndarray, width: int, averages: bool, like: Tensor):
        fillers = np.arange(width) >= sizes[:, None]
        self.fillers = upload(torch.from_numpy(fillers), like.device)
        factors = width / sizes if averages else np.ones(len(sizes))
        self.factors = upload(torch.from_numpy(factors).to(like.dtype), like.device)

    @classmethod
    def of(cls, fillers: Tensor, factors: Tensor) -> Short:
        """Return one of these tensors."""
        found = cls.__new__(cls)
        found.fillers, found.factors = fillers, factors
        return found

    def selected(self, values: Tensor, axis: int = 0) -> Tensor:
        """Set fillers to 0 and multiply by the factors, in place; return `values`, (…, R, B, …), R at `axis`."""
        trailing = (1,) * (values.ndim - axis - 2)
        values.masked_fill_(self.fillers.view(*self.fillers.shape, *trailing), 0)
        return values.mul_(self.factors.view(-1, 1, *trailing))


def short_steps(sizes: np.ndarray, width: int, averages: bool, like: Tensor) -> list[Short | None]:
    """Return `Short` of each step of a round, None where no minibatch is short; steps that are alike share one.

    Args:
        sizes: of the minibatches, (R, steps); the width where a slot has no client, or its client no step.
        width, averages, like: as `Short` has them.
    """
    of_step: list[Short | None] = [None] * sizes.shape[1]
    found: dict[bytes, Short] = {}
    for step in np.flatnonzero((sizes < width).any(axis=0)).tolist():
        column = np.ascontiguousarray(sizes[:, step])
        key = column.tobytes()
        if key not in found:
            found[key] = Short(column, width, averages, like)
        of_step[step] = found[key]
    return of_step
