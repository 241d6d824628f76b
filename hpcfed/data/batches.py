"""In what order a client visits its samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hpcfed.data.shards import Samples

GATHERED_BYTES = 1 << 18
"""Minibatches are gathered together up to this size: few calls, and still in the cache when used."""


def minibatches(samples: Samples, batch_size: int | str, steps: int, rng: np.random.Generator) -> Iterator[Samples]:
    """Yield `steps` minibatches: the shuffled samples in pieces of `batch_size`, shuffled anew each time they run out.

    A short last piece counts as a minibatch. ``full`` yields all samples, unshuffled, each time.
    """
    x, y = samples
    if batch_size == "full" or steps == 0:
        for _ in range(steps):
            yield samples
        return
    size = int(batch_size)
    together = max(1, GATHERED_BYTES // max(1, size * x[0].nbytes))
    while steps > 0:
        order = torch.from_numpy(rng.permutation(len(y))[: steps * size]).to(x.device)
        steps -= -(-len(order) // size)
        for first in range(0, len(order), size * together):
            part = order[first : first + size * together]
            x_part, y_part = x.index_select(0, part), y.index_select(0, part)
            for start in range(0, len(part), size):
                yield x_part[start : start + size], y_part[start : start + size]
