"""Code named by a recipe is announced when it runs; a run folder's code runs only on access to `.module`."""

from __future__ import annotations

import sys

import pytest

import hpcfed
from hpcfed.lab.cite import bibtex
from tests.launch import launch
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
    with pytest.warns(UserWarning, match=f"mine:network, which runs from {tmp_path}") as said:
        assert len(loaded.module_of(0)) == len(loaded.module) == 2
    assert [one.filename for one in said] == [__file__]  # not once for each client


NEIGHBOUR = "open({ran!r}, 'w').write('yes')\nraise ImportError('the neighbour ran')\n"


@pytest.mark.parametrize("python_path", [None, ["."]])
def test_a_file_named_like_a_library_does_not_run_in_its_place(python_path, tmp_path, command, monkeypatch):
    """scikit-learn is imported late, by `auroc`; here as in a stranger's folder."""
    write_small(tmp_path)
    changes = {} if python_path is None else {"python_path": python_path}
    write_recipe(tmp_path, rounds=2, evaluate={"metrics": ["auroc"]}, **changes)
    (tmp_path / "sklearn.py").write_text(NEIGHBOUR.format(ran=str(tmp_path / "ran")))
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = [*sys.path]
    assert command(["run", "recipe.yaml", "-q"], tmp_path).returncode == 0
    assert command(["verify", "run", "--all"], tmp_path).returncode == 0
    assert not (tmp_path / "ran").exists()
    assert sys.path == before


LATE = ("matplotlib", "sklearn", "scipy", "pandas", "PIL", "pyarrow", "rich", "tensorboard", "threadpoolctl")
SESSION = """
import sys
import hpcfed.cli.main

for words in (
    ["run", "recipe.yaml", "-q"],
    ["replay", "run", "--round", "1", "--client", "0", "--picture", "steps.png"],
    ["verify", "run", "--all"],
    ["report", "run", "--output", "page"],
    ["inspect", "small.h5", "--picture", "clients.png"],
    ["export", "run", "--output", "model"],
    ["cite", "run"],
    ["compare", "run", "run"],
):
    try:
        hpcfed.cli.main.main(words)
    except SystemExit as ending:
        assert not ending.code, (words, ending.code)
"""


@pytest.mark.soak
@pytest.mark.parametrize("python_path", [pytest.param(None, marks=pytest.mark.soak), ["."]])
def test_no_command_runs_a_file_beside_the_recipe_that_is_named_like_a_library(python_path, tmp_path):
    """Each library that hpcfed imports late, matplotlib for the picture of a replay, in a process that has none yet."""
    folder = tmp_path / "strangers"
    folder.mkdir()
    write_small(folder)
    changes = {} if python_path is None else {"python_path": python_path}
    write_recipe(folder, rounds=2, evaluate={"metrics": ["auroc"]}, observers=["tensorboard"], **changes)
    for name in LATE:
        (folder / f"{name}.py").write_text(NEIGHBOUR.format(ran=str(tmp_path / "ran")))
    (tmp_path / "session.py").write_text(SESSION)
    done = launch(0, [], cwd=folder, program=[str(tmp_path / "session.py")])
    assert (done.returncode, (tmp_path / "ran").exists()) == (0, False), done.stdout + done.stderr
    assert all((folder / name).stat().st_size for name in ("steps.png", "clients.png"))


LAZY = """
def network():
    from helper_of_mine import build  # as late as the call
    return build()
"""
HELPER = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
"""


def test_code_of_a_recipe_finds_its_neighbours_as_late_as_it_asks_for_them(tmp_path, command):
    write_small(tmp_path)
    write_recipe(tmp_path, model={"factory": "lazy_of_mine:network"}, rounds=1)
    (tmp_path / "lazy_of_mine.py").write_text(LAZY)
    (tmp_path / "helper_of_mine.py").write_text(HELPER)
    before = [*sys.path]
    done = command(["run", "recipe.yaml", "-q"], tmp_path)
    assert (done.returncode, done.stderr, sys.path) == (0, "", before)


@pytest.mark.parametrize("name", ["types", "random", "queue", "torch"])
def test_a_file_named_like_a_module_is_never_chosen_in_silence(name, tmp_path, command):
    write_small(tmp_path)
    write_recipe(tmp_path, model={"factory": f"{name}:network"}, rounds=1)
    (tmp_path / f"{name}.py").write_text(CODE)
    done = command(["run", "recipe.yaml", "-q"], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"model.factory: {name}.py has the name of a module of" in done.stderr
    assert "rename yours, here and in the recipe" in done.stderr
    assert not (tmp_path / "it-ran").exists()
