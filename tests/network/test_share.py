"""A run whose federation, package and run folder lie in a slow folder that hosts share: right, killed and resumed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator

import pytest

import hpcfed
from tests.launch import ROOT
from tests.network import share
from tests.network.conftest import Place, hpcfed_run, succeeded
from tests.network.hosts import Hosts
from tests.network.test_links import until

RATE, DELAY = 50e6, 0.0005
SAVING = {"checkpoint": {"every": 1}, "watchdog": "5s"}
"""Every round is saved; a rank may wait fifty seconds for another."""


@pytest.fixture
def mounted(network: Hosts, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The folder of the recipe with a copy of the package, as two hosts see it over a slow network."""
    lacking = share.missing()
    if lacking:
        pytest.skip(f"A SHARED FOLDER IS NOT TESTED: {lacking}")
    for package in ("hpcfed", "data_prep"):
        shutil.copytree(ROOT / package, place.path / package)  # compiled, as it is after the first job at a site
    place.write(**SAVING)
    network.link(rate=RATE, delay=DELAY)
    at = tmp_path_factory.mktemp("mounts") / "shared"
    with share.shared(network, place.path, "h1", ["h2", "h3"], at):
        yield Place(at)
    network.link()


def test_a_run_in_a_slow_shared_folder(network: Hosts, mounted: Place, place: Place) -> None:
    """The bits of one host; all ranks are killed, and it goes on from its checkpoint with hosts in another order."""
    env = {"PYTHONPATH": str(mounted.path), "PYTHONDONTWRITEBYTECODE": "1"}
    where = [sys.executable, "-c", "import hpcfed.loop; print(hpcfed.__file__)"]
    found = succeeded(network.call(where, mounted.path, env=env, host="h2"))
    assert found.stdout.startswith(str(mounted.path))
    assert not os.path.ismount(mounted.path)  # this process sees the folder itself, at another path
    print(f"imports of the package: {found.seconds:.1f} s")
    began = time.monotonic()
    many = [*hpcfed_run(network, sys.executable, 2, ["h2", "h3"]), "rounds=100000"]
    job = network.start(many, mounted.path, env, host="h2")
    until(lambda: place.rounds() >= 1 or job.poll() is not None)
    print(f"first round recorded after {time.monotonic() - began:.1f} s")
    until(lambda: any(place.path.glob("run/checkpoints/round-*.json")) or job.poll() is not None)
    for host in ("h2", "h3"):  # not sshfs, which runs there too
        for rank in network.ranks(host):
            rank.kill()
    killed = network.finish(job)
    assert killed.returncode != 0, killed.stderr
    rounds = place.rounds() + 2
    again = [*hpcfed_run(network, sys.executable, 2, ["h3", "h2"]), f"rounds={rounds}"]
    done = succeeded(network.call(again, mounted.path, env=env, host="h3", timeout=300))
    print(f"the other two: {done.seconds:.1f} s")
    assert place.hosts == ["h3", "h2"]
    assert not list((place.path / "run").glob("previous-*"))  # it went on
    whole = hpcfed.run(place.path / "recipe.yaml", [f"rounds={rounds}", f"output={place.path / 'whole'}"], quiet=True)
    assert place.model == (whole.folder / "model.safetensors").read_bytes()
