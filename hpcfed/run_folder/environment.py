"""Record of hosts, processors and versions, on which a run's bits depend (``environment.json``)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from hpcfed.ranks.accelerators import accelerator
from hpcfed.ranks.cpu import cores, cpu_model
from hpcfed.ranks.world import World
from hpcfed.version import ARITHMETIC, __version__

PACKAGES = ("torch", "numpy", "mpi4py", "h5py", "safetensors", "pydantic")
LIBRARY_SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
    "GLIBC_TUNABLES",
)
"""Variables of the environment that make libraries compute other bits (docs/bits.md)."""


def environment(
    world: World,
    device: torch.device,
    reduction: str,
    bits: str = "native",
    *,
    deterministic: bool = True,
    unordered: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of ``environment.json``: hosts, and what bits depend on. Called on every rank.

    `unordered` are kernels of this rank's that add in any order although the run is `deterministic`.
    """
    described = world.describe()
    here = {
        "host": platform.node(),
        "kind": device.type,
        "device": (platform.processor() or "cpu") if device.type == "cpu" else accelerator(device).name(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_model(),
        "library_settings": " ".join(f"{name}={os.environ[name]}" for name in LIBRARY_SETTINGS if name in os.environ),
        "versions": _versions(described["mpi"]),
        "cores": len(cores()),
    }
    any_order = not deterministic and device.type != "cpu"
    everywhere = world.gather(here)
    kernels = sorted({name for names in world.gather(tuple(unordered)) for name in names})
    kinds = {(entry["device"], entry["instructions"], entry["library_settings"]) for entry in everywhere}
    hosts = {str(entry["versions"]): str(entry["host"]) for entry in reversed(everywhere)}
    doubts = {
        "deterministic: false, kernels of GPUs add in any order": any(world.gather(any_order)),
        f"kernels of GPUs add in any order: {', '.join(kernels)}": deterministic and bool(kernels),
        "reduction: fast adds in an order of its own": reduction != "exact",
        "the ranks differ in device, instruction set or library settings": bits != "portable" and len(kinds) > 1,
        f"the ranks differ in versions: {_on_hosts(hosts)}": len(hosts) > 1,
    }
    why_not = "; ".join(doubt for doubt, holds in doubts.items() if holds)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "hpcfed": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        **described,
        "per_rank": everywhere,
        "cpu": cpu_model(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads_per_rank": torch.get_num_threads(),
        "reduction": {"kind": reduction},
        "bits": bits,
        "arithmetic": ARITHMETIC,
        "bitwise": not why_not,
        "bitwise_why_not": why_not or None,
    }


def with_suspicions(facts: Mapping[str, Any], suspicions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of ``environment.json``, with the updates that the sentinel found to differ added if any."""
    if not suspicions:
        return dict(facts)
    first = suspicions[0]
    hows = {"rank": "on rank {other_rank}, not {rank}", "slots": "in other slots", "alone": "without neighbours"}
    how = hows[first["variant"]].format(**first)
    doubt = (
        f"from round {first['round']} on: the update of client {first['client']} was another when trained once more "
    )
    doubt += f"{how} ({first['hash']} and {first['other_hash']})"
    doubts = [facts["bitwise_why_not"]] if facts.get("bitwise_why_not") else []
    return {**facts, "bitwise": False, "bitwise_why_not": "; ".join([*doubts, doubt]), "sentinel": [*suspicions]}


def _versions(mpi: str | None) -> str:
    """Return the versions that decide this rank's bits, in one line."""
    packages = [f"{name} {_version(name)}" for name in ("torch", "numpy")]
    return ", ".join([f"Python {platform.python_version()}", *packages, mpi or "no MPI"])


def _on_hosts(hosts: Mapping[str, str]) -> str:
    return "; ".join(f"{versions} on {host}" for versions, host in sorted(hosts.items()))


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
