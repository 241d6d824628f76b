"""Short measurements of arithmetic, memory copies, messages and file writes; under two seconds, not a benchmark.

Arithmetic and copies are timed on all ranks at once, as in a round, and the fastest repetition counts: it shows what
the machine can do even when it is busy. Collectives and files report the median: the time to expect.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcfed.cluster.doctor.folders import Folder
from hpcfed.io.atomic import write_whole

if TYPE_CHECKING:
    from hpcfed.ranks.world import World

SMALL, LARGE = 8, 16 * 2**20
"""Bytes of the smallest and the largest Allreduce: one number; two million parameters as int64, as in the exact
reduction.
"""
REDUCED = (SMALL, 1 << 16, LARGE)
"""Bytes of each Allreduce; on a slow network the largest is divided by 16."""
SLOW = 0.05
"""Seconds of an Allreduce of 64 KiB above which a network is slow."""
SENT = (SMALL, 1 << 20)
"""Bytes of each message that goes to another rank and back."""
PINGS = 9
ENOUGH, FEWEST, MOST = 0.05, 3, 51
"""Seconds for all repetitions of an Allreduce, and the least and greatest number of repetitions."""
ORDER = 512
"""Number of rows and of columns of the multiplied matrices; each matrix has 1 MiB, so that three fit in the cache."""
COPIED = 32 * 2**20
"""Bytes of a memory copy, larger than most caches."""
TIMED_SECONDS, FEWEST_CALLS = 0.15, 3
"""Seconds for all repetitions of a matrix product or a copy, and the least number of them."""
WRITTEN = 8 * 2**20
FILES = 5


@dataclass(frozen=True)
class Rates:
    """Measured rates and times; a gigabyte is 1e9 bytes.

    Attributes:
        gflops: GFLOP/s of a float32 matrix product on one thread, by rank; a multiply-add counts as two operations.
        copy_gb_per_s: GB/s of a memory copy, by rank.
        allreduce_small_s, allreduce_large_gb_per_s: seconds of the smallest Allreduce in `allreduce`, and GB/s of the
            largest; None with one rank.
        write_mb_per_s, small_file_s: MB/s of writing a large file and seconds of writing a small one, in the working
            folder; None if writing fails.
        allreduce: (bytes, seconds) of each Allreduce; () with one rank.
        ping_pong: (bytes, one-way seconds) of each message between rank 0 and the first rank of another host, or rank 1
            if there is only one host; () with one rank.
    """

    gflops: tuple[float, ...]
    copy_gb_per_s: tuple[float, ...]
    allreduce_small_s: float | None
    allreduce_large_gb_per_s: float | None
    write_mb_per_s: float | None
    small_file_s: float | None
    allreduce: tuple[tuple[int, float], ...] = ()
    ping_pong: tuple[tuple[int, float], ...] = ()


def measure_all(world: World, working: Folder) -> Rates:
    """Measure all `Rates`, with torch on one thread; called on every rank, same result on all."""
    torch.set_num_threads(1)
    a, b = torch.rand(ORDER, ORDER), torch.rand(ORDER, ORDER)
    product = torch.empty(ORDER, ORDER)
    source, target = torch.ones(COPIED, dtype=torch.uint8), torch.empty(COPIED, dtype=torch.uint8)
    world.gather(None)  # all start together
    gflops = 2 * ORDER**3 / 1e9 / _shortest(lambda: torch.mm(a, b, out=product))
    copied = COPIED / 1e9 / _shortest(lambda: target.copy_(source))
    rates = world.gather((gflops, copied))
    reduced = _reduced(world)
    small, (size, large) = (reduced[0][1], reduced[-1]) if reduced else (None, (0, 0.0))
    written, small_file = world.on_root(lambda: _file_speeds(working))
    return Rates(
        gflops=tuple(rate for rate, _ in rates),
        copy_gb_per_s=tuple(rate for _, rate in rates),
        allreduce_small_s=small,
        allreduce_large_gb_per_s=size / 1e9 / large if reduced else None,
        write_mb_per_s=written,
        small_file_s=small_file,
        allreduce=reduced,
        ping_pong=tuple((size, _one_way_seconds(world, size)) for size in SENT) if world.size > 1 else (),
    )


def _shortest(work: Callable[[], object]) -> float:
    """Call `work` for `TIMED_SECONDS`, but at least `FEWEST_CALLS` times; return the seconds of the shortest call."""
    times: list[float] = []
    end = time.perf_counter() + TIMED_SECONDS
    while len(times) < FEWEST_CALLS or time.perf_counter() < end:
        times.append(seconds_of(work))
    return min(times)


def _reduced(world: World) -> tuple[tuple[int, float], ...]:
    """Return (bytes, seconds) of each Allreduce in `REDUCED`; () with one rank."""
    if world.size == 1:
        return ()
    *smaller, large = REDUCED
    found = [(size, _allreduce_seconds(world, size)) for size in smaller]
    if found[-1][1] > SLOW:
        large //= 16
    return (*found, (large, _allreduce_seconds(world, large)))


def _allreduce_seconds(world: World, size: int) -> float:
    """Return rank 0's median seconds of an Allreduce of `size` bytes, repeated for about `ENOUGH` seconds."""
    buffer = np.zeros(size // 8, dtype=np.int64)
    for _ in range(2):  # the first call sets up connections
        first = world.broadcast(seconds_of(lambda: world.sum_in_place(buffer)))
    repeats = min(max(int(ENOUGH / max(first, 1e-9)), FEWEST), MOST)
    return world.broadcast(median(seconds_of(lambda: world.sum_in_place(buffer)) for _ in range(repeats)))


def _one_way_seconds(world: World, size: int) -> float:
    """Return the median one-way seconds of a message of `size` bytes between rank 0 and another host, or rank 1."""
    other = next((rank for rank, host in enumerate(world.hosts) if host != world.hosts[0]), 1)
    message = torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(PINGS if world.rank in (0, other) else 0):
        start = time.perf_counter()
        with_other = [(message, other - world.rank)]  # the other one of rank 0 and `other`
        for sends in (world.is_root, not world.is_root):
            world.exchange(with_other if sends else [], [] if sends else with_other)()
        times.append((time.perf_counter() - start) / 2)
    return world.broadcast(median(times) if times else 0.0)


def _file_speeds(folder: Folder) -> tuple[float | None, float | None]:
    """Return the MB/s of a file flushed to disk, and the seconds of a small file; (None, None) if writing fails."""
    content = np.random.default_rng(0).bytes(WRITTEN)  # incompressible
    try:
        with tempfile.TemporaryDirectory(dir=folder.path, prefix=".hpcfed-doctor-") as scratch:
            large, small = Path(scratch) / "large", Path(scratch) / "small"
            seconds = seconds_of(lambda: write_whole(large, content))
            small_seconds = median(seconds_of(lambda: write_whole(small, "{}\n")) for _ in range(FILES))
    except OSError:
        return None, None
    return WRITTEN / 1e6 / seconds, small_seconds


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call of `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
