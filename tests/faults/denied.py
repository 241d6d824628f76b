"""Permissions that hold for root, too, who otherwise may read and write any file.

`denied` is for a block of this process; ``python denied.py ARGUMENTS…`` is ``hpcfed`` in a process of its own, also
as a rank.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXEMPT = 1, 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of linux/capability.h."""
VERSION_3 = 0x20080522
PR_CAPBSET_DROP = 24

libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextmanager
def denied() -> Iterator[None]:
    """Let modes hold for this thread, and those that it starts, while the block runs."""
    header, sets = _Header(VERSION_3, 0), (_Sets * 2)()
    _checked(libc.capget(ctypes.byref(header), sets))
    before = sets[0].effective
    sets[0].effective = before & ~sum(1 << number for number in EXEMPT)
    _checked(libc.capset(ctypes.byref(header), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _checked(libc.capset(ctypes.byref(header), sets))


def give_up() -> None:
    """Let modes hold for every program that this process becomes or starts."""
    for number in EXEMPT:
        _checked(libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0))


def _checked(code: int) -> None:
    """Raise the system's error, unless `code` is 0."""
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    if os.geteuid() == 0:
        give_up()
    os.execv(sys.executable, [sys.executable, "-m", "hpcfed.cli.main", *sys.argv[1:]])
