"""Where a model's parameters lie in a vector (d,), whose gaps between tensors no part of a list sees."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.models.flat import FlatModel


class Layout(NamedTuple):
    """Where a model's parameters lie in a vector (d,).

    Attributes:
        sizes: parameters of each tensor.
        places: of the parameters, (n,) int64; None where there are no gaps.
    """

    sizes: tuple[int, ...]
    places: Tensor | None

    @property
    def size(self) -> int:
        """n."""
        return sum(self.sizes)

    def closed(self, vector: Tensor) -> Tensor:
        """Return the parameters of a vector, (d,) → (n,), or of several, (R, d) → (R, n)."""
        return vector if self.places is None else vector.index_select(-1, self.places.to(vector.device))

    def opened(self, parameters: Tensor, like: Tensor) -> Tensor:
        """Return a vector like another, (d,), with 0 in the gaps, (n,) → (d,); or several, (R, n) → (R, d)."""
        if self.places is None:
            return parameters
        zeros = parameters.new_zeros(*parameters.shape[:-1], len(like))
        return zeros.index_copy_(-1, self.places.to(like.device), parameters)


def layout_of(model: FlatModel) -> Layout:
    """Return where a model's shared parameters lie."""
    sizes = tuple(prod(view.shape) for view in model.views(model.vector).values())
    if not len(model.gaps):
        return Layout(sizes, None)
    is_parameter = model.gaps.new_ones(len(model.vector)).index_fill(0, model.gaps, 0)
    return Layout(sizes, is_parameter.nonzero().squeeze(1))
