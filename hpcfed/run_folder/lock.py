"""The lock of a run folder, by which one job at a time writes there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpcfed.errors import Busy
from hpcfed.run_folder.files import LOCK, unusable

UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


class FolderLock:
    """A lock on a folder, until it is released or the process ends; used on rank 0 alone.

    Args:
        folder: the folder; `take` creates it, and `release` removes it if it has nothing but the lock. The lock file
            names the host and process that hold the lock.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._created: list[Path] = []
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Create and lock the folder; it stays unlocked on file systems without locks.

        Raises:
            Busy: another job holds the lock.
            InputError: the folder cannot be written.
        """
        self._created = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / LOCK).open("a+", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _name_holder(self._file)
        except BlockingIOError:
            self._close()
            raise Busy(
                f"a run is going on in this folder{_holder(self._folder / LOCK)}",
                where=str(self._folder),
                remedy="wait for it, or choose another output",
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                self._close()
                raise unusable(self._folder, error) from None

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is None:
            return
        self._remove_if_empty()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remove_if_empty(self) -> None:
        with suppress(OSError):
            if [entry.name for entry in self._folder.iterdir()] == [LOCK]:
                (self._folder / LOCK).unlink()
                for path in self._created:
                    path.rmdir()


def _name_holder(file: IO[str]) -> None:
    with suppress(OSError):  # a full disk is no reason to refuse a run
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _holder(lock: Path) -> str:
    """Return ", of process … on …" for a message, from the lock file; "" if its holder has not written that yet."""
    with suppress(OSError):
        if line := lock.read_text(encoding="utf-8", errors="replace").strip():
            return f", of {line}"
    return ""
