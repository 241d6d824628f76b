"""Damaged raw files end in one line or a read: no crash, no hang, no memory of the claimed size, no code run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.data.raw_mutations import CASES, MOST_SECONDS, OF_BYTES, OF_HEADS, read_all
from tests.launch import launch

SECONDS_EACH = 1.5
"""More than a mutation can honestly take on average, even on a busy machine."""


@pytest.mark.parametrize(
    ("first", "count"), [(0, 100), pytest.param(100, 2000, marks=[pytest.mark.soak, pytest.mark.deadline(3600)])]
)
def test_damaged_files_are_refused_or_read(tmp_path: Path, first: int, count: int) -> None:
    arguments = [tmp_path, str(first), str(count)]
    timeout = 30 + MOST_SECONDS + SECONDS_EACH * count
    done = launch(0, arguments, program=("-m", "tests.data.raw_mutations"), timeout=timeout)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"after {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(lines) == 2 * count  # each says what it does, and how it ended in one line
    endings = Counter(line.split()[1].rstrip(":") for line in lines[1::2])
    assert set(endings) == {"refused", "read"}
    assert endings["refused"] > count / 4
    tried = Counter(line.split(": ")[0].split(" ", 1)[1] for line in lines[::2])
    assert tried.keys() == CASES.keys()
    assert len(OF_HEADS) / len(OF_BYTES) >= 0.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CASES)
def test_undamaged_files_are_read(tmp_path: Path, name: str) -> None:
    CASES[name].write(tmp_path)
    read_all(tmp_path, CASES[name])
