"""The folders of a run: free space, file system, and whether files can be written and locked."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcfed.errors import EnvironmentFailure
from hpcfed.io.node import temporary_folder


@dataclass(frozen=True)
class Folder:
    """A folder as rank 0 sees it; `problem` says why it cannot be written, "" if it can."""

    path: str
    filesystem: str
    bytes: int
    free_bytes: int
    problem: str = ""
    locks: bool = True


def examine_temporary_folder() -> Folder:
    """Examine the folder for temporary files, which may be missing."""
    path = temporary_folder()
    if not path.is_dir():
        return Folder(str(path), "unknown", 0, 0, "no such folder", locks=False)
    return examine_folder(path)


def examine_folder(path: Path) -> Folder:
    """Return a folder's space and file system, and whether a temporary file in it can be written and locked.

    Raises:
        EnvironmentFailure: there is no such folder, or its file system does not answer.
    """
    try:
        path = path.resolve(strict=True)
        usage = shutil.disk_usage(path)
    except OSError as error:
        raise EnvironmentFailure(
            "folder cannot be looked at", where=str(path), got=str(error), remedy="start in a folder that exists"
        ) from None
    problem, locks = "", False
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"hpcfed")
            file.flush()
            locks = _can_lock(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return Folder(str(path), _filesystem(path), usage.total, usage.free, problem, locks)


def _can_lock(file: int) -> bool:
    """Return whether the file system grants the kind of lock that HDF5 requests."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _filesystem(path: Path) -> str:
    """Return the type of the file system that holds a resolved folder, such as ``ext4``, ``nfs4`` or ``lustre``."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (path, *path.parents) if folder in mounts), "unknown")
