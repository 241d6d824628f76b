"""One thread at a time: runs share torch's settings, the global random generators, and the names of given code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

ONE_THREAD = RLock()
"""Held by the thread that runs a recipe, or builds a module; others wait."""


@contextmanager
def other_threads() -> Iterator[None]:
    """Let other threads run recipes within the block."""
    ONE_THREAD.release()
    try:
        yield
    finally:
        ONE_THREAD.acquire()
