"""A run whose federation, package and run folder lie in a slow folder that hosts share: right, saved, and not ended."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator

import pytest

from tests.launch import ROOT
from tests.network import share
from tests.network.conftest import Place, hpcfed_run, succeeded
from tests.network.hosts import Hosts

RATE, DELAY = 20e6, 0.002
SAVING = {"checkpoint": {"every": 1}, "watchdog": "5s"}
"""Every round is saved; a rank may wait fifty seconds for another."""


@pytest.fixture
def mounted(network: Hosts, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The folder of the recipe with a copy of the package, as two hosts see it over a slow network."""
    lacking = share.missing()
    if lacking:
        pytest.skip(f"A SHARED FOLDER IS NOT TESTED: {lacking}")
    for package in ("hpcfed", "data_prep"):
        shutil.copytree(ROOT / package, place.path / package, ignore=shutil.ignore_patterns("__pycache__"))
    place.write(**SAVING)
    network.link(rate=RATE, delay=DELAY)
    at = tmp_path_factory.mktemp("mounts") / "shared"
    with share.shared(network, place.path, "h1", ["h2", "h3"], at):
        yield Place(at)
    network.link()


def test_a_run_in_a_slow_shared_folder(network: Hosts, mounted: Place, place: Place, reference: bytes) -> None:
    """The bits of one host; it ends after two rounds, and goes on from its checkpoint with hosts in another order."""
    env = {"PYTHONPATH": str(mounted.path), "PYTHONDONTWRITEBYTECODE": "1"}
    where = [sys.executable, "-c", "import hpcfed.loop; print(hpcfed.__file__)"]
    found = succeeded(network.call(where, mounted.path, env=env, host="h2"))
    assert found.stdout.startswith(str(mounted.path))
    assert not os.path.ismount(mounted.path)  # this process sees the folder itself, at another path
    print(f"imports of the package: {found.seconds:.1f} s")
    command = hpcfed_run(network, sys.executable, 2, ["h2", "h3"])
    began = time.monotonic()
    job = network.start([*command, "rounds=2"], mounted.path, env, host="h2")
    while place.rounds() < 1 and job.poll() is None:
        time.sleep(0.05)
    print(f"first round recorded after {time.monotonic() - began:.1f} s")
    succeeded(network.finish(job))
    print(f"two rounds, saved: {time.monotonic() - began:.1f} s")
    done = succeeded(
        network.call([*hpcfed_run(network, sys.executable, 2, ["h3", "h2"])], mounted.path, env=env, host="h3")
    )
    print(f"the other two: {done.seconds:.1f} s")
    assert place.model == reference
    assert place.hosts == ["h3", "h2"]
