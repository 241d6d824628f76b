"""Run the suite at 1, 2, 3 and 4 ranks, one process per rank and rank count (what ``make test`` calls).

    python -m tests.run_suite                       on the MPI of this environment
    python -m tests.run_suite --openmpi PYTHON      and what depends on the MPI on that of another environment as well
    python -m tests.run_suite --device gpu          what trains on a GPU, on this machine's (``make test-gpu``)

A launch counts only if it ended in time, with exit code 0, and left a report. The first line names the processor and
torch's kernels, since bits on another say nothing; the last line adds up all launches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

import psutil
import torch

from hpcfed.ranks.cpu import cores
from tests.harness.machine import machine
from tests.launch import ROOT, Overtime, launch, launcher

LONG = 4 * 3600.0
"""Seconds that a launch with the soak tests may take."""
OF_THE_MPI = ("tests/mpi", "tests/faults", "tests/cli")
"""Folders whose tests depend on the MPI library and its launcher."""
OF_A_LAUNCHER = (
    "tests/faults",
    "tests/cli/test_run.py",
    "tests/cli/test_doctor.py",
)
"""Of those, what starts jobs by that MPI's launcher."""
ONE_MORE = ("-m", "not soak and not one_mpi")
"""On a second MPI: the tests whose result may differ from the first's."""
ON_ONE_RANK_TOO = ("-m", "not soak and (alike or thinned and not of_ranks)")
"""Of files that run on several ranks: what would be the same there, or is of a kind of which some run there."""
APART = (
    ("tests/cli",),
    ("tests/study", "tests/sweep", "tests/report"),
    ("tests/contract", "tests/device", "tests/numerics"),
    ("tests/faults", "tests/harness"),
)
"""Folders that have a launch of their own on one rank, by group, the longest first; the others are in one more."""
SIDE_BY_SIDE = max(3, len(cores()))
"""Launches of one rank that run at the same time; one of three mostly waits."""
MEMORY_DISK, ROOM = Path("/dev/shm"), 4 << 30
"""Where launches of runs write, which else wait for the disk, and the bytes that it must have free."""
OF_DISKS = ("tests/cli", "tests/faults")
"""What is tested on a disk; so are the folders that have no launch of their own, tests/data among them."""


def _files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


OF_FOUR = (
    *(
        f"test_a_run_is_the_same_as_alone[{case}]"
        for case in ("plain-fedavg", "two-clients-scaffold", "float64-scaffold")
    ),
    "test_states_that_move_to_where_their_clients_are_trained_change_nothing[feddyn]",
    "test_a_round_that_is_run_twice_is_the_same_as_alone",
)
"""Tests of the first file of ranks that run on four, too."""
SEVERAL = {
    2: (
        *_files("mpi", "bad_clients", "clients_evaluated", "corruption", "given", "measurements", "metrics", "models"),
        *_files("mpi", "moving_states", "neighbours", "observers", "own_shapes", "parameters", "portable"),
        *_files("mpi", "read_modules", "rebinding", "replay", "shared_sums", "shipped_recipes"),
        *_files("mpi", "sweep", "tensor_kinds", "tile_recorded", "trail", "updates", "verify", "without", "world"),
        *_files("contract", "add_a_method", "client_states", "devices", "exact_sums", "fast_sums", "own_step"),
        *_files("contract", "stopping", "units", "updates"),
        *_files("device", "faults", "mixed"),
    ),
    3: (
        *_files("mpi", "corruption", "drawn", "moving_states", "resume", "rounds", "same_result", "secure"),
        *_files("mpi", "sentinel", "shared_sums", "signs_of_life", "world"),
        *_files("contract", "combinations", "worked_methods"),
    ),
    4: (
        *_files("mpi", "moving_states", "shared_sums", "world"),
        *(f"tests/mpi/test_same_result.py::{test}" for test in OF_FOUR),
    ),
}
"""The files that run on several ranks, by their number; on one, only what is alike or thinned of them."""
ELSEWHERE = ("tests/slurm", "tests/docs", "tests/network", "tests/gpu")
"""They have targets of their own: ``make test-slurm``, ``make test-docs``, ``make test-network``, ``make test-gpu``."""
REBOUND = "test_it_trains_as_its_twin_that_writes_in_place"
OF_A_DEVICE = (
    (1, ("tests/gpu",)),
    (1, _files("contract", "tiles")),
    (1, _files("contract", "methods", "worked_methods", "client_states", "combinations")),
    (1, _files("contract", "add_a_method", "own_step", "stopping")),
    (1, (*_files("mpi", "tensor_kinds", "tile_recorded"), "tests/mpi/test_rebinding.py::" + REBOUND)),
    (2, _files("mpi", "same_result", "moving_states", "bad_clients", "sentinel", "models")),
    (2, _files("mpi", "parameters", "replay", "verify", "resume", "metrics", "clients_evaluated")),
    (4, _files("mpi", "same_result", "models")),
)
"""Launches on a device: ranks, and tests whose recipes ``HPCFED_TEST_DEVICE`` moves to it."""
NO_GPU = """
torch sees no GPU: NOTHING WAS TESTED ON ONE
(HPCFED_TEST_DEVICE=cuda makes that a failure, HPCFED_TEST_DEVICE=stub tries the tests on the strict device)
"""


@dataclass(frozen=True)
class Launch:
    """One pytest session: its interpreter (and by that its MPI), rank count and pytest arguments."""

    python: str
    ranks: int
    arguments: tuple[str, ...]

    @property
    def label(self) -> str:
        folders = [one.removeprefix("tests/") for one in self._named if one.count("/") == 1]
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ' '}"
        return f"{launcher(self.python).mpi:8}  {ranks}  {' '.join(folders):18.18}"

    @property
    def spares_the_disk(self) -> bool:
        """Whether its tests only run, and need no disk that keeps what they write."""
        return self.ranks > 1 or (bool(self._named) and not any(one.startswith(OF_DISKS) for one in self._named))

    @property
    def _named(self) -> list[str]:
        return [one for one in self.arguments if one.startswith("tests/")]


@dataclass(frozen=True)
class Ending:
    """How a launch ended: number of tests by outcome, wall time in seconds, its output if it is to be shown, and the
    CPU seconds of each test on rank 0, with the processes that it started.
    """

    counts: Counter[str]
    seconds: float
    trouble: str = ""
    output: str = ""
    costs: Counter[str] = field(default_factory=Counter)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all launches, print a line for each and their sum, and return the exit code."""
    options = _parse(arguments)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end_all)
    print(machine(), flush=True)
    if options.device:
        os.environ["HPCFED_TEST_DEVICE"] = kind = "cuda" if options.device == "gpu" else options.device
        if kind == "cuda" and not torch.cuda.is_available():
            print(NO_GPU)
            return 1 if options.device == "cuda" else 0
        print(f"on {torch.cuda.get_device_name() if kind == 'cuda' else kind}", flush=True)
    at_once = max(1, len(cores()) // 2) if options.device else SIDE_BY_SIDE
    total: Counter[str] = Counter()
    for side_by_side in plan(options):
        with ThreadPoolExecutor(at_once) as pool:
            endings = pool.map(partial(run, timeout=LONG if options.soak else options.timeout), side_by_side)
            for planned, ending in zip(side_by_side, endings, strict=True):
                total += ending.counts
                if ending.trouble:
                    print(ending.output)
                outcome = f"{_closing_line(ending.counts)}  {ending.trouble}".rstrip()
                print(f"{planned.label}  {ending.seconds:6.1f} s  {outcome}", flush=True)
                if options.costs:
                    print(_costliest(ending.costs, options.costs), flush=True)
    print(_closing_line(total))
    return 1 if total["failed"] else 0


def _end_all(number: int, _: FrameType | None) -> None:
    """End this process with all that it has started, which have sessions of their own."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(128 + number)


def plan(options: argparse.Namespace) -> Iterator[tuple[Launch, ...]]:
    """Yield groups of launches that run side by side; those of several ranks run alone, because waiting ranks spin."""
    if options.device and not options.paths:
        yield tuple(Launch(sys.executable, ranks, ("-v", *paths)) for ranks, paths in OF_A_DEVICE)
        return
    second = [Launch(options.openmpi, 1, (*ONE_MORE, *OF_A_LAUNCHER))] if options.openmpi else []
    if options.soak:
        for ranks in options.ranks * options.soak:
            for python in filter(None, (sys.executable, options.openmpi)):
                what = OF_THE_MPI if python == options.openmpi else tuple(f"--ignore={path}" for path in ELSEWHERE)
                yield (Launch(python, ranks, ("-m", "", *what)),)
        return
    for ranks in options.ranks:
        if options.paths or ranks > 1:
            yield (Launch(sys.executable, ranks, tuple(options.paths) or SEVERAL[ranks]),)
        else:
            yield *(Launch(sys.executable, 1, what) for what in _of_one_rank()), *second
    if options.openmpi and not options.paths:
        of_the_mpi = (path for path in SEVERAL[3] if path.startswith(OF_THE_MPI))
        yield (Launch(options.openmpi, 3, (*ONE_MORE, *of_the_mpi)),)


def _of_one_rank() -> Iterator[tuple[str, ...]]:
    """Yield the arguments of the launches of one rank, the longest first."""
    several = {path.partition("::")[0] for paths in SEVERAL.values() for path in paths}
    ignored = tuple(f"--ignore={path}" for path in sorted({"tests/mpi", *several}))
    yield from ((*group, *ignored) for group in APART)
    yield (*ignored, *(f"--ignore={path}" for group in (*APART, ELSEWHERE) for path in group))
    slow = {*_files("mpi", "shipped_recipes")}  # to collect, and nothing in it is alike
    yield (*ON_ONE_RANK_TOO, *sorted(several - slow))


def run(planned: Launch, timeout: float) -> Ending:
    """Run one launch and read the report that its rank 0 left."""
    in_memory = planned.spares_the_disk and MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK if in_memory else None) as folder:
        report = Path(folder) / "report.xml"
        pytest = ["--with-mpi", "--color=no", "-p", "no:cacheprovider", f"--junitxml={report}", *planned.arguments]
        if in_memory:
            pytest += [f"--basetemp={folder}/tmp", "-o", "tmp_path_retention_policy=failed"]
        try:
            done = launch(
                planned.ranks if planned.ranks > 1 else 0,
                pytest,
                program=("-m", "mpi4py", "-m", "pytest") if planned.ranks > 1 else ("-m", "pytest"),
                python=planned.python,
                timeout=timeout,
                cwd=ROOT,
            )
        except Overtime as overtime:
            return Ending(Counter(failed=1), timeout, f"stopped after {timeout:g} s", str(overtime))
        counts, costs = _read(report)
    trouble = ""
    if done.returncode != 0:
        trouble = f"exit code {done.returncode}"
    elif counts.total() == 0:
        trouble = "ran no test, or left no report"
    if trouble and not counts["failed"]:
        counts["failed"] = 1  # the launch hung or crashed, and no test of it could say so
    return Ending(counts, done.seconds, trouble, done.stdout + done.stderr, costs)


def _read(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Return a JUnit report's tests by outcome and CPU seconds by test; empty, where a session wrote none."""
    costs: Counter[str] = Counter()
    if not report.exists():
        return Counter(), costs
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}"
        for measured in case.iterfind("properties/property[@name='cpu']"):
            costs[test] += float(measured.get("value", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes[test] = "failed"
        elif case.find("skipped") is not None:
            outcomes.setdefault(test, "skipped")
        else:
            outcomes.setdefault(test, "passed")
    return Counter(outcomes.values()), costs


def _costliest(costs: Counter[str], number: int) -> str:
    """Return lines with CPU seconds: of all tests, and of the `number` files and tests that took most."""
    files: Counter[str] = Counter()
    for test, seconds in costs.items():
        files[test.partition("::")[0]] += seconds
    most = [("in all", costs.total()), *files.most_common(number), *costs.most_common(number)]
    return "\n".join(f"  {seconds:8.1f} s  {name}" for name, seconds in most)


def _closing_line(counts: Counter[str]) -> str:
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the test suite at several rank counts.")
    parser.add_argument("paths", nargs="*", help="tests to run on this environment's MPI (default: all)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4], metavar="N", help="rank counts")
    parser.add_argument(
        "--device", choices=["gpu", "cuda", "stub", "cpu"], help="train on it; gpu: if there is one, cuda: it must be"
    )
    parser.add_argument("--openmpi", metavar="PYTHON", help="interpreter of an environment with Open MPI")
    parser.add_argument(
        "--soak", type=int, default=0, metavar="N", help="run everything N times, the long tests included"
    )
    parser.add_argument("--costs", type=int, default=0, metavar="N", help="show the N files and tests that cost most")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds that one launch may take")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
