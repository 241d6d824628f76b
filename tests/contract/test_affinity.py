"""Distances from cores to GPUs, from copies of machines' sysfs; and GPUs dealt by them, on whole nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpcfed.ranks.affinity import (
    distance,
    node_of_device,
    nodes_of_cores,
    numbers_in,
    nvidia_addresses,
    pci_address,
)
from hpcfed.ranks.devices import RankDevices, assign

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]


def machine(root: Path, cores: Sequence[str], distances: Sequence[str], gpus: Mapping[str, tuple[int, str]]) -> Path:
    """Write what sysfs and NVIDIA's driver show of a machine.

    Args:
        root: folder in place of ``/``.
        cores: list of each NUMA node.
        distances: row of each NUMA node.
        gpus: PCI address to (NUMA node, local cores).
    """
    for node, (own, row) in enumerate(zip(cores, distances, strict=True)):
        folder = root / "sys/devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{own}\n")
        (folder / "distance").write_text(f"{row}\n")
    for number, (address, (node, near)) in enumerate(gpus.items()):
        folder = root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{near}\n")
        told = root / "proc/driver/nvidia/gpus" / address
        told.mkdir(parents=True)
        (told / "information").write_text(f"Model: \t\t NVIDIA A100\nIRQ:   \t\t 7\nGPU UUID: \t GPU-{number}a-b\n")
    return root


QUARTERS = ["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"]
SLIT = ["10 12 12 12", "12 10 12 12", "12 12 10 12", "12 12 12 10"]
AGAINST = {f"0000:{bus}:00.0": (3 - place, QUARTERS[3 - place]) for place, bus in enumerate(("03", "41", "82", "c1"))}
"""Four GPUs of a processor in four quarters, numbered against its cores, as on Perlmutter."""


@pytest.fixture
def reversed_node(tmp_path: Path) -> Path:
    return machine(tmp_path, QUARTERS, SLIT, AGAINST)


def seen(root: Path, cores: Sequence[frozenset[int] | set[int]], gpus: Sequence[str], node: str = "n1"):
    """Each rank's row of the table, all of which see all GPUs."""
    return [RankDevices(node, tuple(gpus), distances=tuple(distance(own, gpu, root) for gpu in gpus)) for own in cores]


def indices(table: Sequence[RankDevices]) -> list[int | None]:
    return [slot.index for slot in assign(table)]


def test_what_sysfs_says_of_a_machine(reversed_node: Path) -> None:
    first = next(iter(AGAINST))
    assert nvidia_addresses(reversed_node) == {f"{number}a-b": address for number, address in enumerate(AGAINST)}
    assert [node_of_device(address, reversed_node) for address in AGAINST] == [3, 2, 1, 0]
    assert nodes_of_cores({5, 64}, reversed_node) == (0,)
    assert nodes_of_cores({5, 20}, reversed_node) == (0, 1)
    assert [distance({50, 51}, address, reversed_node) for address in AGAINST] == [10, 12, 12, 12]
    assert {distance(range(128), address, reversed_node) for address in AGAINST} == {12}  # 11.5 from anywhere
    assert pci_address(0, 0xC1, 0) == "0000:c1:00.0"
    assert numbers_in("0-2,8\n") == {0, 1, 2, 8}
    for unknown in ("", "0000:ff:00.0"):
        assert distance({5}, unknown, reversed_node) == 10
    (reversed_node / "sys/devices/system/node/node3/distance").unlink()
    assert [distance({50}, first, reversed_node), distance({5}, first, reversed_node)] == [10, 20]


def test_a_machine_that_says_less(tmp_path: Path) -> None:
    """No node of the GPU, but its cores; then neither; then no files at all, as in a container."""
    root = machine(tmp_path / "a", ["0-7"], ["10"], {"0000:01:00.0": (-1, "0-3"), "0000:02:00.0": (-1, "4-7")})
    assert node_of_device("0000:01:00.0", root) is None
    assert [distance({1, 2}, f"0000:0{bus}:00.0", root) for bus in (1, 2)] == [10, 20]
    for file in root.rglob("local_cpulist"):
        file.unlink()
    assert [distance({1, 2}, f"0000:0{bus}:00.0", root) for bus in (1, 2)] == [10, 10]
    assert (nodes_of_cores({1}, tmp_path / "none"), nvidia_addresses(tmp_path / "none")) == ((), {})
    assert distance({1}, "0000:01:00.0", tmp_path / "none") == 10


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (["0", "16", "32", "48"], [3, 2, 1, 0]),  # a core each of every quarter
        (["0", "1", "2", "3"], [0, 1, 2, 3]),  # all in one quarter: three are away, whoever they are
        (["0-127"] * 4, [0, 1, 2, 3]),  # not bound to cores
        (["0", "16", "32", "48"] * 2, [3, 2, 1, 0] * 2),  # two ranks a GPU, cyclic
        (["0", "1", "16", "17", "32", "33", "48", "49"], [3, 3, 2, 2, 1, 1, 0, 0]),  # and in blocks
        (["48"], [0]),
        (["0-127", "48"], [1, 0]),  # who is near to one only has it
    ],
)
def test_a_rank_gets_the_gpu_near_to_its_cores(reversed_node: Path, cores: list[str], expected: list[int]) -> None:
    table = seen(reversed_node, [numbers_in(own) for own in cores], list(AGAINST))
    if cores == ["0", "1", "2", "3"]:
        assert sorted(indices(table)) == expected
        assert 3 in indices(table)
    else:
        assert indices(table) == expected
    both = [*table, *(RankDevices("n2", row.devices, distances=row.distances) for row in table)]
    assert indices(both) == 2 * indices(table)


def test_a_little_nearer_counts_before_first() -> None:
    gpus, far = tuple(f"GPU-{number}" for number in range(8)), (12,) * 7
    assert indices([RankDevices("n", gpus, distances=(*far, 11))] * 2) == [0, 7]
    assert indices([RankDevices("n", gpus, distances=(*far, 11))]) == [7]


def test_loads_are_even_first_and_distances_least_then() -> None:
    """Beside all assignments of small nodes: three GPUs, four ranks, any distances and any GPU hidden."""
    gpus = ("a", "b", "c")
    for case in range(60):
        digits = [(case * 7 + 5 * place * place + place) % 4 for place in range(12)]
        rows = []
        for rank in range(4):
            hidden = digits[rank] if case % 2 else 3
            visible = [place for place in range(3) if place != hidden]
            rows.append(
                RankDevices(
                    "n",
                    tuple(gpus[place] for place in visible),
                    "cuda",
                    tuple(10 + digits[3 * rank + p] for p in visible),
                )
            )
        slots = assign(rows)

        def cost(choice: Sequence[int], rows: Sequence[RankDevices] = rows) -> tuple[int, int]:
            loads = Counter(row.devices[index] for row, index in zip(rows, choice, strict=True))
            return (
                sum(load * load for load in loads.values()),
                sum(row.distances[index] for row, index in zip(rows, choice, strict=True)),
            )

        best = min(cost(choice) for choice in itertools.product(*(range(len(row.devices)) for row in rows)))
        assert cost([slot.index or 0 for slot in slots]) == best
