"""Memory that all ranks of one host read and write.

A rank's memory is a file without a name (``memfd_create``), which the others open through its process's entry in /proc.
So /dev/shm, which containers keep small, does not limit it, and the system takes it back from the last rank that uses
it, however that rank ends.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from hpcfed.ranks.world import World

TOKEN_BYTES = 16
"""Bytes after the memory by which ranks tell that they have opened the right one."""


def shared_memory(world: World, num_bytes: int, *, willing: bool = True) -> list[np.ndarray] | None:
    """Return new memory of each rank, by rank, as bytes (num_bytes,); None if the ranks cannot, or one is not willing.

    Called on every rank, with the same size; same result on all.
    """
    if not world.shares_memory or world.size == 1 or len(set(world.hosts)) > 1:
        return None
    token = os.urandom(TOKEN_BYTES)
    own = _new(num_bytes, token) if willing else None
    try:
        found = [_opened(*each, num_bytes) for each in world.gather((os.getpid(), own, token))]
        shared = all(world.gather(all(one is not None for one in found)))
    finally:
        if own is not None:
            os.close(own)
    return [one for one in found if one is not None] if shared else None


def _new(num_bytes: int, token: bytes) -> int | None:
    """Return the descriptor of new memory with a token behind it, None if the system has none to share."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("hpcfed-sums")
    except OSError:
        return None
    try:
        os.pwrite(file, token, num_bytes)
    except OSError:
        os.close(file)
        return None
    return file


def _opened(process: int, file: int | None, token: bytes, num_bytes: int) -> np.ndarray | None:
    """Return a process's memory; None if it cannot be opened, or is another's, as where each rank has a /proc."""
    if file is None:
        return None
    try:
        with Path(f"/proc/{process}/fd/{file}").open("r+b", buffering=0) as opened:
            if os.pread(opened.fileno(), TOKEN_BYTES, num_bytes) != token:
                return None
            room = mmap.mmap(opened.fileno(), num_bytes + TOKEN_BYTES)
    except (OSError, ValueError):
        return None
    return np.frombuffer(room, np.uint8, count=num_bytes)
