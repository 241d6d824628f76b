"""Fixtures of the command-line tests: a folder with a small federation and a recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.launch import LEAKED, ROOT, launcher
from tests.mpi.recipes import write_recipe, write_small
from tests.numerics.test_reference import softmax  # noqa: F401  (a fixture)
from tests.pictures import blank_pictures  # noqa: F401  (a fixture)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``small.h5`` and ``recipe.yaml``, whose run goes to ``run/``."""
    write_small(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    """This process's environment with the launcher and `hpcfed` of its own Python first on the path."""
    mpi = launcher(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LEAKED)}
    folders = [str(Path(sys.executable).parent), str(Path(mpi.command[0]).parent), kept["PATH"]]
    return kept | mpi.settings | {"PATH": os.pathsep.join(folders), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
