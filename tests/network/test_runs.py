"""Runs between hosts: the bits of one host, at any rate and delay of the network and under any launcher."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from hpcfed.lab.scaling.network import parse_network
from tests.launch import launcher
from tests.network.conftest import Place, hpcfed_run, succeeded
from tests.network.hosts import Hosts
from tests.network.slurm import missing_programs, slurm_on
from tests.slurm.conftest import PACKAGES, PMI

SLOW = {"rate": 20e6, "delay": 0.002}


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_bits_are_those_of_one_host(
    network: Hosts, python: str, ranks: int, place: Place, reference: bytes
) -> None:
    """A rank a host, and several; client states move over a slow link."""
    network.link(**SLOW)
    names = network.names[: min(ranks, 4)]
    succeeded(network.call(hpcfed_run(network, python, ranks, names), place.path))
    assert place.model == reference
    assert len(place.hosts) == ranks
    assert set(place.hosts) == set(names[: -(-ranks // -(-ranks // len(names)))])


def test_doctor_measures_the_network_and_names_the_hosts(network: Hosts, place: Place) -> None:
    """What it measures is what `hpcfed scale` predicts with."""
    network.link(rate=20e6, delay=0.02)
    doctor = [*network.mpirun(sys.executable, 2, ["h1", "h3"]), sys.executable, "-m", "hpcfed", "doctor", "--json"]
    report = place.path / "doctor.json"
    report.write_text(succeeded(network.call(doctor, place.path)).stdout)
    told = json.loads(report.read_text())
    assert [rank["host"] for rank in told["ranks"]] == ["h1", "h3"]
    (small, ping), (size, message) = told["measured"]["ping_pong"]
    assert (small, size) == (8, 1 << 20)
    assert ping > 0.02
    assert message > 8 * size / 20e6
    found = parse_network(str(report))
    assert found.latency > 0.01  # an Allreduce of 8 bytes takes one message where the model has two
    assert found.byte == pytest.approx(8 / 20e6, rel=0.5)  # this machine may be busy
    assert found.source == f"measured by hpcfed doctor on 2 ranks of 2 hosts, {report}"


@pytest.fixture
def slurm(network: Hosts) -> Iterator[dict[str, str]]:
    """A SLURM with a slurmd on each host: the variables with which its commands find it."""
    lacking = missing_programs()
    if lacking:
        pytest.skip(f"SRUN BETWEEN HOSTS IS NOT TESTED: no {', '.join(lacking)} here; {PACKAGES}")
    network.link()
    with slurm_on(network) as env:
        yield env


def test_srun(network: Hosts, python: str, slurm: dict[str, str], place: Place, reference: bytes) -> None:
    srun = ["srun", "--nodes=4", "--ntasks-per-node=1", f"--mpi={PMI[launcher(python).mpi]}", "--quiet"]
    run = [python, "-m", "hpcfed", "run", "recipe.yaml", "--quiet"]
    succeeded(network.call([*srun, *run], place.path, env=slurm))
    assert place.model == reference
    assert place.hosts == network.names
