"""glibc's malloc, configured to keep freed memory."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = (1 << 30, 1 << 25)
"""Bytes; larger blocks are returned to the system at once. The second is the most that glibc before 2.35 accepts."""


def keep_freed_memory() -> None:
    """Make malloc reuse large freed blocks instead of returning them to the system.

    A round allocates the same large vectors and activations again and again. Mapped anew, their pages are faulted in
    and cleared at each first touch, which takes longer than the arithmetic on them. Only glibc is configured, and only
    if its environment variables are not set.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    if any(mallopt(M_MMAP_THRESHOLD, largest) for largest in LARGEST_KEPT):
        mallopt(M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Return the memory that malloc keeps to the system: after work that is not repeated, or where vectors are large.

    An aligned vector does not fit into the place of one of its own size, so that a few places of each would stay.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # not glibc
        return
