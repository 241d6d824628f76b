"""Temporary files beside their target, named by host and process, so that leftovers of killed processes are known."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

LONG_S = 86_400
"""Seconds without a write after which a file of another host counts as a leftover."""


def temporary_of(path: Path) -> Path:
    """Return the name under which this process writes `path`."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def remove_stale(path: Path) -> None:
    """Remove the leftovers of killed processes for `path`; never the file of a process that may be alive.

    Raises:
        OSError: the folder can't be read.
    """
    start = f".{path.name}."
    for entry in path.parent.iterdir():
        if not (entry.name.startswith(start) and entry.name.endswith(".tmp")):
            continue
        host, _, process = entry.name.removeprefix(start).removesuffix(".tmp").rpartition(".")
        with suppress(OSError, OverflowError):  # gone meanwhile, or not ours to remove: it does no harm
            if process.isdecimal() and _is_left(entry, host, int(process)):
                entry.unlink()


def _is_left(entry: Path, host: str, process: int) -> bool:
    if host == socket.gethostname():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            return False
    return process != os.getpid() and time.time() - entry.stat().st_mtime > LONG_S
