"""A round's vectors, kept by the ranks that trained their clients: for robust means (`hpcfed.updates._robust`), or to
be looked at.

All that ranks exchange for them are integers, or the bit patterns of numbers that one rank alone knows: results are the
same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.sums import squared_norms
from hpcfed.errors import Diverged
from hpcfed.ranks.world import World
from hpcfed.reduce.exact import ExactSum, to_float64
from hpcfed.reduce.finite import LOWER
from hpcfed.reduce.rows import rows_of
from hpcfed.reduce.units import Units, exact_terms, units_for

PIECE = 1 << 25
"""Words of an Allreduce; older MPI libraries count them in 32 bits, and may take as much memory again."""
MARGIN = 1 + 2.0**-20
"""Of a bound, for the rounding of vectors that a normalisation has multiplied."""


class KeptVectors:
    """Copies, on the host, of the vectors that this rank adds in a round."""

    def __init__(self, world: World):
        self._world = world
        self._own: dict[str, dict[int, Tensor]] = {}

    def begin(self, names: Sequence[str]) -> None:
        """Start a round with vectors of these names."""
        self._own = {name: {} for name in names}

    def keep(self, place: int, name: str, vector: Tensor, factor: float) -> None:
        """Keep ``factor·vector``, (d,), of the client at a place of the cohort, if it is a vector to be kept."""
        if name in self._own:
            copy = vector.detach().to("cpu", copy=True)
            self._own[name][place] = copy if factor == 1.0 else copy.mul_(factor)

    def gathered(self, name: str, like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of all clients by place in the cohort, (S, d), on every rank; 0 of one that was skipped."""
        return _gathered(self._own[name], size, len(like), dtype, self._world)

    def of(
        self, name: str, mean: Tensor, places: Sequence[int], shares: np.ndarray, bounds: np.ndarray, dtype: torch.dtype
    ) -> CohortVectors:
        """Return a vector of the m clients at these places, and forget it.

        Args:
            name: of the vector.
            mean: its weighted mean, (d,), float64.
            places: in the cohort, in its order; the same on every rank.
            shares: p_i, (m,).
            bounds: on each client's largest entry, (m,).
            dtype: of the kept vectors.
        """
        own = self._own.pop(name)
        rows = {row: own[place] for row, place in enumerate(places) if place in own}
        return CohortVectors(rows, mean.cpu(), shares / shares.sum(), bounds * MARGIN, dtype, self._world)


class CohortVectors:
    """See `hpcfed.updates._robust.ClientVectors`.

    Attributes:
        exchanges: Allreduces so far; one that goes in pieces counts once.
    """

    def __init__(
        self,
        own: dict[int, Tensor],
        mean: Tensor,
        weights: np.ndarray,
        bounds: np.ndarray,
        dtype: torch.dtype,
        world: World,
    ):
        self._own, self._bounds, self._dtype, self._world = own, bounds, dtype, world
        self.mean, self.weights = mean, weights
        self._rows: Tensor | None = None
        self.exchanges = 0

    def restart(self) -> None:
        """Count anew, for a rule that is called once more."""
        self.exchanges, self._rows = 0, None

    def weighted(self, weights: np.ndarray) -> Tensor:
        """Return Σ w_i v_i, (d,), float64."""
        size, counts = len(weights), weights * len(weights)
        units = self._units(counts)
        integers = torch.zeros(len(units), len(self.mean), dtype=torch.int64)
        total = ExactSum(integers, units)
        total.begin(integers, units, size, len(self._own))
        for rows, vectors in self._pieces():
            if len(rows) == 1:
                total.add(vectors[0], float(counts[rows[0]]))
            else:
                total.rows.put_all(0, vectors)
                total.add_rows(counts[rows])
        total.settle()
        self._sum(integers.numpy())
        return to_float64(integers, units, size)

    def _units(self, counts: np.ndarray) -> Units:
        """Return the units of a sum of these multiples, (m,)."""
        terms = exact_terms(self._bounds, counts, len(self.mean))
        if terms is None:
            return (1.0,)
        if not np.isfinite(terms.total):
            raise Diverged("the sum of a robust mean may have left the range of float64", remedy=LOWER)
        return units_for(terms, self._dtype)

    def distances(self, point: Tensor) -> np.ndarray:
        """Return ‖v_i − point‖, (m,)."""
        squares = np.zeros(len(self.weights))
        for rows, vectors in self._pieces():
            squares[rows] = squared_norms(torch.stack(vectors).double() - point)
        self._sum(squares)
        return np.sqrt(squares)

    def _pieces(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Yield the rows of this rank with their vectors, as many at a time as are best computed together."""
        rows, at_once = sorted(self._own), rows_of(len(self.mean), self.mean.device)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            yield some, [self._own[row] for row in some]

    def rows(self) -> Tensor:
        """Return all vectors, (m, d)."""
        if self._rows is None:
            self._rows = _gathered(self._own, len(self.weights), len(self.mean), self._dtype, self._world)
            self.exchanges += 1
        return self._rows

    def squared_distances(self) -> np.ndarray:
        """Return ‖v_i − v_j‖², (m, m)."""
        rows = self.rows()
        squares = np.zeros((len(rows), len(rows)))
        first, second = np.triu_indices(len(rows), 1)
        mine = slice(self._world.rank, None, self._world.size)
        pairs, at_once = np.stack([first[mine], second[mine]], 1), rows_of(len(self.mean), rows.device)
        for start in range(0, len(pairs), at_once):
            one, other = pairs[start : start + at_once].T
            squares[one, other] = squared_norms(rows[one].double() - rows[other].double())
        self._sum(squares)
        return squares + squares.T

    def _sum(self, numbers: np.ndarray) -> None:
        _sum(numbers, self._world)
        self.exchanges += 1


def _gathered(own: Mapping[int, Tensor], size: int, entries: int, dtype: torch.dtype, world: World) -> Tensor:
    """Return the rows of all ranks, (size, entries); 0 for one that no rank has."""
    padded = torch.zeros(size, entries + entries % 2, dtype=dtype)
    for row, vector in own.items():
        padded[row, :entries] = vector
    _sum(padded.numpy(), world)
    return padded[:, :entries]


def _sum(numbers: np.ndarray, world: World) -> None:
    """Sum integers, or bit patterns of numbers that are 0 on all ranks but one, over ranks, in place."""
    words = numbers.reshape(-1).view(np.int64)
    for start in range(0, len(words), PIECE):
        world.sum_in_place(words[start : start + PIECE])


def bytes_needed(size: int, entries: int, itemsize: int, vectors: int, ranks: int, *, all_of_them: bool) -> int:
    """Return the bytes that a rank needs for the vectors of a cohort of `size` clients.

    Args:
        entries, itemsize: d, and the bytes of a number.
        vectors: reported by each client.
        ranks: that share the cohort.
        all_of_them: whether each rank holds one vector of all clients, too.
    """
    own = -(-size // ranks) * vectors
    return (own + size * all_of_them) * entries * itemsize
