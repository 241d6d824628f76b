"""One suite for any number of ranks: every rank runs every test, and a test passes only if it passed on all of them.

    python -m pytest                                             one rank; tests that start mpirun themselves run here
    mpirun -n 3 python -m mpi4py -m pytest --with-mpi            three ranks

No rank starts a phase of a test (setup, call, teardown) before all ranks have agreed on how the one before ended, and
rank 0 reports for all. A rank that does not come back within ``MPI_TEST_DEADLINE`` seconds ends the session with exit
code 97 and a message from every rank. With ``CI=true`` a skipped test is a failed one, unless it needs more ranks.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.harness.agreement import MPI, Ranks
from tests.launch import Completed

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from hpcfed.ranks.world import World

FOLDER = Path(__file__).parent
SERIAL = {
    "cli",
    "data",
    "docs",
    "faults",
    "fuzz",
    "gpu",
    "harness",
    "network",
    "report",
    "reproduce",
    "slurm",
    "study",
    "sweep",
}
"""Folders whose tests start their own jobs or need one process only; they run in a world of one."""
DEADLINE = float(os.environ.get("MPI_TEST_DEADLINE", "45"))
SERIAL_DEADLINE = 6 * DEADLINE
"""Tests that start jobs give each of them a limit of its own."""
OF_THE_RANKS = {"world", "comm"}
"""Fixtures of the ranks: a test without them is the same on any number of ranks."""
THINNED = 4
"""On several ranks one in so many of the tests marked `thinned` runs, another one on each number of ranks."""
ON_CI = os.environ.get("CI") == "true"
NEXT = {"setup": "call", "call": "teardown"}

RANKS = Ranks()
TOO_FEW = pytest.StashKey[bool]()
FAILED = pytest.StashKey[bool]()
BEGAN = pytest.StashKey[float]()
COLLECTION_ERRORS = pytest.StashKey[list[str]]()
EXIT_STATUS = pytest.StashKey[int]()
TIME_TO_READ = 0.5
"""Seconds that the launcher has to read a failed session's report."""


class Outcome(NamedTuple):
    """How a phase of a test ended on one rank."""

    phase: str
    outcome: str
    expected: bool  # skipped or passed because of an xfail mark
    text: str
    sections: list[tuple[str, str]]

    def __str__(self) -> str:
        return f"{self.outcome}{' as expected' if self.expected else ''}"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[COLLECTION_ERRORS] = []
    RANKS.keep_stderr()
    if RANKS.rank != 0:
        config.option.xmlpath = None  # rank 0 writes the report for all


@pytest.hookimpl(trylast=True, specname="pytest_configure")
def pytest_configure_reporter(config: pytest.Config) -> None:
    if RANKS.rank != 0:
        config.pluginmanager.unregister(name="terminalreporter")
        silence = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
        config.pluginmanager.register(pytest.TerminalReporter(config, silence), "terminalreporter")


def pytest_report_header() -> str:
    """Name the machine: equal bits on it say nothing of other processors."""
    from tests.harness.machine import machine

    return machine()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # A rank that leaves with a code other than 0 ends the job: nobody leaves before rank 0 has printed its report, and
    # the launcher, which drops what it has not read by then, has had time to.
    sys.stdout.flush()
    RANKS.watch("the end of the session", DEADLINE)
    RANKS.exchange(None)
    if RANKS.size > 1 and config.stash.get(EXIT_STATUS, 0):
        time.sleep(TIME_TO_READ)
    RANKS.unwatch()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and ON_CI:
        report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {_reason(report.longrepr)}"
    if report.failed:
        collector.config.stash[COLLECTION_ERRORS].append(f"{report.nodeid}: {report.longrepr}")
    return report


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the folders out that run on one rank: to import them takes as long as many tests."""
    is_inside = FOLDER in collection_path.parents
    return (is_inside and collection_path.relative_to(FOLDER).parts[0] in SERIAL and RANKS.size > 1) or None


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_mark_what_is_alike(items: list[pytest.Item]) -> None:
    """Before pytest chooses by marks."""
    cases: Counter[str] = Counter()
    for item in items:
        kind, mark = item.nodeid.partition("[")[0], item.get_closest_marker("every")
        if mark and not item.get_closest_marker("soak"):
            if cases[kind] % mark.args[0]:
                item.add_marker("soak")
            cases[kind] += 1
        if item.path.relative_to(FOLDER).parts[0] in SERIAL:
            item.add_marker("serial")
        of_ranks = OF_THE_RANKS & {*getattr(item, "fixturenames", ())} or item.get_closest_marker("ranks")
        if item.get_closest_marker("serial") or not of_ranks:
            item.add_marker("alike")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        _skip_if_too_few(item)
    if RANKS.size > 1:
        left_out = {item for item in items if item.get_closest_marker("serial")}
        if "not soak" in config.option.markexpr:
            many = [item for item in items if _is_thinned(item)]
            left_out |= {item for number, item in enumerate(many) if (number + RANKS.size) % THINNED}
            left_out |= {item for item in items if item.get_closest_marker("alike")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        _agree_on_collection(config, items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    RANKS.watch(f"{item.nodeid} (setup)", _deadline(item))
    item.stash[BEGAN] = _cpu_seconds()
    try:
        return (yield)
    finally:
        RANKS.unwatch()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "teardown":
        item.user_properties.append(("cpu", f"{_cpu_seconds() - item.stash[BEGAN]:.2f}"))
    report = yield
    if ON_CI and report.skipped and not hasattr(report, "wasxfail") and not item.stash.get(TOO_FEW, False):
        report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {_reason(report.longrepr)}"
    if RANKS.size > 1:
        _agree_on_report(item, report)
    if report.failed:
        item.stash[FAILED] = True
    if call.when in NEXT:
        RANKS.watch(f"{item.nodeid} ({NEXT[call.when]})", _deadline(item))
    return report


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Intracomm]:
    """A communicator of all ranks, new for each test, so that a stray message cannot reach another test."""
    if MPI is None:
        pytest.skip("needs mpi4py and an MPI library")
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    if not request.node.stash.get(FAILED, False):  # else its number could go to another while messages are under way
        comm.Free()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """The `World` of all ranks over a communicator for this test alone; a world of one without MPI."""
    from hpcfed.ranks.world import World, world_over

    return World() if MPI is None else world_over(request.getfixturevalue("comm"))


@pytest.fixture
def shared_tmp(request: pytest.FixtureRequest) -> Path:
    """An empty folder, the same on every rank."""
    path: Path = request.getfixturevalue("tmp_path") if RANKS.rank == 0 else Path()
    return path if RANKS.size == 1 else request.getfixturevalue("comm").bcast(path, root=0)


@pytest.fixture(autouse=True)
def default_signal() -> Iterator[None]:
    """SIGUSR1 as it was: a command called in this process ends ignoring it, and no shell started then can trap it."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Completed]:
    """The ``hpcfed`` command in this process, which saves the start of another: ``command(arguments, folder)``.

    Python's warnings and what libraries say at their first import go elsewhere; a process of its own shows them.
    """
    from hpcfed.cli.main import main

    monkeypatch.delenv("HPCFED_RAW", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a copy of a factory's module is no file of ours

    def call(arguments: Sequence[object], folder: Path) -> Completed:
        monkeypatch.chdir(folder)
        capfd.readouterr()
        start = time.monotonic()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        gc.unfreeze()  # what it froze at its end, which each later run would count
        return Completed(left.value.code, *capfd.readouterr(), time.monotonic() - start)

    return call


def _cpu_seconds() -> float:
    """Seconds of this process and of the processes that it has seen end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _deadline(item: pytest.Item) -> float:
    mark = item.get_closest_marker("deadline")
    if mark:
        return float(mark.args[0])
    return SERIAL_DEADLINE if item.get_closest_marker("serial") else DEADLINE


def _is_thinned(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("thinned")) and not item.get_closest_marker("of_ranks")


def _skip_if_too_few(item: pytest.Item) -> None:
    """Apply ``ranks(n)``, and pytest-mpi's ``mpi(min_size=n)``, here: CI allows these skips and no others."""
    needed = max([mark.args[0] for mark in item.iter_markers("ranks")], default=1)
    needed = max([needed, *(mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi"))])
    if needed > RANKS.size:
        item.stash[TOO_FEW] = True
        item.add_marker(pytest.mark.skip(reason=f"needs {needed} ranks, has {RANKS.size}"))


def _agree_on_collection(config: pytest.Config, items: list[pytest.Item]) -> None:
    RANKS.watch("the collection of tests", DEADLINE)
    answers = RANKS.exchange(([item.nodeid for item in items], config.stash[COLLECTION_ERRORS]))
    RANKS.unwatch()
    errors = [f"rank {rank}: {error}" for rank, (_, found) in enumerate(answers) for error in found]
    if errors:
        pytest.exit("tests cannot be collected\n" + "\n".join(errors), returncode=3)
    for rank, (tests, _) in enumerate(answers):
        different = sorted(set(tests) ^ set(answers[0][0]))
        if tests != answers[0][0]:
            pytest.exit(f"ranks 0 and {rank} collected different tests: {different or 'the order'}", returncode=3)


def _agree_on_report(item: pytest.Item, report: pytest.TestReport) -> None:
    """Set `report` to the outcome over all ranks; they fail together, and the report names the ranks that failed."""
    phase = f"{item.nodeid} ({report.when})"
    text = _reason(report.longrepr) if report.skipped else str(report.longrepr or "")
    own = Outcome(phase, report.outcome, hasattr(report, "wasxfail"), text, report.sections if report.failed else [])
    outcomes = RANKS.exchange(own, story=f"this rank {own}:\n{text}" if report.failed else "")
    phases = {outcome.phase for outcome in outcomes}
    if len(phases) > 1:
        RANKS.give_up(f"ranks are in different tests: {sorted(phases)}")
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.outcome == "failed"]
    kinds = [str(outcome) for outcome in outcomes]
    if failed:
        report.longrepr = "\n".join(f"--- rank {rank} of {RANKS.size} ---\n{outcomes[rank].text}" for rank in failed)
        report.sections = [
            (f"rank {rank}: {title}", said) for rank in failed for title, said in outcomes[rank].sections
        ]
    elif len(set(kinds)) > 1:
        told = [f"rank {rank} {kind} {outcomes[rank].text}" for rank, kind in enumerate(kinds)]
        report.longrepr = "ranks disagree on the outcome:\n" + "\n".join(told)
    else:
        return
    report.outcome = "failed"
    vars(report).pop("wasxfail", None)


def _reason(longrepr: object) -> str:
    """The reason of a skip, from pytest's (path, line, reason)."""
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
