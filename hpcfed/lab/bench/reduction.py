"""Benchmark of a round's reduction against a bare Allreduce of as many bytes, on the ranks of this job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import KINDS, RoundBuffer
from hpcfed.reduce.weighted_update import WeightedUpdate

WARM_UP = 2
UNIT = 2.0**-44
"""Fixed-point unit of the exact sums, as predicted for normally distributed entries."""
ENOUGH, FEWEST, MOST = 0.2, 3, 101


@dataclass(frozen=True)
class ReductionTime:
    """Times of summing one vector over the ranks, in milliseconds on the slowest rank: medians over repetitions.

    Attributes:
        kind, entries: the kind of sum, and the vector's number of entries.
        num_bytes: bytes of each rank's buffer in the Allreduce.
        bare: an Allreduce alone, of `num_bytes` bytes and the same type.
        floor: a lower bound of `whole`: copying the vector into the Allreduce's buffer; then, after a barrier, the bare
            Allreduce and copying its result into new memory as float64.
        whole: hpcfed's reduction: opening the buffer and adding one vector; then, after a barrier, the Allreduce and
            converting its result to float64.
        pack, allreduce, unpack: the parts of `whole`.
        over_bare, over_floor: `whole` divided by `bare` and by `floor`, medians over repetitions.
    """

    kind: str
    entries: int
    num_bytes: int
    bare: float
    floor: float
    whole: float
    pack: float
    allreduce: float
    unpack: float
    over_bare: float
    over_floor: float


def measure(world: World, entries: int, repeats: int) -> list[ReductionTime]:
    """Measure each kind of sum `repeats` times on vectors of `entries` float32 numbers.

    Called on every rank; all ranks get the same result.
    """
    torch.set_num_threads(1)
    vector = torch.from_numpy(np.random.default_rng(world.rank).standard_normal(entries, dtype=np.float32))
    return [_measure(world, kind, vector, repeats) for kind in sorted(KINDS)]


def allreduce_seconds(world: World, sizes: Sequence[int]) -> list[float]:
    """Return the median seconds, on the slowest rank, of a bare Allreduce of each size in bytes; called on every rank.

    Each Allreduce is repeated for about `ENOUGH` seconds.
    """
    found = []
    for size in sizes:
        buffer = np.zeros(size // 8, np.int64)
        one = partial(_together, world, partial(world.sum_in_place, buffer))
        first = max(world.gather(max(one() for _ in range(WARM_UP))))
        times = [one() for _ in range(min(max(int(ENOUGH / first), FEWEST), MOST))]
        found.append(float(np.median(np.max(world.gather(times), axis=0))))
    return found


def _measure(world: World, kind: str, vector: torch.Tensor, repeats: int) -> ReductionTime:
    """Measure one kind of sum, without buffers of other kinds: they would change the layout of MPI's memory."""
    buffer = RoundBuffer(len(vector), torch.float32, vector.device, world, kind=kind)
    plain = np.zeros(sum(buffer.sizes([1], world.size)), _word(kind))
    rows = []
    for _ in range(WARM_UP + repeats):
        bare = _together(world, partial(world.sum_in_place, plain))
        floor = _together(world, partial(np.copyto, plain[: len(vector)], vector.numpy(), casting="unsafe"))
        floor += _together(world, partial(_copied, world, plain, len(vector)))
        whole = _together(world, partial(_pack, buffer, vector, world))
        whole += _together(world, partial(buffer.reduce, 0, 0.0))
        rows.append((bare, floor, whole, *buffer.seconds.values()))
    return _summary(kind, len(vector), plain.nbytes, world.gather(rows))


def _pack(buffer: RoundBuffer, vector: torch.Tensor, world: World) -> None:
    buffer.open({"delta": (UNIT,)}, world.size)
    buffer.add(WeightedUpdate(world.rank, 1.0, {"delta": vector}, loss_sum=0.0, steps=1))


def _copied(world: World, words: np.ndarray, entries: int) -> np.ndarray:
    """Sum `words` over ranks in place; return the first `entries` of them as float64 in new memory."""
    world.sum_in_place(words)
    return words[:entries].astype(np.float64)


def _together(world: World, work: Callable[[], object]) -> float:
    """Return the seconds of `work` on this rank when all ranks start together."""
    world.gather(None)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _summary(kind: str, entries: int, num_bytes: int, per_rank: list[list[tuple[float, ...]]]) -> ReductionTime:
    times = 1e3 * np.array(per_rank)[:, WARM_UP:]  # (P, repeats, 6)
    slowest = times.max(axis=0)
    over_bare, over_floor = (float(np.median(slowest[:, 2] / slowest[:, base])) for base in (0, 1))
    bare, floor, whole, pack, allreduce, unpack = np.median(slowest, axis=0).tolist()
    return ReductionTime(kind, entries, num_bytes, bare, floor, whole, pack, allreduce, unpack, over_bare, over_floor)


def _word(kind: str) -> type[np.generic]:
    return np.float32 if KINDS[kind].word == torch.float32 else np.int64
