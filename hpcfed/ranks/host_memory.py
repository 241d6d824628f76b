"""The memory that this process may still take: the host's, and that of the job, which Linux's control groups limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of a group's limit and use, and the line of its ``memory.stat`` of file caches in the use.

By the controllers of the hierarchy: "" in version 2 of control groups, "memory" in version 1.
"""


def free_memory(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """Return how many bytes this process and its neighbours may still take, on the host and in the job's groups.

    Args:
        groups: where the groups are mounted.
        own_groups: names this process's group in each hierarchy.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_left_in_groups(groups, own_groups)]))


def _left_in_groups(groups: Path, own_groups: Path) -> Iterator[int]:
    """Yield what is left of the limit of each group that this process is in, the outer ones included."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # another system than Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounted = groups / controllers if controllers else groups
        for folder in (mounted / path.lstrip("/"), *(mounted / path.lstrip("/")).parents):
            if controllers in FILES and (left := _left_in(folder, *FILES[controllers])) is not None:
                yield left
            if folder == mounted:
                break


def _left_in(folder: Path, limit_file: str, use_file: str, cached_line: str) -> int | None:
    """Return a group's limit minus its use, file caches that it would give up aside; None without a limit."""
    try:
        limit, used = (folder / limit_file).read_text().strip(), int((folder / use_file).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(f"{cached_line} "))
    return int(limit) - (used - cached) if limit.isdecimal() else None
