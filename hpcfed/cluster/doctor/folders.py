"""The folders of a job: their free space and file system, and whether files in them can be written and locked."""

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
    """A folder, examined on rank 0.

    Attributes:
        filesystem: type of its file system, such as ``lustre``; ``unknown`` if it cannot be found.
        bytes, free_bytes: size and free space of the file system.
        problem: why a file cannot be written in the folder; "" if it can.
        locks: whether a file in the folder can be locked.
    """

    path: str
    filesystem: str
    bytes: int
    free_bytes: int
    problem: str = ""
    locks: bool = True


def examine_temporary_folder() -> Folder:
    """Apply `examine_folder` to the temporary folder; if there is none, `Folder.problem` is ``no such folder``."""
    path = temporary_folder()
    if not path.is_dir():
        return Folder(str(path), "unknown", 0, 0, "no such folder", locks=False)
    return examine_folder(path)


def examine_folder(path: Path) -> Folder:
    """Examine a folder: its space, its file system, and whether a temporary file in it can be written and locked.

    Raises:
        EnvironmentFailure: the folder does not exist, or its file system does not answer.
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
    """Return whether an open file can be locked with ``flock``, as HDF5 does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _filesystem(path: Path) -> str:
    """Return the type of a folder's file system, such as ``ext4``, ``nfs4`` or ``lustre``; ``unknown`` if not found."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (path, *path.parents) if folder in mounts), "unknown")
