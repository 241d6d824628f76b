"""Sums in a stated order, and matrix products by them: element-wise additions of whole arrays alone; and norms.

The order is halving: of n terms the last ⌊n/2⌋ are added to the first ⌊n/2⌋, term by term, then likewise the ⌈n/2⌉ that
are left, down to one. Neither the other axes nor how they are cut into pieces change a sum's bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Array = TypeVar("Array", "Tensor", "np.ndarray")

PIECE_BYTES = 1 << 21
"""Products at a time: what a core's cache holds."""
BLOCK = 1 << 14
"""Squares at a time, likewise."""
LEAF, LANES = 128, 8
"""Numbers that NumPy's sum does not halve further, and the sums that it keeps of them."""


def sum_over_first(terms: Array) -> Array:
    """Return the sum over the first axis, (n, …) → (…); `terms` are overwritten."""
    count = len(terms)
    if not count:
        return terms.sum(0)
    while count > 1:
        half = count // 2
        count -= half
        first = terms[:half]
        first += terms[count : count + half]
    return terms[0]


def contracted(left: Tensor, right: Tensor, *, in_pieces: bool = True) -> Tensor:
    """Return Σ_n left · right for each of R pairs of matrices: (n, A, R), (n, R, M) → (A, R, M).

    Each product is rounded, then added; many of them piece by piece along R and M, which leaves every sum as it is.
    """
    count, outputs, rows = left.shape
    width = right.shape[2]
    a_row = max(1, count * outputs * width * left.element_size())
    if not in_pieces or rows * a_row <= PIECE_BYTES:
        return sum_over_first(left.unsqueeze(3) * right.unsqueeze(1))
    out = left.new_empty(outputs, rows, width)
    together, columns = max(1, PIECE_BYTES // a_row), max(1, width * PIECE_BYTES // a_row)
    for row in range(0, rows, together):
        some = slice(row, row + together)
        for column in range(0, width, columns):
            part = slice(column, column + columns)
            out[:, some, part] = sum_over_first(left[:, :, some].unsqueeze(3) * right[:, some, part].unsqueeze(1))
    return out


def squared_norm(vector: Tensor) -> float:
    """Return ‖v‖² of a vector (d,), by NumPy's sum, whose order is the same on every processor; on a GPU, too.

    BLAS's dot product takes a third of the time, but its bits differ between processors: it is for numbers that one
    rank computes, not for those that all ranks must share.
    """
    import numpy as np

    if vector.device.type != "cpu":
        return norm_from(sums_of_squares(vector).cpu(), len(vector))
    with np.errstate(over="ignore"):  # of a run that diverges
        entries = vector.numpy()
        blocks = [np.square(entries[first : first + BLOCK]).sum() for first in range(0, len(entries), BLOCK)]
        return float(np.sum(blocks))


def squared_norms(rows: Tensor) -> np.ndarray:
    """Return ‖v‖² of each row, (n, d) on the host → (n,), as `squared_norm` does; of small ones in one call."""
    import numpy as np

    if rows.shape[1] > BLOCK:
        return np.array([squared_norm(row) for row in rows])
    with np.errstate(over="ignore"):
        return np.asarray(np.square(rows.numpy()).sum(1))


def sums_of_squares(vector: Tensor) -> Tensor:
    """Return what `norm_from` takes of a vector (d,) in a GPU's memory, there: few numbers, of which nobody has waited.

    They are the sums of squares of each `BLOCK`, as NumPy adds them, and the squares of what fills none. NumPy halves a
    block down to `LEAF` numbers, and adds those in `LANES` interleaved sums. Whole arrays are added here, element by
    element, in that order.
    """
    import torch

    squares = vector * vector
    whole = len(vector) // BLOCK
    leaves = squares[: whole * BLOCK].view(-1, LEAF // LANES, LANES)
    sums = leaves[:, 0] + leaves[:, 1]
    for row in range(2, LEAF // LANES):
        sums += leaves[:, row]
    sums = sums.view(-1)
    while len(sums) > whole:  # neighbours: the lanes of a leaf, then halves of a block
        sums = sums[0::2] + sums[1::2]
    return torch.cat([sums, squares[whole * BLOCK :]])


def norm_from(sums: Tensor, entries: int) -> float:
    """Return ‖v‖² of a vector of so many entries from its `sums_of_squares`, on the host."""
    import numpy as np

    read, whole = sums.numpy(), entries // BLOCK
    with np.errstate(over="ignore"):
        return float(np.sum(np.append(read[:whole], read[whole:].sum()) if len(read) > whole else read))
