"""The suite's runner: what it adds up, and what it does not let pass."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch

from tests.harness.machine import machine
from tests.launch import ROOT
from tests.run_suite import OF_A_DEVICE, SEVERAL, main

pytest.importorskip("mpi4py", reason="needs mpi4py", exc_type=ImportError)


@pytest.fixture
def suite(tmp_path, capsys):
    """Run the runner on one test file at 1 and 2 ranks; return its exit code and the lines it printed."""

    def run(body, *options):
        shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
        (tmp_path / "test_it.py").write_text(f"import os, time, pytest\n{body}\n")
        code = main(["--ranks", "1", "2", *options, "--", str(tmp_path)])
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == machine()
        return code, lines

    return run


@pytest.mark.soak
def test_adds_up_what_passed(suite):
    code, lines = suite("@pytest.mark.ranks(2)\ndef test_a(comm): pass\ndef test_b(comm): pass")
    assert code == 0
    alone, together = sorted(lines[:2])
    assert "1 rank " in alone
    assert alone.endswith("1 passed, 0 failed, 1 skipped")
    assert together.endswith("2 passed, 0 failed")
    assert lines[2:] == ["3 passed, 0 failed, 1 skipped"]


@pytest.mark.soak
def test_failure_at_one_rank_count_fails_the_suite(suite):
    code, lines = suite("def test_a(comm): assert comm.size == 1\ndef test_b(comm): pass")
    assert code == 1
    assert lines[-1] == "3 passed, 1 failed"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def test_a(comm): os._exit(0)", "ran no test, or left no report"),
        ("def test_a(comm): os.abort()", "exit code"),
        ("raise ValueError", "exit code"),
        ("def helper(): pass", "exit code 5"),
        ("def test_a(comm):\n    while True: time.sleep(1)", "stopped after 8 s"),
    ],
)
def test_launch_that_does_not_end_well_fails_the_suite(suite, body, reason):
    code, lines = suite(body, "--timeout", "8" if "stopped" in reason else "60")
    assert code == 1
    assert any("1 rank " in line and "1 failed" in line and reason in line for line in lines), lines
    assert lines[-1] == "0 passed, 2 failed"


def test_without_a_gpu_it_says_that_nothing_was_tested_on_one(monkeypatch, capsys):
    """It fails where one was promised."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setenv("HPCFED_TEST_DEVICE", "cpu")  # which it sets
    assert [main(["--device", device]) for device in ("gpu", "cuda")] == [0, 1]
    assert capsys.readouterr().out.count("NOTHING WAS TESTED ON ONE") == 2


def test_what_is_run_on_a_device_is_there():
    assert all((ROOT / path.partition("::")[0]).exists() for _, paths in OF_A_DEVICE for path in paths)


def test_what_is_run_on_several_ranks_is_there_and_all_that_is_of_ranks():
    several = {path.partition("::")[0] for paths in SEVERAL.values() for path in paths}
    assert all((ROOT / path).is_file() for path in several)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "mpi").glob("test_*.py")} <= several


def test_a_suite_that_is_terminated_leaves_no_process(tmp_path):
    """``make test`` passes SIGTERM on; the sessions of pytest have process groups of their own."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, time\n\n\ndef test_a():\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n    time.sleep(120)\n"
    )
    command = [sys.executable, "-m", "tests.run_suite", "--ranks", "1", "--", str(tmp_path)]
    runner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < end
        time.sleep(0.1)
    session = psutil.Process(int((tmp_path / "pid").read_text()))
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(30) == 128 + signal.SIGTERM
    with suppress(psutil.NoSuchProcess):
        session.wait(10)
