"""Modules with buffers of every dtype, or with parameters of odd shapes, by ``factory``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VALUES = {
    torch.float16: [0.5, 1.25, -2.0],
    torch.bfloat16: [0.5, 1.25, -2.0],
    torch.float32: [0.1, 1 / 3, -2.0],
    torch.float64: [0.1, 1 / 3, -2.0],
    torch.float8_e4m3fn: [0.5, 1.25, -2.0],
    torch.complex64: [0.5 + 2j, 1 / 3 - 1j, -0.25j],
    torch.complex128: [0.5 + 2j, 1 / 3 - 1j, -0.25j],
    torch.complex32: [0.5 + 2j, 1.25 - 1j, -0.25j],
    torch.int8: [-3, 0, 5],
    torch.int16: [-3, 0, 5],
    torch.int32: [-3, 0, 5],
    torch.int64: [-3, 0, 5],
    torch.uint8: [3, 0, 5],
    torch.uint16: [3, 0, 5],
    torch.uint32: [3, 0, 5],
    torch.uint64: [3, 0, 5],
    torch.bool: [True, False, True],
}
"""Values of a buffer of each dtype."""


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Buffered(nn.Module):
    """A linear model of features that a buffer of that dtype scales; a complex one by real part and phase."""

    def __init__(self, dtype: str, *, counts: bool = False, missing: bool = False) -> None:
        super().__init__()
        kind = getattr(torch, dtype)
        self.head, self.counts = nn.Linear(12, 4), counts
        values = torch.tensor(VALUES[kind], dtype=kind if kind != torch.float8_e4m3fn else torch.float32).to(kind)
        self.register_buffer("table", values)
        if missing:
            self.table[0] = torch.nan

    def forward(self, input: Tensor) -> Tensor:
        if self.counts and self.training:
            with torch.no_grad():
                self.table = self.table + 1 if self.table.dtype != torch.bool else self.table | True
        scale = self.table
        if scale.is_complex():
            scale = scale.real + 3 * scale.imag
        scaled = (
            input.view(-1, 4, 3) * scale.nan_to_num(2.0).to(input.dtype)
            if scale.is_floating_point()
            else (input.view(-1, 4, 3) * scale.to(torch.int64).to(input.dtype))
        )
        return self.head(scaled.flatten(1))


class Sparse(nn.Module):
    """A linear model of features that a sparse matrix mixes, as a graph's edges do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)
        self.register_buffer("edges", (torch.eye(12) + torch.eye(12).roll(1, 0)).to_sparse())

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(self.edges, input.t()).t())


class Large(nn.Module):
    """A buffer of a number that float32 has not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)
        self.register_buffer("bound", torch.tensor(value, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        return self.head(input).clamp(-self.bound, self.bound)


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)
        self.phase = nn.Parameter(torch.ones(12, dtype=torch.complex64), requires_grad=not frozen)

    def forward(self, input: Tensor) -> Tensor:
        return self.head((input * self.phase).real)


class Scaled(nn.Module):
    """Logits divided by a temperature of that shape, as CLIP's, which has no dimensions."""

    def __init__(self, shape: tuple[int, ...] = (), *, frozen: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)
        self.log_scale = nn.Parameter(torch.full([*shape], 0.7), requires_grad=not frozen)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(input) * self.log_scale.exp()


class Orthogonal(nn.Module):
    """An orthogonal layer: torch's parametrization has a buffer that is the transpose of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.utils.parametrizations.orthogonal(nn.Linear(12, 12)), nn.Linear(12, 4)
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.first(input))
