"""A link that is pulled before, in or after the rounds: both sides end by themselves, and the run goes on elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import hpcfed
from tests.launch import launcher, own_line, own_lines
from tests.network.conftest import Place, hpcfed_run, succeeded
from tests.network.hosts import Hosts

LONG = {"rounds": 100_000, "checkpoint": {"every": 5}, "evaluate": {"every": 0}, "watchdog": "1s"}
WAITING = 10
"""Seconds that a rank waits for others with that watchdog (`hpcfed.ranks.watchdog.WAITING`)."""
LEAVING = 60
"""Seconds that ranks and launcher take to end after that, on a busy machine."""
NAPS = """
import platform, time
from pathlib import Path
from torch import nn

def nap(moment, seconds):
    Path(f"{moment}-{platform.node()}").touch()
    time.sleep(seconds)

def build(inputs, outputs, nap_on, seconds):
    nap("start", seconds if platform.node() == nap_on else 0)
    return nn.Linear(inputs, outputs)

class Late:
    def __init__(self, seconds):
        self.seconds = seconds

    def end(self, status):
        nap("end", self.seconds)
"""
"""A factory that takes long on one host, and an observer of rank 0 that takes long when the rounds are over."""


@pytest.fixture
def pulled(network: Hosts) -> Iterator[Callable[[str], None]]:
    """Pulls a host's link; afterwards all links are up and nothing is left running."""
    names: list[str] = []

    def pull(host: str) -> None:
        names.append(host)
        network.pull(host)

    network.link(rate=100e6, delay=0.001)
    yield pull
    network.kill()
    for host in names:
        network.plug(host)


def test_both_sides_end_within_the_watchdogs_time(
    network: Hosts, python: str, place: Place, pulled: Callable[[str], None]
) -> None:
    """The launcher's side with one line; the other, which no line can leave, with its log.

    Open MPI's launcher goes on waiting for its daemon on the lost host; all ranks are gone by then.
    """
    place.write(**LONG)
    job = network.start(hpcfed_run(network, python, 2, ["h1", "h2"]), place.path)
    until(lambda: place.rounds() >= 3)
    pulled("h2")
    until(lambda: not (network.ranks("h1") or network.ranks("h2")), WAITING + LEAVING)
    if launcher(python).mpi == "Open MPI":
        network.kill()
        job.returncode = 4
    done = network.finish(job, LEAVING)
    assert done.returncode == 4, done.stderr
    lines = own_lines(done.stderr)
    assert len(lines) == 1, done.stderr
    assert re.search(
        r"round \d+: waiting for other ranks(, for clients' states)?, rank 0 on h1: no sign of life from rank 1 on h2",
        lines[0],
    )
    log = (place.path / "run" / "logs" / "rank-1.log").read_text()
    assert re.search(r"round \d+: .*: no sign of life from rank 0 on h1", log)


def napping(place: Place, start: float, end: float) -> None:
    """Write the recipe of a run that is slow to start, on the second host, and to end, on the first."""
    (place.path / "naps.py").write_text(NAPS)
    shape = {"inputs": 12, "outputs": 4}
    model = {"factory": "naps:build", "args": shape | {"nap_on": "h2", "seconds": start}}
    late = {"factory": "naps:Late", "args": {"seconds": end}}
    place.write(model=model, observers=[late], rounds=2, watchdog="1s")


@pytest.mark.parametrize(
    ("moment", "host", "lost"), [("start", "h2", "devices, data and model"), ("end", "h1", "record and observers")]
)
def test_both_sides_end_before_the_first_round_and_after_the_last(
    network: Hosts, place: Place, pulled: Callable[[str], None], moment: str, host: str, lost: str
) -> None:
    """While one rank works long, and does not wait for the other: by the silence of the other side, with any MPI."""
    napping(place, **{"start": 0.0, "end": 0.0, moment: 1e4})
    job = network.start(hpcfed_run(network, sys.executable, 2, ["h1", "h2"]), place.path)
    until((place.path / f"{moment}-{host}").exists)
    began = time.monotonic()
    pulled("h2")
    until(lambda: not (network.ranks("h1") or network.ranks("h2")), WAITING + LEAVING)
    print(f"{moment}: all ranks gone after {time.monotonic() - began:.1f} s")
    done = network.finish(job, LEAVING)
    assert done.returncode == 4, done.stderr
    (line,) = own_lines(done.stderr)
    said = rf"{moment}: {lost}, rank 0 on h1: no sign of life from rank 1 on h2 for 1\d s; .*check that host"
    assert re.search(said, line)
    log = (place.path / "run" / "logs" / "rank-1.log").read_text()
    assert re.search(rf"{moment}.*: no sign of life from rank 0 on h1 for 1\d s", log)


def test_a_slow_start_and_end_are_not_taken_for_a_lost_rank(network: Hosts, place: Place) -> None:
    """One rank takes longer than a rank may be silent."""
    napping(place, start=WAITING + 2, end=WAITING + 2)
    succeeded(network.call(hpcfed_run(network, sys.executable, 2, ["h1", "h2"]), place.path))
    assert place.rounds() == 2


def test_an_orphan_holds_the_folder_until_it_is_gone(
    network: Hosts, place: Place, pulled: Callable[[str], None]
) -> None:
    """Rank 0 on a lost host, whose watchdog is patient; then the run goes on elsewhere, to the same bits."""
    place.write(**LONG | {"watchdog": "1h"})
    job = network.start(hpcfed_run(network, sys.executable, 2, ["h2", "h3"]), place.path)
    until(lambda: place.rounds() >= 6)
    pulled("h2")
    network.kill("h1", "h3")
    network.finish(job)
    (orphan,) = network.ranks("h2")
    rounds = place.rounds() + 2
    again = [*hpcfed_run(network, sys.executable, 2, ["h3", "h4"]), f"rounds={rounds}"]
    refused = network.call(again, place.path, host="h3")
    assert refused.returncode == 2, refused.stderr
    assert re.search(r"run: a run is going on in this folder, of process \d+ on h2; ", own_line(refused.stderr))
    assert network.ranks("h2") == [orphan]

    network.kill("h2")
    succeeded(network.call(again, place.path, host="h3"))
    assert place.hosts == ["h3", "h4"]
    whole = hpcfed.run(place.path / "recipe.yaml", [f"rounds={rounds}", f"output={place.path / 'whole'}"], quiet=True)
    assert place.model == (whole.folder / "model.safetensors").read_bytes()


def until(condition: Callable[[], bool], timeout: float = 200) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not after {timeout:g} s"
        time.sleep(0.05)
