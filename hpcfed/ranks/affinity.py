"""Distance from a process's cores to its GPUs, as Linux's sysfs and NVIDIA's driver describe the machine.

A GPU is attached to one NUMA node; what cores of another node copy to it crosses the links between sockets. The order
of GPUs says nothing about it: some machines number them against the order of their cores. Distances are those of the
firmware (ACPI's SLIT): 10 within a node, more to another one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

SYSTEM = Path("/")
LOCAL, REMOTE = 10, 20
"""Distances where the machine has no table of them."""


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return a PCI device's name in sysfs."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def nvidia_addresses(system: Path = SYSTEM) -> dict[str, str]:
    """Return the PCI address of each GPU by its UUID (without ``GPU-``), from NVIDIA's driver; {} without it."""
    found = {}
    for file in sorted((system / "proc/driver/nvidia/gpus").glob("*/information")):
        text = _read(file)
        uuid = re.search(r"^GPU UUID:\s*GPU-(\S+)", text, flags=re.MULTILINE)
        if uuid:
            found[uuid[1]] = file.parent.name.lower()
    return found


def node_of_device(address: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device; None if the machine does not say."""
    text = _read(system / "sys/bus/pci/devices" / address / "numa_node").strip() if address else ""
    return int(text) if text.isdecimal() else None  # -1: not known


def nodes_of_cores(cores: Collection[int], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the NUMA nodes of cores, sorted; () if the machine does not say."""
    return tuple(sorted(node for node, own in _nodes(system).items() if not own.isdisjoint(cores)))


def distance(cores: Collection[int], address: str, system: Path = SYSTEM) -> int:
    """Return the mean distance of cores to a PCI device, rounded; `LOCAL` if nothing is known of it.

    Args:
        cores: of the process; one that may use all cores is at about the same distance from every device.
        address: of the device, ``0000:65:00.0``; "" if not known.
        system: root of the files, which tests replace.
    """
    device, nodes = node_of_device(address, system), _nodes(system)
    if device is not None and device in nodes:
        row = [int(word) for word in _read(_node_folder(device, system) / "distance").split()]
        to = {
            node: row[place] if len(row) == len(nodes) else LOCAL if node == device else REMOTE
            for place, node in enumerate(sorted(nodes))
        }
        found = [to[node] for core in cores for node, own in nodes.items() if core in own]
    else:
        near = numbers_in(_read(system / "sys/bus/pci/devices" / address / "local_cpulist")) if address else None
        found = [LOCAL if core in near else REMOTE for core in cores] if near else []
    return round(sum(found) / len(found)) if found else LOCAL


def numbers_in(text: str) -> frozenset[int]:
    """Return the numbers of a list of the kernel's, such as ``0-3,8``."""
    numbers: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def _nodes(system: Path) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node; a node of memory alone has none."""
    folders = (system / "sys/devices/system/node").glob("node[0-9]*")
    return {int(folder.name[4:]): numbers_in(_read(folder / "cpulist")) for folder in folders}


def _node_folder(node: int, system: Path) -> Path:
    return system / "sys/devices/system/node" / f"node{node}"


def _read(path: Path) -> str:
    """Return a small file's text, "" if it cannot be read, as in some containers."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
