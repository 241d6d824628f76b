"""Freed memory stays with the process: a large vector is not mapped anew each round."""

from __future__ import annotations

import platform

import pytest

from tests.launch import launch

PROGRAM = """
import ctypes, sys
from hpcfed.ranks.platform.malloc import keep_freed_memory

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
if sys.argv[1:] == ["keep"]:
    keep_freed_memory()
before = libc.mallinfo2().hblks
block = bytearray(100 << 20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.one_mpi
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has this setting")
def test_large_blocks_come_from_memory_that_stays() -> None:
    def mapped(*arguments: str, env: dict[str, str] | None = None) -> str:
        done = launch(0, arguments, program=("-c", PROGRAM), env=env)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    assert mapped() == "1"
    assert mapped("keep") == "0"
    assert mapped("keep", env={"MALLOC_MMAP_THRESHOLD_": "1000000"}) == "1"  # the user has decided
