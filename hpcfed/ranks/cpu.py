"""The host's processor, from Linux's ``/proc/cpuinfo``, and its cores."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


def cpu_model() -> str:
    """Return the name of the host's processor, "" if unknown."""
    return cpu_facts().get("model name") or platform.processor()


def cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@cache
def cpu_facts() -> dict[str, str]:
    """Return the fields of the first core in ``/proc/cpuinfo``; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
