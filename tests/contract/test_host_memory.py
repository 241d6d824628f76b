"""What a rank may take of the host's memory ends at the limits of its job's control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hpcfed.ranks.host_memory import free_memory

GIB = 1 << 30


def group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    """Write the files of a control group, as Linux shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_job_s_limit_counts_where_it_is_less_than_the_host_has(tmp_path: Path, version: int):
    groups, own_groups = tmp_path / "cgroup", tmp_path / "own"
    if version == 2:
        names, cached, top, none = ("memory.max", "memory.current"), "inactive_file", groups, "max"
        own_groups.write_text("0::/slurm/job_7/step_0\n")
    else:
        names, cached = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        top, none = groups / "memory", "9223372036854771712"
        own_groups.write_text("9:cpu,cpuacct:/slurm\n\n4:memory:/slurm/job_7/step_0\n0::/\n")
    job = top / "slurm" / "job_7"
    group(job / "step_0", names, none, 5 << 20, f"anon 5\n{cached} 0")
    assert free_memory(groups, own_groups) == pytest.approx(psutil.virtual_memory().available, abs=GIB)
    group(job, names, str(96 << 20), 40 << 20, f"anon 5\n{cached} {8 << 20}")
    assert free_memory(groups, own_groups) == (96 - 40 + 8) << 20
    group(job, names, str(96 << 20), 95 << 20, f"{cached} 0\n{cached.replace('inactive', 'active')} {60 << 20}")
    assert free_memory(groups, own_groups) == (96 - 95 + 60) << 20
    group(job, names, str(96 << 20), 200 << 20, f"{cached} 0")
    assert free_memory(groups, own_groups) == 0


def test_without_control_groups_it_is_the_hosts(tmp_path: Path):
    assert free_memory(tmp_path, tmp_path / "none") == pytest.approx(psutil.virtual_memory().available, abs=GIB)
