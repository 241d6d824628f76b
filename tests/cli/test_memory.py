"""Memory does not grow with the rounds, with checkpoints or without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import ROOT, launch


@pytest.mark.soak
@pytest.mark.one_mpi
def test_two_hundred_rounds_take_the_memory_of_twenty(tmp_path: Path) -> None:
    """SCAFFOLD over 300 clients, all of which have a state by round 20: at most 2 % more by round 200."""
    done = launch(0, ["memory", tmp_path], program=(str(ROOT / "jobs" / "bench" / "checkpoint.py"),), timeout=240)
    assert done.returncode == 0, done.stderr
    ratios = [float(ratio) for ratio in re.findall(r"round 200 over round 20: ([\d.]+)", done.stdout)]
    assert len(ratios) == 2
    assert max(ratios) < 1.02, done.stdout
