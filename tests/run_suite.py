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
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
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
    "tests/cli/test_allreduce_count.py",
    "tests/cli/test_doctor.py",
)
"""Of those, what starts jobs by that MPI's launcher."""
ONE_MORE = ("-m", "not soak and not one_mpi")
"""On a second MPI: the tests whose result may differ from the first's."""
APART = ("tests/contract", "tests/data", "tests/numerics"), ("tests/cli",), ("tests/faults", "tests/harness")
"""Folders that have a launch of their own on one rank, by group; the others are in one more."""
SIDE_BY_SIDE = 3
"""Launches of one rank that run at the same time, one of them mostly waiting."""


def _files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


LEFT_OUT = {
    1: ("tests/mpi", "tests/numerics/test_reference.py"),
    2: ("tests/contract", "tests/numerics", *_files("device", "accelerators", "counts", "parameters")),
    3: (
        "tests/device",
        *_files("contract", "add_a_method", "engines", "layers", "methods", "products"),
        *_files("numerics", "client", "closed_problems", "models", "quadratics", "tasks"),
        *_files("mpi", "bad_clients", "clients_evaluated", "measurements", "models", "observers", "replay", "verify"),
        *_files("mpi", "metrics", "trail"),
    ),
    4: (
        *("tests/contract", "tests/device", "tests/numerics"),
        *_files("mpi", "bad_clients", "clients_evaluated", "measurements", "models", "observers", "resume", "sweep"),
        *_files("mpi", "metrics", "parameters", "replay", "shipped_recipes", "signs_of_life", "trail", "verify"),
        *_files("mpi", "rebinding", "tensor_kinds", "own_shapes"),
    ),
}
"""What says nothing new at a rank count: references are followed on 3 ranks, tests/mpi whole on 2."""
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
        return f"{launcher(self.python).mpi:8}  {self.ranks} rank{'s' if self.ranks > 1 else ' '}"


@dataclass(frozen=True)
class Ending:
    """How a launch ended: number of tests by outcome, wall time in seconds, and its output if it is to be shown."""

    counts: Counter[str]
    seconds: float
    trouble: str = ""
    output: str = ""


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
    of_the_mpi = tuple(folder for folder in OF_THE_MPI if (ROOT / folder).is_dir())
    second = [Launch(options.openmpi, 1, (*ONE_MORE, *OF_A_LAUNCHER))] if options.openmpi else []
    if options.soak:
        for ranks in options.ranks * options.soak:
            for python in filter(None, (sys.executable, options.openmpi)):
                what = of_the_mpi if python == options.openmpi else tuple(f"--ignore={path}" for path in ELSEWHERE)
                yield (Launch(python, ranks, ("-m", "", *what)),)
        return
    for ranks in options.ranks:
        left_out = () if options.paths else (*LEFT_OUT.get(ranks, ()), *ELSEWHERE)
        ignored = tuple(f"--ignore={path}" for path in left_out)
        whole = Launch(sys.executable, ranks, (*options.paths, *ignored))
        if ranks > 1 or options.paths:
            yield (whole,)
        else:
            rest = (*whole.arguments, *(f"--ignore={path}" for group in APART for path in group))
            apart = (Launch(sys.executable, 1, (*group, *ignored)) for group in APART)
            yield Launch(sys.executable, 1, rest), *apart, *second
    if options.openmpi and not options.paths:
        left_out = (path for path in LEFT_OUT[3] if path.startswith(of_the_mpi))
        yield (Launch(options.openmpi, 3, (*ONE_MORE, *of_the_mpi, *(f"--ignore={path}" for path in left_out))),)


def run(planned: Launch, timeout: float) -> Ending:
    """Run one launch and read the report that its rank 0 left."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = ["--with-mpi", "--color=no", "-p", "no:cacheprovider", f"--junitxml={report}", *planned.arguments]
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
        counts = _read(report)
    trouble = ""
    if done.returncode != 0:
        trouble = f"exit code {done.returncode}"
    elif counts.total() == 0:
        trouble = "ran no test, or left no report"
    if trouble and not counts["failed"]:
        counts["failed"] = 1  # the launch hung or crashed, and no test of it could say so
    return Ending(counts, done.seconds, trouble, done.stdout + done.stderr)


def _read(report: Path) -> Counter[str]:
    """Count a JUnit report's tests by outcome; empty, where a session ended before it wrote one."""
    counts: Counter[str] = Counter()
    if not report.exists():
        return counts
    outcomes: dict[tuple[str | None, str | None], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = case.get("classname"), case.get("name")
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes[test] = "failed"
        elif case.find("skipped") is not None:
            outcomes.setdefault(test, "skipped")
        else:
            outcomes.setdefault(test, "passed")
    return Counter(outcomes.values())


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
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds that one launch may take")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
