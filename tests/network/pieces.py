"""One Allreduce of a round's sums against several of its pieces, between two hosts; not a test.

    python -m tests.network.pieces [REPEATS]          a minute or two

Each repeat takes all sizes in turn. Printed are medians, smallest and largest, in ms; nothing is copied meanwhile.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from tests.network.conftest import succeeded
from tests.network.hosts import hosts

LINKS = ((1e9, 50e-6), (10e9, 10e-6))
ENTRIES = (815_904, 11_173_984)
"""Of FedDyn's CNN and ResNet-18."""
PIECES = (1 << 20, 4 << 20, 16 << 20)


def main(repeats: str = "7") -> None:
    """Measure on both links, and print."""
    with hosts(2) as network:
        for rate, delay in LINKS:
            network.link(rate, delay)
            print(f"{rate / 1e9:g} Gbit/s, {1e6 * delay:g} µs, load {os.getloadavg()[0]:.1f}", flush=True)
            command = [*network.mpirun(sys.executable, 2), sys.executable, "-m", __spec__.name, "rank", repeats]
            print(succeeded(network.call(command, Path.cwd())).stdout, flush=True)


def measure(repeats: int) -> None:
    """Time the sums on this rank; rank 0 prints."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for entries in ENTRIES:
        sums, seconds = np.zeros(entries, np.int64), dict[int, list[float]]()
        for repeat in range(repeats + 1):
            for size in (sums.nbytes, *PIECES):
                world.Barrier()
                began = time.perf_counter()
                for first in range(0, entries, size // 8):
                    world.Allreduce(MPI.IN_PLACE, sums[first : first + size // 8])
                if repeat:  # the first one warms up
                    seconds.setdefault(size, []).append(1e3 * (time.perf_counter() - began))
        if world.rank == 0:
            for size, each in seconds.items():
                print(f"{entries:,} in pieces of {size:,} B: {median(each):.0f} [{min(each):.0f}, {max(each):.0f}] ms")


if __name__ == "__main__":
    measure(int(sys.argv[2])) if sys.argv[1:2] == ["rank"] else main(*sys.argv[1:])
