"""Atomic and durable writing of files."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpcfed.errors import EnvironmentFailure

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links."""


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Write to a file or folder while the block runs.

    Raises:
        EnvironmentFailure: the system refuses, with its reason.
    """
    try:
        yield
    except OSError as error:
        got = error.strerror or str(error)
        raise EnvironmentFailure("cannot be written", where=str(place), got=got) from error


def write_whole(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Write a file, or the pieces of one, under a temporary name, flush it to disk, and rename it into place.

    Raises:
        OSError: as the system reports it, or `path` is a device or a pipe; the old file, if any, is untouched.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # which the new name would take away
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    temporary = _temporary(path)
    try:
        _write(temporary, content)
        temporary.replace(path)
    except Exception:  # of the disk, or of what yields the pieces
        temporary.unlink(missing_ok=True)
        raise


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> None:
    """Write `files`, name → content, into a folder, each as `write_whole`; the folder is made if there are any.

    Raises:
        EnvironmentFailure: the system refuses, with its reason.
    """
    with writing(folder):
        for name, content in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, content)


def write_new(path: Path, content: bytes | str) -> bool:
    """Write a file as `write_whole` unless there is one; of several programs at once only one writes.

    Returns:
        Whether it was written. Without hard links in the file system, two programs at once may both write.

    Raises:
        OSError: as the system reports it.
    """
    temporary = _temporary(path)
    try:
        _write(temporary, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if path.exists():
                return False
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _temporary(path: Path) -> Path:
    """Return a new name beside `path`. Processes of two nodes, or containers, may have one number, so it is drawn."""
    return path.with_name(f".{path.name}.{100_000_000 + secrets.randbelow(900_000_000)}.tmp")


def _write(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Write a new file, never an existing one: a link in its place would lead to another."""
    data = content.encode() if isinstance(content, str) else content
    with path.open("xb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk.

    Raises:
        OSError: as the system reports it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
