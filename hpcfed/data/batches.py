"""In what order a client visits its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.data.shards import Samples


def num_steps(num_samples: int, batch_size: int | str, steps: int | None, epochs: int | None) -> int:
    """Return how many minibatches a client computes: `steps`, or `epochs` with the short last batch of each kept."""
    if num_samples == 0:
        return 0
    if steps is not None:
        return steps
    per_epoch = 1 if batch_size == "full" else -(-num_samples // int(batch_size))
    return per_epoch * (epochs or 0)


def minibatches(samples: Samples, batch_size: int | str, steps: int, rng: np.random.Generator) -> Iterator[Samples]:
    """Yield `steps` minibatches: the shuffled samples in pieces of `batch_size`, shuffled anew each time they run out.

    A short last piece counts as a minibatch. ``full`` yields all samples, unshuffled, each time.
    """
    import torch  # here, because a recipe's cohorts are checked by `num_steps` before torch is loaded

    x, y = samples
    if batch_size == "full" or steps == 0:
        for _ in range(steps):
            yield samples
        return
    size = int(batch_size)
    while steps > 0:
        order = torch.from_numpy(rng.permutation(len(y))[: steps * size]).to(x.device)
        pieces = list(zip(_split(x, order, size), _split(y, order, size), strict=True))
        yield from pieces
        steps -= len(pieces)


def _split(tensor: Tensor, order: Tensor, size: int) -> tuple[Tensor, ...]:
    return tensor.index_select(0, order).split(size)
