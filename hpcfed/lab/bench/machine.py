"""The machine and the library versions that are recorded with a benchmark's result."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from hpcfed.ranks.cpu import cores, cpu_model


def describe() -> dict[str, Any]:
    """Return the date, the machine and the library versions, name → value."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": len(cores()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "mpi4py": version("mpi4py"),
    }
