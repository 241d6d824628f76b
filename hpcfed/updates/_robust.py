"""The contract of robust means, the parts of ``means`` that take the place of the weighted mean.

Such a part is the first of the list. It sees what the server decoded of each client, one vector of the method after
the other; scalars, averaged buffers and ``mean_delta_sq`` stay weighted means. Users import the base as
`hpcfed.RobustMean`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from hpcfed.errors import InputError, counted
from hpcfed.types import Means
from hpcfed.updates._base import MeansPart, PartContext

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

BLOCK = 1 << 20
"""Numbers sorted at a time: what a core's cache holds."""


class ClientVectors(Protocol):
    """One vector of the m clients that count in a round: not those that were skipped, or have the weight 0.

    The order is the cohort's. All but `mean` and `weights` are collective: every rank calls them alike, and gets the
    same bits.
    """

    @property
    def mean(self) -> Tensor:
        """The weighted mean, (d,), float64."""
        ...

    @property
    def weights(self) -> np.ndarray:
        """p_i, (m,), of sum 1."""
        ...

    def weighted(self, weights: np.ndarray) -> Tensor:
        """Return Σ w_i v_i, (d,), float64, of weights (m,) from 0 to 1: one exact sum over ranks."""
        ...

    def distances(self, point: Tensor) -> np.ndarray:
        """Return ‖v_i − point‖, (m,); the point is (d,), float64. One Allreduce of m numbers."""
        ...

    def rows(self) -> Tensor:
        """Return all vectors, (m, d), in the run's dtype on the host, on each rank: for rules that say `holds_all`."""
        ...

    def squared_distances(self) -> np.ndarray:
        """Return ‖v_i − v_j‖², (m, m), likewise; the ranks share the work."""
        ...


class RobustMean(MeansPart):
    """A part of ``means`` that takes the place of the weighted mean; it keeps nothing true."""

    replaces_mean: ClassVar[bool] = True
    holds_all: ClassVar[bool] = True
    """Whether each rank needs the vectors of all clients, not of those alone that it trained."""

    @property
    def least(self) -> int:
        """Clients that a round must have; a recipe whose cohorts may have fewer is refused."""
        return 1

    def check_size(self, size: int, what: str) -> None:
        """Refuse `size` clients that are too few.

        Raises:
            InputError: saying how many `what` needs.
        """
        if size < self.least:
            remedy = "choose larger cohorts, or another mean; clients without weight, or skipped, do not count"
            expected = f"{counted(self.least, 'client')} or more in a round"
            raise InputError(what, expected=expected, got=str(size), remedy=remedy)

    def of(self, vectors: ClientVectors, context: PartContext) -> Tensor:
        """Return what takes the place of a vector's mean, (d,), float64, on the host; pure, the same on every rank."""
        raise NotImplementedError

    def after(self, means: Means, context: PartContext) -> Means:
        """Return the means as they are: `of` has made them."""
        return means


def by_columns(rows: Tensor, combined: Callable[[Tensor], Tensor]) -> Tensor:
    """Return for each entry what its m values, sorted, (m, k) float64, are combined to, (k,): (m, d) → (d,)."""
    width = max(1, BLOCK // len(rows))
    found = rows.new_empty(rows.shape[1]).double()
    for start in range(0, rows.shape[1], width):
        some = slice(start, start + width)
        found[some] = combined(rows[:, some].sort(dim=0, stable=True).values.double())
    return found
