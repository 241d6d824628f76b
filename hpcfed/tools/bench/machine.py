"""The machine and the versions recorded with a benchmark's result."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from hpcfed.ranks.cpu import cpu_model


def describe() -> dict[str, Any]:
    """Return the date, the machine and the versions that a result depends on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "mpi4py": version("mpi4py"),
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
