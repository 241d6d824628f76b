"""Where a model's parameters lie in a vector (d,), whose gaps between tensors no part of a list sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.models.flat import FlatModel


@dataclass(frozen=True)
class Layout:
    """Where a model's parameters lie in a vector (d,).

    Attributes:
        sizes: parameters of each tensor.
        length: d.
        gaps: entries that are no parameters, (d − n,) int64.
    """

    sizes: tuple[int, ...]
    length: int
    gaps: Tensor

    @cached_property
    def places(self) -> Tensor | None:
        """Entries of the parameters, (n,) int64; None where there are no gaps.

        Twice the model in float32, so that no run has them whose updates go as they are.
        """
        if not len(self.gaps):
            return None
        import torch

        is_parameter = self.gaps.new_ones(self.length, dtype=torch.bool).index_fill(0, self.gaps, 0)
        return is_parameter.nonzero().squeeze(1)

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
    return Layout(sizes, len(model.vector), model.gaps)
