"""Files that may not be read and folders that may not be written: one line with the path, for root as for anybody."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hpcfed
from tests.faults import denied as page
from tests.faults.denied import denied
from tests.launch import Completed, launch, own_line
from tests.mpi.recipes import write_recipe, write_small

METHOD = """
from hpcfed.algorithms.fedavg import LOCAL, SERVER
from hpcfed.types import Method


def method():
    return Method("mine", LOCAL(), SERVER())
"""
RUN = "run recipe.yaml --quiet"
DENIED = "Permission denied"
CASES: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "checkpoint's manifest": (
        "run/checkpoints/round-00000003.json",
        RUN,
        4,
        ("round-00000003.json: the checkpoint cannot be read", DENIED),
    ),
    "checkpoint's vectors": (
        "run/checkpoints/round-00000003.server",
        RUN,
        4,
        ("round-00000003.server: the checkpoint cannot be", DENIED),
    ),
    "clients' states": (
        "run/checkpoints/round-00000003.clients",
        RUN,
        4,
        ("round-00000003.clients: the checkpoint cannot be", DENIED),
    ),
    "folder of checkpoints": ("run/checkpoints", RUN, 4, ("checkpoints: the checkpoint cannot be read", DENIED)),
    "data": ("small.h5", RUN, 2, ("small.h5: may not be read; check its permissions",)),
    "data, inspected": ("small.h5", "inspect small.h5", 2, ("small.h5: may not be read; check its permissions",)),
    "recipe": ("recipe.yaml", RUN, 2, ("recipe.yaml: cannot be read", DENIED)),
    "schedule": ("cohorts.json", f"{RUN} cohort.schedule=cohorts.json output=a", 2, ("cohorts.json", DENIED)),
    "first weights": ("init.safetensors", f"{RUN} model.init=init.safetensors output=a", 2, ("init.safetensors",)),
    "user's code": ("mine.py", f"{RUN} algorithm=mine:method output=a", 2, ("mine.py", DENIED)),
    "record of the code": ("own/code.json", "run own.yaml --quiet rounds=5", 2, ("code.json: cannot be read", DENIED)),
    "record of the code, reported": ("own/code.json", "report own --output page", 2, ("code.json", DENIED)),
    "ending": ("run/result.json", RUN, 2, ("run: output cannot be used", DENIED)),
    "run's recipe": ("run/recipe.yaml", RUN, 2, ("run: output cannot be used", DENIED)),
    "record, gone on with": ("run/metrics.jsonl", RUN, 2, ("run: output cannot be used", DENIED)),
    "record, reported": ("run/metrics.jsonl", "report run --output page", 2, ("metrics.jsonl", DENIED)),
    "one record of many": ("several/a/metrics.jsonl", "report several --output page", 2, ("several", DENIED)),
    "record, watched": ("run/metrics.jsonl", "watch run --once", 2, ("run: ", DENIED)),
    "clients' scores": ("run/clients.csv", "report run --output page", 2, ("clients.csv", DENIED)),
    "recipe, cited": ("run/recipe.yaml", "cite run", 2, ("recipe.yaml", DENIED)),
    "run folder, reported": ("run", "report run --output page", 2, ("run: ", DENIED)),
    "run folder, watched": ("run", "watch run --once", 2, ("run: ", DENIED)),
    "run folder, cited": ("run", "cite run", 2, ("recipe.yaml", DENIED)),
    "run folder, gone on with": ("run", RUN, 2, ("run: output cannot be used", DENIED)),
    "site file": (
        "site.yaml",
        "submit recipe.yaml --time 1:00:00 --dry-run --site site.yaml",
        2,
        ("site.yaml", DENIED),
    ),
    "table of a client": ("tables/b.csv", "prepare own --raw tables -o own.h5", 2, ("b.csv: can't be read", DENIED)),
    "folder of tables": ("tables", "prepare own --raw tables -o own.h5", 2, ("tables: can't be read", DENIED)),
    "array of a client": ("arrays/a.npz", "prepare own --raw arrays -o own.h5", 2, ("a.npz: can't be read", DENIED)),
    "experiment": ("trial.yaml", "reproduce trial.yaml --output trial", 2, ("trial.yaml", DENIED)),
}
"""Name → what nobody may read, the command, its exit code and what its only line says."""
UNWRITABLE: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "run": (f"{RUN} output=shut/run", 2, ("shut/run: output cannot be used", DENIED)),
    "sweep": ("sweep recipe.yaml --grid local.lr=0.1,0.2 --output shut/sweep --quiet", 2, ("shut/sweep", DENIED)),
    "reproduce": ("reproduce fedexp-figure2 --rounds 2 --output shut/table", 4, ("shut/table", DENIED)),
    "prepare": ("prepare feddyn-synthetic --clients 3 -o shut/made.h5", 2, ("shut", DENIED)),
    "inspect": ("inspect small.h5 --picture shut/clients.png", 2, ("shut/clients.png", DENIED)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands read: a run to go on with, one of own code, tables and arrays, …."""
    folder = tmp_path_factory.mktemp("denied")
    write_small(folder)
    (folder / "mine.py").write_text(METHOD)
    (folder / "cohorts.json").write_text(json.dumps([[0, 1]] * 5))
    (folder / "site.yaml").write_text("requeue: false\n")
    (folder / "trial.yaml").write_text("cases: []\n")
    save_file({"weight": torch.zeros(1)}, folder / "init.safetensors")
    (folder / "tables").mkdir()
    (folder / "arrays").mkdir()
    for name in ("a", "b"):
        (folder / "tables" / f"{name}.csv").write_text("x,y\n1.5,0\n2.5,1\n")
        np.savez(folder / "arrays" / f"{name}.npz", x=np.ones((2, 3), np.float32), y=np.array([0, 1]))
    (folder / "shut").mkdir()
    evaluate = {"every": 1, "clients": {"every": 1}}
    whole = {"algorithm": {"name": "scaffold"}, "checkpoint": {"every": 1}, "evaluate": evaluate}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        hpcfed.run(write_recipe(folder, **whole), quiet=True)
        write_recipe(folder, rounds=5, **whole)
        hpcfed.run(write_recipe(folder, "own.yaml", output="own", algorithm={"factory": "mine:method"}), quiet=True)
        hpcfed.run("own.yaml", ["output=several/a"], quiet=True)
        hpcfed.run("own.yaml", ["output=several/b"], quiet=True)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, whose modes are given back."""
    folder = shutil.copytree(made, tmp_path / "place", symlinks=True)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


def end(command: Callable[..., Completed], words: str, folder: Path, code: int, says: tuple[str, ...]) -> None:
    with denied():
        done = command(words.split(), folder)
    assert done.returncode == code, done.stderr
    for fragment in says:
        assert fragment in own_line(done.stderr)


@pytest.mark.one_mpi
def test_modes_hold(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o000)
    with denied(), pytest.raises(PermissionError):
        (tmp_path / "file").open()


@pytest.mark.one_mpi
@pytest.mark.parametrize("name", CASES)
def test_what_may_not_be_read(name, place, command):
    path, words, code, says = CASES[name]
    before = (place / path).stat().st_mode
    (place / path).chmod(0o000)
    end(command, words, place, code, says)
    (place / path).chmod(before)
    assert not list(place.glob("run/previous-*"))
    if code == 4:
        with denied():
            done = command(words.split(), place)
        assert done.returncode == 0, done.stderr
        assert not list(place.glob("run/previous-*"))  # it went on


@pytest.mark.one_mpi
@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_may_not_be_written(name, place, command):
    (place / "shut").chmod(0o555)
    words, code, says = UNWRITABLE[name]
    end(command, words, place, code, says)
    assert list((place / "shut").iterdir()) == []


@pytest.mark.soak
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_an_unreadable_checkpoint_ends_all_ranks(ranks, place):
    (place / "run" / "checkpoints" / "round-00000003.clients").chmod(0o000)
    done = launch(ranks, RUN.split(), cwd=place, program=(page.__file__,))
    assert done.returncode == 4, done.stderr
    assert "round-00000003.clients: the checkpoint cannot be read: got Permission denied" in own_line(done.stderr)
