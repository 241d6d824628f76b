"""Atomic and durable writing of files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Write a file, or the pieces of one, under a temporary name, flush it to disk, and rename it into place.

    Raises:
        OSError: as the system reports it; the old file, if any, is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    pieces = [data] if isinstance(data, bytes) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except Exception:  # of the disk, or of what yields the pieces
        temporary.unlink(missing_ok=True)
        raise


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
