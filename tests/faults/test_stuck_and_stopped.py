"""A rank that hangs, a second signal, two jobs in one folder, and disks that are full or read-only."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.launch import HUNG, own_line

SLOW = """
import os, time
from pathlib import Path

import torch
from mpi4py import MPI


class Linear(torch.nn.Linear):
    def __init__(self):
        super().__init__(12, 4)
        Path(f"{MPI.COMM_WORLD.rank}.pid").write_text(str(os.getpid()))

    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)
"""
AFTER_AN_ECHO = 1.5
"""Seconds after which a signal is a second one."""


@pytest.mark.one_mpi
def test_a_client_that_hangs_ends_the_job(place):
    changes = {"args": {"deed": "hang", "whose": 1, "visit": 3}, "watchdog": "2s", "checkpoint": {"keep": 2}}
    assert place.start(2, rounds=2, **changes).returncode == 0
    done = place.start(2, rounds=6, **changes)  # goes on; a process sees the client for the third time in round 5
    assert done.returncode == 4, done.stderr
    line = own_line(done.stderr)
    assert re.search(r"round 5, client 1: training, rank .*nothing moved for \d+ s.*\.log for the stack", line)
    (log,) = (place.run / "logs").iterdir()
    assert f"{log.name} for the stack" in line
    assert "misbehaving.py" in log.read_text()
    assert "in hang" in log.read_text()
    assert place.checkpoints() == [2]


@pytest.mark.one_mpi
def test_a_rank_that_hangs_is_named_though_its_log_cannot_be_written(place):
    done = place.start(2, args={"deed": "hang_unheard", "whose": 1}, watchdog="1s")
    assert done.returncode == 4, done.stderr
    said = (
        rf"rank 1 on {platform.node()}: nothing moved for \d+ s; its log, \S+/rank-1\.log, cannot be written either: "
    )
    assert re.search(said, own_line(done.stderr))


@pytest.mark.one_mpi
def test_a_rank_that_sleeps_goes_on_and_one_that_is_stopped_for_good_is_named(place):
    """The other waits for it in a round's Allreduce; a stop is longer than a client's training may take."""
    (place.path / "slow.py").write_text(SLOW)

    def stop() -> None:
        _awaited(place.run / "metrics.jsonl")
        sleeper = psutil.Process(int((place.path / "1.pid").read_text()))
        sleeper.suspend()
        time.sleep(5)
        sleeper.resume()
        rounds = len(place.rows())
        while len(place.rows()) < rounds + 3:
            time.sleep(0.1)
        sleeper.suspend()

    changes = {"model": {"factory": "slow:Linear"}, "local": {"engine": "sequential", "steps": 1, "lr": 0.01}}
    with _meanwhile(stop):
        done = place.start(2, rounds=100_000, watchdog="3s", **changes)
    assert done.returncode == 4, done.stderr
    line = own_line(done.stderr)
    assert re.search(r"waiting for other ranks, rank 0 on \S+: no sign of life from rank 1 on \S+ for 1\d s", line), (
        line
    )


@pytest.mark.soak
def test_a_slow_client_within_the_limit_ends_nothing(place):
    """Neither for the rank that trains it nor for those that wait."""
    done = place.start(2, args={"deed": "fail", "whose": 9, "nap": 1.2}, watchdog="2s")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "waits", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["waiting-in-MPI", "training"]
)
def test_a_second_signal_ends_the_job_at_once(waits, place):
    """Whether the rank that hears it waits in the round's Allreduce or is in the middle of a long client."""

    def twice() -> None:
        stuck = int(_awaited(place.path / "deed").read_text())
        time.sleep(0.5)
        caught = [pid for pid in _ranks() if (pid != stuck) == waits]
        with suppress(ProcessLookupError):
            while psutil.pid_exists(caught[0]):  # the second, by the rank's clock, may be a later one of these
                os.kill(caught[0], signal.SIGTERM)
                time.sleep(AFTER_AN_ECHO)

    with _meanwhile(twice):
        done = place.start(2, args={"deed": "hang", "whose": 1, "visit": 2})
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    line = own_line(done.stderr)
    assert "SIGTERM after SIGTERM: leaving at once, rank " in line


@pytest.mark.soak
@pytest.mark.one_mpi
def test_of_two_jobs_in_one_folder_one_refuses(place):
    """The other is not disturbed."""
    place.start(0, args={"deed": "fail", "whose": 9}, rounds=1, output="once")  # writes the recipe, which both run
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(place.start, 0, args={"deed": "wait", "whose": 0}, checkpoint={"every": 1}) for _ in range(2)
        ]
        refused = next(as_completed(started))  # while the other waits in its first round
        (place.path / "go").touch()
        done = sorted((job.result() for job in started), key=lambda job: job.returncode)
    assert [job.returncode for job in done] == [0, 2], [job.stderr for job in done]
    assert refused.result() is done[1]
    line = own_line(done[1].stderr)
    assert re.search(r"a run is going on in this folder, of process \d+ on \S+;", line)
    assert [row["round"] for row in place.rows()] == [1, 2, 3, 4]
    assert place.ending()["status"] == "finished"
    assert place.checkpoints()[-1] == 4


@pytest.fixture
def disk(place) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk on a folder of the place."""
    mounted: list[Path] = []

    def mount(name: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("needs root, to mount a small disk")
        path = place.path / name
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)], check=True)
        mounted.append(path)
        return path

    yield mount
    for path in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.one_mpi
@pytest.mark.parametrize("full", ["run/checkpoints", pytest.param("run", marks=pytest.mark.soak)])
def test_a_disk_that_fills_up_ends_the_job_and_leaves_the_checkpoint(full, place, disk):
    """With its checkpoints alone on it, and with the whole run folder: then nothing can be recorded either."""
    folder = disk(full)
    filler, done = folder / ".filler", threading.Event()

    def fill() -> None:
        _awaited(place.run / "checkpoints" / "round-00000003.json", place.run / "checkpoints" / "round-00000004.json")
        with filler.open("wb", buffering=0) as file:
            while not done.wait(0.005):
                with suppress(OSError):
                    file.write(bytes(4096))

    changes = {"algorithm": {"name": "scaffold"}, "checkpoint": {"every": 1}, "args": {"deed": "fail", "whose": 9}}
    with _meanwhile(fill, done):
        failed = place.start(2, rounds=100_000, **changes)
    assert failed.returncode == 4, failed.stderr
    line = own_line(failed.stderr)
    assert re.search(rf"rank [01] on {platform.node()}: .*cannot be written.*: got No space left on device", line)
    filler.unlink()
    kept = place.checkpoints()
    assert len(kept) >= 1
    again = place.start(2, rounds=kept[-1] + 3, **changes)
    assert again.returncode == 0, again.stderr
    assert [row["round"] for row in place.rows()] == list(range(1, kept[-1] + 4))
    assert not list(place.run.glob("previous-*"))  # it went on


@pytest.mark.one_mpi
@pytest.mark.parametrize("what", ["run", pytest.param("run/checkpoints", marks=pytest.mark.soak)])
def test_a_read_only_folder_is_refused(what, place, disk):
    if what == "run/checkpoints":  # so that there is a recipe besides
        assert place.start(0, rounds=1, checkpoint={"every": 1, "keep": 10**12}).returncode == 2
    folder = disk(what)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    done = place.start(0)
    assert done.returncode == 2, done.stderr
    line = own_line(done.stderr)
    assert "Read-only file system" in line
    assert str(folder) in line


def _awaited(*paths: Path) -> Path:
    """Wait until one of the files is there and not empty; return it."""
    deadline = time.monotonic() + HUNG
    while time.monotonic() < deadline:
        for path in paths:
            if path.exists() and path.stat().st_size:
                return path
        time.sleep(0.005)
    raise AssertionError(f"never came: {paths[0]}")


def _ranks() -> list[int]:
    """Processes that this one has started through a launcher and that run hpcfed."""
    family = psutil.Process().children(recursive=True)
    return [process.pid for process in family if process.name().startswith("python")]


@contextmanager
def _meanwhile(call: Callable[[], None], done: threading.Event | None = None) -> Iterator[None]:
    """Call a function on another thread while the block runs; it is to end when `done` is set."""
    with ThreadPoolExecutor() as pool:
        told = pool.submit(call)
        try:
            yield
        finally:
            if done is not None:
                done.set()
        told.result()
