"""Convolutions of R clients at once, each by its own weights, as batched products.

    x (R·B, C, …)  ►  columns (R·B, C·k, P): the k numbers of each channel that a place of the output sees, P places
    z = W columns,      ∇W = Σ_B D columnsᵀ,      ∇x: Wᵀ D (R·B, C·k, P), added up where windows overlap

A GPU's own convolutions take one client's weights in a call, or many as groups, far below the speed of its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """What places of the output see; each of one number an axis."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def places(self, x: Tensor) -> tuple[int, ...]:
        """Return the places of the output, by axis."""
        each = zip(x.shape[2:], *self, strict=True)
        return tuple((n + 2 * pad - gap * (k - 1) - 1) // step + 1 for n, k, step, pad, gap in each)

    def columns(self, x: Tensor) -> Tensor:
        """Return the columns, (N, C·k, P), of x (N, C, …)."""
        padded = x.contiguous()
        if any(self.padding):
            padded = torch.nn.functional.pad(x, [pad for one in reversed(self.padding) for pad in (one, one)])
        inner, places = padded.stride()[2:], self.places(x)
        strides = (
            *padded.stride()[:2],
            *(one * gap for one, gap in zip(inner, self.dilation, strict=True)),
            *(one * step for one, step in zip(inner, self.stride, strict=True)),
        )
        seen = padded.as_strided((*x.shape[:2], *self.kernel, *places), strides)
        return seen.reshape(len(x), x.shape[1] * prod(self.kernel), prod(places))

    def added(self, columns: Tensor, x: Tensor) -> Tensor:
        """Return the sums of columns (N, C·k, P) where they overlap, in x's shape."""
        about = self.kernel, self.dilation, self.padding, self.stride
        if x.dim() == 4:
            return torch.ops.aten.col2im(columns, x.shape[2:], *about)
        shape = tuple(n + 2 * pad for n, pad in zip(x.shape[2:], self.padding, strict=True))
        total = columns.new_zeros((*x.shape[:2], *shape))
        parts = columns.view(*x.shape[:2], prod(self.kernel), *self.places(x)).unbind(2)
        for part, offsets in zip(parts, product(*map(range, self.kernel)), strict=True):
            axes = zip(offsets, self.dilation, self.stride, self.places(x), strict=True)
            seen = [slice(at * gap, at * gap + step * (n - 1) + 1, step) for at, gap, step, n in axes]
            total[(slice(None), slice(None), *seen)] += part
        inner = [slice(pad, pad + n) for pad, n in zip(self.padding, x.shape[2:], strict=True)]
        return total[(slice(None), slice(None), *inner)]


def outputs(windows: Windows, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return z (R·B, O, …) and the columns, of x (R·B, C, …), weight (R, O, C, …) and bias (R, O)."""
    slots, channels = weight.shape[:2]
    columns = windows.columns(x)
    z = torch.bmm(_of_each(weight, len(x)), columns)
    if bias is not None:
        z.view(slots, -1, *z.shape[1:]).add_(bias.view(slots, 1, channels, 1))
    return z.view(len(x), channels, *windows.places(x)), columns


def slopes(
    windows: Windows, outgoing: Tensor, x: Tensor, columns: Tensor, weight: Tensor, *, passes_on: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, if it is wanted, of the weight (R, O, C, …) and of the bias (R, O)."""
    rows = outgoing.reshape(*outgoing.shape[:2], -1)
    by_slot = torch.bmm(rows, columns.transpose(1, 2)).view(len(weight), -1, *weight.shape[1:])
    dx = None
    if passes_on:
        dx = windows.added(torch.bmm(_of_each(weight, len(x)).transpose(1, 2), rows), x)
    return dx, by_slot.sum(1), rows.view(len(weight), -1, *rows.shape[1:]).sum((1, 3))


def _of_each(weight: Tensor, samples: int) -> Tensor:
    """Return each sample's matrix, (R·B, O, C·k), of weight (R, O, C, …)."""
    matrix = weight.flatten(2).unsqueeze(1)
    return matrix.expand(-1, samples // len(weight), -1, -1).reshape(samples, *matrix.shape[2:])
