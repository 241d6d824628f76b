"""The memory that this process may still take: the host's, and that of the job, which Linux's control groups limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
"""Files of a group's limit and use, and the lines of its ``memory.stat`` of file caches in the use."""


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
        lines = own_groups.read_text(errors="surrogateescape").splitlines()
    except OSError:  # another system than Linux
        return
    for line in lines:
        _, _, hierarchy = line.partition(":")
        controllers, _, path = hierarchy.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, files = (groups / controllers, VERSION_1) if controllers else (groups, VERSION_2)
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            if (left := _left_in(folder, *files)) is not None:
                yield left
            if folder == mounted:
                break


def _left_in(folder: Path, limit_file: str, use_file: str, cache_lines: tuple[str, ...]) -> int | None:
    """Return a group's limit minus its use, file caches that it would give up aside; None without a limit."""
    try:
        limit, used = int((folder / limit_file).read_text()), int((folder / use_file).read_text())
        lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        cached = sum(int(value) for name, value in lines if name in cache_lines)
    except (OSError, ValueError):  # without a limit it is "max"
        return None
    return limit - (used - cached)
