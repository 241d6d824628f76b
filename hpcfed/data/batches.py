"""Shuffled minibatches: the order in which a client visits its samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hpcfed.data.cache import Samples, refuse_written, versions_of
from hpcfed.ranks.accelerators import upload

GATHERED_BYTES = 1 << 18
"""Most bytes of minibatches gathered in one call: few calls, and the data still in the CPU's cache when used."""


def minibatches(samples: Samples, batch_size: int | str, steps: int, rng: np.random.Generator) -> Iterator[Samples]:
    """Yield `steps` minibatches: the shuffled samples in pieces of `batch_size`, reshuffled at each pass.

    A short last piece counts as a minibatch. ``full`` yields all samples, unshuffled, at each step.

    Raises:
        InputError: a step with ``full`` has written to the samples.
    """
    x, y = samples
    if batch_size == "full" or steps == 0:
        versions = versions_of(samples)
        for _ in range(steps):
            yield samples
            refuse_written(samples, versions)
        return
    size = int(batch_size)
    together = max(1, GATHERED_BYTES // max(1, size * x[0].nbytes))
    for visited in _passes(len(y), size, steps, rng):
        order = upload(torch.from_numpy(visited), x.device)
        for first in range(0, len(order), size * together):
            part = order[first : first + size * together]
            x_part, y_part = x.index_select(0, part), y.index_select(0, part)
            for start in range(0, len(part), size):
                yield x_part[start : start + size], y_part[start : start + size]


def visits(
    num_samples: int, batch_size: int | str, steps: int, rng: np.random.Generator, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `minibatches` as sample numbers, (steps, width) int64, and the minibatches' sizes, (steps,) int64.

    Rows are padded with their own first sample to `width`, which is at least the largest minibatch: no filler has a
    value that is not finite where the samples' are.
    """
    if batch_size == "full":
        order = np.zeros((steps, width), np.int64)
        order[:, :num_samples] = np.arange(num_samples)
        return order, np.full(steps, num_samples)
    size = min(int(batch_size), num_samples)
    sizes = np.full(steps, size)
    if size == width and num_samples == steps * size:  # one pass without a short minibatch
        return rng.permutation(num_samples).reshape(steps, size), sizes
    passes = list(_passes(num_samples, size, steps, rng))
    if passes and size == width and sum(map(len, passes)) == steps * size:  # no minibatch is short
        return np.concatenate(passes).reshape(steps, size), sizes
    order, done = np.zeros((steps, width), np.int64), 0
    for visited in passes:
        whole, rest = divmod(len(visited), size)
        order[done : done + whole, :size] = visited[: whole * size].reshape(whole, size)
        done += whole
        if rest:
            order[done, :rest] = visited[whole * size :]
            sizes[done] = rest
            done += 1
    return np.where(np.arange(width) < sizes[:, None], order, order[:, :1]), sizes


def _passes(num_samples: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the samples in a random order, pass after pass, until they make `steps` minibatches."""
    while steps > 0:
        visited = rng.permutation(num_samples)
        yield visited if num_samples <= steps * size else visited[: steps * size]
        steps -= -(-num_samples // size)
