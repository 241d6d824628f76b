"""The host's processor, from Linux's ``/proc/cpuinfo``."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def cpu_model() -> str:
    """Return the name of the host's processor, "" if unknown."""
    return _told().get("model name") or platform.processor()


def favours_onednn() -> bool:
    """Tell whether oneDNN computes large float32 products faster than MKL: on AVX-512 processors not by Intel."""
    vendor, flags = _told().get("vendor_id", "GenuineIntel"), _told().get("flags", "").split()
    return vendor != "GenuineIntel" and "avx512f" in flags


@cache
def _told() -> dict[str, str]:
    """Return the fields of the first core in ``/proc/cpuinfo``; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
