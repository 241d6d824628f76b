"""How often a process's first √ or exp on two threads is off, without and with hpcfed's first calls.

    python jobs/bench/first_calls.py                        4,000 processes for each row, five minutes on two cores
    python jobs/bench/first_calls.py --processes 20000

Each process computes a function of MKL's over one vector, half of it in each of two threads, as torch does, and then
once more. Where the two differ the first was wrong (hpcfed/arithmetic/first_calls.py). Needs MKL, and Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import threading
import time
from pathlib import Path

import numpy as np
import torch

from hpcfed.arithmetic.first_calls import make_first_calls

ROWS = {"vmsSqrt": ("√", np.float32), "vmdSqrt": ("√", np.float64), "vmsExp": ("exp", np.float32)}
"""By the function's name in MKL: what it computes, and of which numbers."""
HALF = 85_050
"""The numbers that each thread computes."""
HIGH_ACCURACY = 0x280102
"""The mode torch calls them with: high accuracy, numbers too small as 0, no errors reported."""
ABREAST = 4


def main() -> None:
    """Print a row for each function, without and with the first calls."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--processes", type=int, default=4000, help="for each row (default: %(default)s)")
    processes = args.parse_args().processes
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path))
    print(f"torch {torch.__version__}, {processes} processes a row")
    for name, (words, dtype) in ROWS.items():
        if not hasattr(library, name):
            raise SystemExit(f"{path.name} has no {name}: this torch does not use MKL's vector functions")
        function = getattr(library, name)
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        for settled in (False, True):
            errors = [error for error in errors_of(function, dtype, settled, processes) if error]
            largest = f", by up to {max(errors):,} units of the last place" if errors else ""
            how = "after the first calls" if settled else "as it is"
            print(f"{words:4} {np.dtype(dtype).name}  {how:21}  {len(errors):3} wrong{largest}", flush=True)


def errors_of(function: ctypes._NamedFuncPointer, dtype: type, settled: bool, processes: int) -> list[int]:
    """The largest error of the first call in each of `processes` fresh processes, in units of the last place."""
    x = np.random.default_rng(0).uniform(0.05, 0.95, 2 * HALF).astype(dtype)
    errors = []
    for begun in range(0, processes, ABREAST):
        readers = [_forked(function, x, settled) for _ in range(min(ABREAST, processes - begun))]
        for reader in readers:
            with os.fdopen(reader) as stream:
                errors.append(int(stream.read()))
            os.wait()
    return errors


def _forked(function: ctypes._NamedFuncPointer, x: np.ndarray, settled: bool) -> int:
    """The end of a pipe from which a new process's error can be read."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return reader
    if settled:
        make_first_calls()
    os.write(writer, str(_error(function, x)).encode())
    os._exit(0)


def _error(function: ctypes._NamedFuncPointer, x: np.ndarray) -> int:
    first, second = np.zeros_like(x), np.zeros_like(x)
    begin = threading.Event()

    def compute(half: int) -> None:
        source, target = x[half * HALF :].ctypes.data, first[half * HALF :].ctypes.data
        while not begin.is_set():
            time.sleep(0)
        function(HALF, source, target, HIGH_ACCURACY)

    threads = [threading.Thread(target=compute, args=(half,)) for half in (0, 1)]
    for thread in threads:
        thread.start()
    begin.set()
    for thread in threads:
        thread.join()
    function(x.size, x.ctypes.data, second.ctypes.data, HIGH_ACCURACY)
    steps = np.int32 if x.dtype == np.float32 else np.int64
    return int(np.abs(first.view(steps).astype(np.int64) - second.view(steps)).max())


if __name__ == "__main__":
    main()
