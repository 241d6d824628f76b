"""How this process treats memory that it frees."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = (1 << 30, 1 << 25)
"""Bytes; a larger block is given back to the system at once. The second is the most that glibc before 2.35 takes."""


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next to ask, in place of giving each large block back.

    A round asks for the same large vectors and activations again and again. Mapping them anew, their pages are faulted
    in and cleared at each first touch, which takes longer than the arithmetic on them. Only glibc is told; a user who
    has set its variables decides.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        tell = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked
        return
    if any(tell(M_MMAP_THRESHOLD, largest) for largest in LARGEST_KEPT):
        tell(M_TRIM_THRESHOLD, -1)
