"""What this host's processor is, as Linux tells it."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def cpu_model() -> str:
    """Return what this host calls its processor, "" where it does not say."""
    return _told().get("model name") or platform.processor()


def favours_onednn() -> bool:
    """Whether oneDNN computes large float32 products faster than MKL: with AVX-512 on what is not Intel's."""
    vendor, flags = _told().get("vendor_id", "GenuineIntel"), _told().get("flags", "").split()
    return vendor != "GenuineIntel" and "avx512f" in flags


@cache
def _told() -> dict[str, str]:
    """Return what ``/proc/cpuinfo`` says of the first core; nothing on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
