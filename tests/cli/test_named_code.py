"""Code named by a recipe is announced when it runs; a run folder's code runs only on access to `.module`."""

from __future__ import annotations

import pytest

import hpcfed
from hpcfed.lab.cite import bibtex
from tests.mpi.recipes import write_recipe, write_small

pytestmark = pytest.mark.one_mpi
CODE = """
from pathlib import Path
from torch import nn

def network():
    Path("it-ran").touch()
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
"""


def test_code_of_a_recipe_is_reported(tmp_path, command):
    write_small(tmp_path)
    write_recipe(tmp_path, model={"factory": "mine:network"}, rounds=1)
    (tmp_path / "mine.py").write_text(CODE)
    done = command(["run", "recipe.yaml"], tmp_path)
    assert f"runs the code mine:network, from {tmp_path} or" in done.stdout.splitlines()[0]
    (tmp_path / "it-ran").unlink()
    loaded = hpcfed.load(tmp_path / "run")
    assert len(loaded.metrics) == 1
    assert "mine:network" in bibtex(tmp_path / "run")
    assert not (tmp_path / "it-ran").exists()
    with pytest.warns(UserWarning, match=f"mine:network, which runs from {tmp_path}"):
        assert len(loaded.module) == 2
