"""What the tests of the command line share: a folder with a small federation and a recipe for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.recipes import write_recipe, write_small
from tests.numerics.test_reference import softmax  # noqa: F401  (a fixture)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``small.h5`` and ``recipe.yaml``, whose run goes to ``run/``."""
    write_small(tmp_path)
    write_recipe(tmp_path)
    return tmp_path
