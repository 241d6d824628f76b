"""Check that a resumed run reads the data it started with.

A file's size, time of change and inode are compared each time, which costs nothing. If they differ, or if the recipe
asks for it (``verify_data``), all data are read and their hash is compared with the recorded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpcfed.data.content import KIND, content_hash
from hpcfed.data.storage import open_hdf5
from hpcfed.errors import EnvironmentFailure, InputError

FileFacts = Mapping[str, Any]
"""``bytes``, ``changed`` and ``status_changed`` (nanoseconds since 1970) and ``inode`` of a federation file."""


def facts_of(path: Path) -> dict[str, int]:
    """Return a file's size, times of change and inode; the time of its status is one that nobody can set.

    Raises:
        EnvironmentFailure: it can't be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise EnvironmentFailure("can't be read", where=str(path), got=error.strerror or str(error)) from None
    times = {"changed": found.st_mtime_ns, "status_changed": found.st_ctime_ns}
    return {"bytes": found.st_size, **times, "inode": found.st_ino}


def check_data(path: Path, content: str | None, before: FileFacts | None, *, goes_on: bool, always: bool) -> FileFacts:
    """Return the facts of a federation file, checked to hold the recorded data.

    Args:
        path: the file.
        content: the recorded hash; None if the file names none.
        before: its facts at the run's last start; None if not recorded.
        goes_on: whether rounds were already trained on it.
        always: whether to read all data in any case.

    Raises:
        InputError: the data have changed, or there is no hash to compare.
        EnvironmentFailure: the file cannot be read.
    """
    now = facts_of(path)
    if not always and (not goes_on or now == before):
        return now
    if content is not None and content.startswith(KIND):
        found = _hash_of(path, tuple(now.values()))
        if found != content:
            remedy = "restore the file, or choose another output for a run on the new data"
            raise InputError("the data have changed", where=str(path), expected=content, got=found, remedy=remedy)
    elif always:
        raise InputError("verify_data", where=str(path), expected="a file that names a hash", got=content or "none")
    elif before is not None and any(now[key] != before.get(key) for key in ("bytes", "changed")):
        remedy = "restore the file and its time of change, or choose another output"
        raise InputError("the file has changed, and has no hash to compare", where=str(path), remedy=remedy)
    return now


@cache
def _hash_of(path: Path, facts: tuple[int, ...]) -> str:
    """Return the hash of the data in a file with these facts; cached for the runs of a sweep."""
    try:
        with open_hdf5(path) as file:
            return content_hash(file)
    except (OSError, RuntimeError, ValueError) as error:
        raise EnvironmentFailure("can't be read", where=str(path), got=str(error)) from None
