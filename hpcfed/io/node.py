"""The node that a process runs on."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUMBERING = Path("/proc/self/ns/pid")


def node() -> str:
    """Return what identifies this node, whatever its name; the same in all of its containers."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else socket.gethostname()


def process_space() -> str:
    """Return a name of this node and its process namespace: containers of one node may number processes separately."""
    return f"{node()} {_NUMBERING.readlink() if _NUMBERING.is_symlink() else ''}"
