"""The operations of clients that machines round differently, in two kinds: by the fastest library, or portable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hpcfed.arithmetic.elementary import sqrt
from hpcfed.arithmetic.sums import sum_over_first

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Arithmetic(Protocol):
    """Operations that machines round differently, chosen by ``bits``; not element-wise +, −, · and /."""

    @property
    def portable(self) -> bool:
        """Whether results are the same on every machine."""
        ...

    def squared_norm(self, vector: Tensor) -> float:
        """Return ‖v‖² of a vector (d,)."""
        ...

    def squared_norms(self, rows: Tensor) -> np.ndarray:
        """Return ‖v‖² of each row, (R, d) → (R,)."""
        ...

    def norms(self, rows: Tensor) -> Tensor:
        """Return ‖v‖ of each row, (R, d) → (R,)."""
        ...

    def add_scaled(self, y: Tensor, x: Tensor, scale: float | Tensor) -> None:
        """Set y to y + scale·x, where the scale is a number of the host or a scalar on the device of y."""
        ...

    def decay_and_add(self, v: Tensor, decay: float, g: Tensor) -> None:
        """Set v to decay·v + g."""
        ...

    def __hash__(self) -> int: ...


class _Libraries:
    """BLAS, fused multiply-add and the C library, whatever this machine has: ``bits: native``."""

    portable = False

    def squared_norm(self, vector: Tensor) -> float:
        return float(vector.dot(vector))

    def squared_norms(self, rows: Tensor) -> np.ndarray:
        import torch

        return torch.stack([row.dot(row) for row in rows.unbind()]).numpy()

    def norms(self, rows: Tensor) -> Tensor:
        import torch

        return torch.linalg.vector_norm(rows, dim=1)

    def add_scaled(self, y: Tensor, x: Tensor, scale: float | Tensor) -> None:
        if isinstance(scale, (int, float)):
            y.add_(x, alpha=scale)
        else:
            y.addcmul_(x, scale)

    def decay_and_add(self, v: Tensor, decay: float, g: Tensor) -> None:
        import torch

        torch.add(g, v, alpha=decay, out=v)


class _Portable:
    """Every product and every sum rounded, sums by halving (`hpcfed.arithmetic.sums`): ``bits: portable``."""

    portable = True

    def squared_norm(self, vector: Tensor) -> float:
        return float(sum_over_first(vector * vector))

    def squared_norms(self, rows: Tensor) -> np.ndarray:
        return _squares(rows).numpy()

    def norms(self, rows: Tensor) -> Tensor:
        return sqrt(_squares(rows))

    def add_scaled(self, y: Tensor, x: Tensor, scale: float | Tensor) -> None:
        y.add_(x * scale)

    def decay_and_add(self, v: Tensor, decay: float, g: Tensor) -> None:
        v.mul_(decay).add_(g)


def _squares(rows: Tensor) -> Tensor:
    return sum_over_first((rows * rows).t().contiguous())


LIBRARIES: Arithmetic = _Libraries()
PORTABLE: Arithmetic = _Portable()


def arithmetic_of(bits: str) -> Arithmetic:
    """Return the arithmetic of a recipe's ``bits``."""
    return PORTABLE if bits == "portable" else LIBRARIES
