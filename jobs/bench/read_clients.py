"""Cost of reading clients beside copying the same bytes, and of opening files of more and more clients.

    python jobs/bench/read_clients.py [--folder /scratch] [--repeats 15]

Writes a federation of FEMNIST's size (3,400 clients, 750 MB), and two of a million samples for 100 and for 1,000,000
clients, into a temporary folder; prints ratios, each from medians of alternating repeats, with files in the page cache:

    read        20 random clients' samples, to the last byte, over copying them from an array in memory: at most 2
    open        the federation of 1,000,000 clients over that of 100, less what reading its index costs: near 1
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np

from data_prep.dataset import Dataset
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.data.storage import ACCESS

CLIENTS, COHORT, ROW = 3_400, 20, 784
BYTES = 750e6
FEW, MANY = 100, 1_000_000


def main() -> None:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description="The cost of reading clients and of opening a federation.")
    parser.add_argument("--folder", type=Path, help="where to write the files (default: $TMPDIR)")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="hpcfed-bench-") as folder:
        large = _federation(Path(folder) / "large.h5", CLIENTS, int(BYTES / CLIENTS / ROW / 4))
        for access in ACCESS:
            _reading(large, access, options.repeats)
        few, many = (_federation(Path(folder) / f"{n}.h5", n, MANY // n, row=1) for n in (FEW, MANY))
        _opening(few, many, options.repeats)


def _federation(path: Path, num_clients: int, samples: int, row: int = ROW) -> Path:
    """Write a federation of equal clients, float32 rows of `row` numbers, without labels to check."""
    n = num_clients * samples
    x = np.zeros((n, row), np.float32)
    x[:] = np.arange(n, dtype=np.float32)[:, None]
    dataset = Dataset(name="bench", task="regression", x=x, y=np.zeros((n, 1), np.float32))
    owner = np.repeat(np.arange(num_clients), samples)
    write(path, dataset, owner, num_clients, partition={"scheme": "natural"})
    return path


def _reading(path: Path, access: str, repeats: int) -> None:
    rng = np.random.default_rng(0)
    with Federation.open(path, access) as federation:
        in_memory = np.array(federation.train()[0])
        rows = len(in_memory) // CLIENTS
        target = np.empty((rows, ROW), np.float32)

        def read() -> None:
            """Get each client's rows into memory: a mapped view is still to be copied, by the conversion."""
            for k in rng.choice(CLIENTS, COHORT, replace=False):
                x, _ = federation.client(k)
                if access == "mmap":
                    target[:] = x

        def copy() -> None:
            for k in rng.choice(CLIENTS, COHORT, replace=False):
                target[:] = in_memory[k * rows : (k + 1) * rows]

        for _ in range(500):  # the whole file is in the page cache, and mapped
            read()
        reading, copying = _medians(repeats, read, copy)
    megabytes = COHORT * target.nbytes / 1e6
    print(f"read {COHORT} of {CLIENTS:,} clients, {megabytes:.1f} MB, {access:6}: {reading * 1e3:.2f} ms, "
          f"copy {copying * 1e3:.2f} ms, ratio {reading / copying:.2f}")  # fmt: skip


def _opening(few: Path, many: Path, repeats: int) -> None:
    def index_alone() -> None:
        """Read the index and check it: no way around that."""
        with h5py.File(many, "r", locking=False) as file:
            offsets = file["train/offsets"][:].astype(np.int64)
        if (offsets[1:] < offsets[:-1]).any():
            raise ValueError
        np.diff(offsets)

    small, large, alone = _medians(repeats, lambda: _open(few), lambda: _open(many), index_alone)
    print(f"open {FEW} clients: {small * 1e3:.2f} ms, {MANY:,} clients: {large * 1e3:.2f} ms, of that the index "
          f"{alone * 1e3:.2f} ms, ratio {(large - alone) / small:.2f} without it")  # fmt: skip


def _open(path: Path) -> None:
    Federation.open(path).close()


def _medians(repeats: int, *functions: Callable[[], None]) -> Iterator[float]:
    """Return each function's median time in seconds; they take turns, so that a busy spell hits all."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, times in zip(functions, seconds, strict=True):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return map(statistics.median, seconds)


if __name__ == "__main__":
    main()
