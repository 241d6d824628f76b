"""The node that a process runs on, its working folder, and its folder for temporary files."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from hpcfed.errors import InputError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUMBERING = Path("/proc/self/ns/pid")


def node() -> str:
    """Return what identifies this node, whatever its name; the same in all of its containers."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else socket.gethostname()


def working_folder() -> Path:
    """Return the working folder, from which relative paths begin.

    Raises:
        InputError: it has been removed, perhaps to be made anew under the same name.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise InputError("the working folder has been removed", remedy="change into another") from None


def temporary_folder() -> Path:
    """Return the folder for temporary files: $TMPDIR, whether or not it exists; if it is not set, the system's.

    Where $TMPDIR cannot be written, `tempfile` takes /tmp without a word, which on many nodes is memory.
    """
    try:
        return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    except FileNotFoundError:  # none can be written
        return Path("/tmp")


def process_space() -> str:
    """Return a name of this node and its process namespace: containers of one node may number processes separately."""
    return f"{node()} {_NUMBERING.readlink() if _NUMBERING.is_symlink() else ''}"
