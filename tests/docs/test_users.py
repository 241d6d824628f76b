"""The users of jobs/users, from files to a result, each by one script; that of the wheel needs the package index."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi, pytest.mark.deadline(300)]


def user(name: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a user's script with this environment's hpcfed and MPI, and return what it said."""
    env = {**environment, "ENVIRONMENT": sys.prefix, "IPYTHONDIR": str(folder / "ipython")}
    script = ROOT / "jobs" / "users" / f"{name}.sh"
    done = subprocess.run(
        ["bash", script, folder / "user"], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_six_hospitals_get_to_a_predicted_row(environment, tmp_path: Path) -> None:
    said = user("hospitals", tmp_path, environment)
    for oddity in ("semicolons, as in Łódź.csv", "decimal point, as in Łódź.csv", "marker 14 in 390 rows"):
        assert oddity in said


def test_a_notebook_with_everything_of_its_own_is_verified_elsewhere(environment, tmp_path: Path) -> None:
    missing = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (pip install -e '.[test]')")
    said = user("notebook", tmp_path, environment)
    assert "10 rounds are as certified" in said
    assert "from recorded states, bit for bit" in said
