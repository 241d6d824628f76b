"""Buffers of a module, such as BatchNorm's running statistics, read and written as flat vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpcfed.types import BUFFERS, State

INTEGERS = "integers"
"""Name of the second vector in a state, beside `BUFFERS`; one without entries is left out."""


class BufferGroup:
    """Some of a module's buffers: floating-point ones as ``buffers`` (m,), all others as ``integers`` (k,) int64.

    A complex number counts as two floating-point ones, its real and its imaginary part. They are looked up at each
    call, since a module may replace a buffer in its forward pass.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        self._module = module
        is_float = {name: _has_fractions(module.get_buffer(name)) for name in names}
        kinds = {kind: [name for name in names if is_float[name] == (kind == BUFFERS)] for kind in (BUFFERS, INTEGERS)}
        self._names = {kind: own for kind, own in kinds.items() if own}

    def __bool__(self) -> bool:
        return bool(self._names)

    def read(self) -> State:
        """Return copies of the buffers."""
        return {kind: torch.cat([_flat(tensor) for tensor in self._tensors(kind)]) for kind in self._names}

    def write(self, state: State) -> None:
        """Set the buffers to what `read` returned."""
        for kind in self._names:
            tensors = self._tensors(kind)
            pieces = state[kind].split([tensor.numel() * (1 + tensor.is_complex()) for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                if tensor.is_complex():
                    piece = torch.view_as_complex(piece.view(*tensor.shape, 2))
                tensor.copy_(piece.view(tensor.shape))

    def _tensors(self, kind: str) -> list[Tensor]:
        return [self._module.get_buffer(name).detach() for name in self._names[kind]]


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.flatten() if tensor.is_floating_point() else tensor.flatten().to(torch.int64)
