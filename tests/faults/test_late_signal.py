"""SLURM's warning to a run that has hardly begun, or has just ended, and an ignored SIGHUP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcfed.ranks.signals import catch_signals
from hpcfed.ranks.world import World
from tests.launch import HPCFED, LEAKED, ROOT
from tests.mpi.recipes import write_recipe, write_small

pytestmark = pytest.mark.one_mpi


def test_a_closed_terminal_does_not_end_a_run_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_signals(World()) as caught:
            for number in (signal.SIGHUP, signal.SIGUSR1):
                signal.raise_signal(number)
            while caught.name is None:
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert caught.name == "SIGUSR1"


def test_a_signal_during_the_imports_stops_a_run_after_its_first_round(tmp_path: Path) -> None:
    write_small(tmp_path)
    recipe = write_recipe(tmp_path, rounds=1000)
    env = {name: value for name, value in os.environ.items() if not name.startswith(LEAKED)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpcfed", "run", recipe, "--quiet"]
    run = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not _catches(run.pid, signal.SIGUSR1):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.001)
        assert "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text()
        run.send_signal(signal.SIGUSR1)
        said = run.communicate(timeout=120)[1]
    finally:
        run.kill()
    assert run.returncode == 75, said
    assert "stopped after round 1: SIGUSR1; the same command goes on" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == ["round-00000001.json"]


def _catches(process: int, number: int) -> bool:
    (caught,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.soak
def test_a_signal_after_the_end_changes_no_exit_code(tmp_path: Path) -> None:
    write_small(tmp_path)
    recipe = write_recipe(tmp_path, rounds=1)
    env = {name: value for name, value in os.environ.items() if not name.startswith(LEAKED)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, *HPCFED, "run", recipe, "--quiet"], cwd=tmp_path, env=env)
    try:
        result, deadline = tmp_path / "run" / "result.json", time.monotonic() + 60
        while not result.exists():  # the last thing a run writes; then its process takes a moment to end
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.001)
        while run.poll() is None:
            run.send_signal(signal.SIGUSR1)
            time.sleep(0.01)
        assert run.wait(timeout=30) == 0
    finally:
        run.kill()
