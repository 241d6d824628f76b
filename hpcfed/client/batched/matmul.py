"""The matrix products of stacked clients: by torch's BLAS, all clients in a call, or the large ones by oneDNN.

`OneDNN` is an option of some processors (`hpcfed.ranks.platform.onednn`); `Blas` computes all products everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcfed.errors import InputError
from hpcfed.ranks.platform import onednn

LARGE = 1 << 22
"""Multiplications of one client's product from which oneDNN computes it; smaller ones are no faster there."""


class Layer(NamedTuple):
    """A linear layer of R clients.

    Attributes:
        weight: (R, outputs, inputs).
        across: the same memory as (R, inputs, outputs).
        bias: (R, outputs), or None.
        row: the same memory as (R, 1, outputs), or None.
    """

    weight: Tensor
    across: Tensor
    bias: Tensor | None
    row: Tensor | None


class Blas:
    """Every product of R clients in one call of torch's BLAS."""

    def outputs(self, layer: Layer, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale·(x Wᵀ + b), (R, B, outputs), of x (R, B, inputs)."""
        if layer.row is None:
            return _scaled(torch.bmm(x, layer.across), scale)
        return torch.baddbmm(layer.row, x, layer.across, beta=scale, alpha=scale)

    def backward(self, layer: Layer, outgoing: Tensor) -> Tensor:
        """Return D W, (R, B, inputs), of D (R, B, outputs)."""
        return torch.bmm(outgoing, layer.weight)

    def gradient(self, outgoing: Tensor, incoming: Tensor, out: Tensor) -> None:
        """Write Dᵀ h, (R, outputs, inputs), of D and h (R, B, inputs)."""
        torch.bmm(outgoing.transpose(1, 2), incoming, out=out)

    def descend(self, layer: Layer, outgoing: Tensor, incoming: Tensor, keep: float, step: float) -> None:
        """Set W to keep·W + step·Dᵀ h."""
        layer.weight.baddbmm_(outgoing.transpose(1, 2), incoming, beta=keep, alpha=step)


class OneClient(Blas):
    """Products of one client by torch's gemm, which takes less time than a batched product of one."""

    def outputs(self, layer: Layer, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale·(x Wᵀ + b); see `Blas`."""
        if layer.row is None:
            return _scaled(torch.mm(x[0], layer.across[0]), scale).unsqueeze(0)
        return torch.addmm(layer.row[0], x[0], layer.across[0], beta=scale, alpha=scale).unsqueeze(0)

    def backward(self, layer: Layer, outgoing: Tensor) -> Tensor:
        """Return D W; see `Blas`."""
        return torch.mm(outgoing[0], layer.weight[0]).unsqueeze(0)

    def gradient(self, outgoing: Tensor, incoming: Tensor, out: Tensor) -> None:
        """Write Dᵀ h; see `Blas`."""
        torch.mm(outgoing[0].t(), incoming[0], out=out[0])

    def descend(self, layer: Layer, outgoing: Tensor, incoming: Tensor, keep: float, step: float) -> None:
        """Set W to keep·W + step·Dᵀ h; see `Blas`."""
        layer.weight[0].addmm_(outgoing[0].t(), incoming[0], beta=keep, alpha=step)


class OneDNN(Blas):
    """Products of `LARGE` and more by oneDNN, a call for each client; smaller ones by BLAS."""

    def outputs(self, layer: Layer, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale·(x Wᵀ + b); see `Blas`."""
        if not _is_large(x, layer.across):
            return super().outputs(layer, x, scale)
        biases = [None] * len(x) if layer.bias is None else layer.bias.unbind()
        each = [onednn.product(*one) for one in zip(x.unbind(), layer.weight.unbind(), biases, strict=True)]
        return _scaled(torch.stack(each), scale)

    def backward(self, layer: Layer, outgoing: Tensor) -> Tensor:
        """Return D W; see `Blas`."""
        if not _is_large(outgoing, layer.weight):
            return super().backward(layer, outgoing)
        return torch.stack([onednn.product(*one) for one in zip(outgoing.unbind(), layer.across.unbind(), strict=True)])

    def gradient(self, outgoing: Tensor, incoming: Tensor, out: Tensor) -> None:
        """Write Dᵀ h; see `Blas`."""
        across = outgoing.transpose(1, 2)
        if not _is_large(across, incoming):
            super().gradient(outgoing, incoming, out)
            return
        for slot, d, h in zip(out.unbind(), across.unbind(), incoming.unbind(), strict=True):
            slot.copy_(onednn.product(d, h.T))

    def descend(self, layer: Layer, outgoing: Tensor, incoming: Tensor, keep: float, step: float) -> None:
        """Set W to keep·W + step·Dᵀ h; see `Blas`."""
        across = outgoing.transpose(1, 2)
        if not _is_large(across, incoming):
            super().descend(layer, outgoing, incoming, keep, step)
            return
        if keep != 1:
            layer.weight.mul_(keep)
        for weight, d, h in zip(layer.weight.unbind(), across.unbind(), incoming.unbind(), strict=True):
            weight.add_(onednn.product(d, h.T), alpha=step)


def matmul_for(name: str, like: Tensor) -> Blas:
    """Return what computes products, by the recipe's ``local.matmul``, of tensors like that one.

    GPUs always use torch's BLAS.

    Raises:
        InputError: oneDNN cannot be reached.
    """
    if name != "onednn" or like.device.type != "cpu":
        return Blas()
    if why := onednn.hindrance(like):
        what = f"local.matmul: onednn cannot be reached in torch {torch.__version__} ({why})"
        raise InputError(what, remedy="use local.matmul: blas")
    return OneDNN()


def _scaled(z: Tensor, scale: float) -> Tensor:
    return z if scale == 1 else z.mul_(scale)


def _is_large(left: Tensor, right: Tensor) -> bool:
    """Whether each product of (R, m, k) and (R, k, n) is."""
    return left.shape[1] * left.shape[2] * right.shape[2] >= LARGE
