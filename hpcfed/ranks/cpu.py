"""The host's processor, from Linux's ``/proc/cpuinfo``."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def cpu_model() -> str:
    """Return the name of the host's processor, "" if unknown."""
    return cpu_facts().get("model name") or platform.processor()


@cache
def cpu_facts() -> dict[str, str]:
    """Return the fields of the first core in ``/proc/cpuinfo``; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
