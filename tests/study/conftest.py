"""Fixtures of the study tests: a federation of three sites, and studies of it in this process."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed.lab.study.bootstrap import ResampleProgress
from hpcfed.lab.study.options import StudyOptions
from hpcfed.lab.study.plan import Study, read_study
from hpcfed.lab.study.session import run_study, write_intervals, write_study
from hpcfed.lab.sweep.failures import endings, raise_if_failed
from hpcfed.lab.sweep.run import Redo
from hpcfed.ranks.world import World
from tests.mpi.recipes import write_recipe
from tests.pictures import blank_pictures  # noqa: F401  (a fixture)

SITES = ("north", "south", "west")
SIZES = {"train": (30, 24, 20), "test": (10, 8, 8)}
CLASSES = ("well", "ill")


def write_sites(path: Path, *, extra: float | None = None, task: str = "classification") -> Path:
    """Write three sites with 4 features and test sets; `extra` replaces a feature of the last test sample of all."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "hpcfed-federation", "version": 1, "name": "sites", "task": task})
        file.attrs.update({"num_classes": 2, "source": json.dumps({"classes": CLASSES}), "content": f"sites-{extra}"})
        for part, sizes in SIZES.items():
            y = (rng.random(sum(sizes)) < 0.4).astype(np.uint8)
            shift = np.repeat(np.arange(3.0), sizes)[:, None]
            x = rng.normal(size=(len(y), 4)) * 3 + y[:, None] * 2 + shift
            if part == "test" and extra is not None:
                x[-1, 0] = extra
            file[f"{part}/x"], file[f"{part}/y"] = x.astype(np.float32), y
            file[f"{part}/offsets"] = np.cumsum([0, *sizes])
        file["train/client"] = np.array(SITES, dtype="S8")
    return path


def of_numbers(path: Path) -> None:
    """Make a file's labels the targets of a regression."""
    with h5py.File(path, "a") as file:
        file.attrs["task"] = "regression"
        for part in ("train", "test"):
            y = file[f"{part}/y"][:].astype(np.float32)
            del file[f"{part}/y"]
            file[f"{part}/y"] = y


def of_survival(path: Path) -> None:
    """Make a file's labels events, and the first feature decide their times."""
    with h5py.File(path, "a") as file:
        file.attrs["task"] = "survival"
        for part in ("train", "test"):
            y = np.stack([file[f"{part}/y"][:], 1 + np.abs(file[f"{part}/x"][:, 0])], axis=1).astype(np.float32)
            del file[f"{part}/y"]
            file[f"{part}/y"] = y


def of_labels(path: Path, columns: int) -> None:
    """Make a file's labels `columns` labels a sample; the last of two is the other way round."""
    with h5py.File(path, "a") as file:
        file.attrs.update({"task": "multi-label", "num_classes": columns})
        file.attrs["source"] = json.dumps({"classes": CLASSES if columns == 1 else ["cough", "fever"]})
        for part in ("train", "test"):
            y = file[f"{part}/y"][:]
            del file[f"{part}/y"]
            file[f"{part}/y"] = np.stack([y, 1 - y], axis=1)[:, :columns]


def of_one_class(path: Path, *sites: int) -> None:
    """Make all samples of some sites of the first class."""
    with h5py.File(path, "a") as file:
        for part in ("train", "test"):
            ends = file[f"{part}/offsets"][:]
            for k in sites:
                file[f"{part}/y"][ends[k] : ends[k + 1]] = 0


def of_two_samples(path: Path) -> None:
    """Leave the last site two samples."""
    with h5py.File(path, "a") as file:
        for part, ends in (("train", [0, 30, 54, 55]), ("test", [0, 10, 18, 19])):
            for name in ("x", "y"):
                rows = file[f"{part}/{name}"][: ends[-1]]
                del file[f"{part}/{name}"]
                file[f"{part}/{name}"] = rows
            file[f"{part}/offsets"][:] = ends


def table(path: Path) -> list[dict[str, str]]:
    """Return a CSV file's rows."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def drawn() -> None:
    """Asked for by tests of pictures; a study of another test has blank ones."""


@pytest.fixture(autouse=True)
def _blank(request: pytest.FixtureRequest) -> None:
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("blank_pictures")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``sites.h5`` and ``recipe.yaml``; a study of it goes to ``run-study/``."""
    write_sites(tmp_path / "sites.h5")
    recipe(tmp_path)
    return tmp_path


def recipe(folder: Path, **changes: object) -> Path:
    """Write ``recipe.yaml``: logistic regression, three rounds of five steps."""
    local = {"steps": 5, "batch_size": 5, "lr": 0.05}
    usual = {
        "data": "sites.h5",
        "model": {"name": "logistic"},
        "rounds": 3,
        "local": local,
        "evaluate": {"metrics": ["auroc", "confusion-matrix"]},
    }
    return write_recipe(folder, output=str(folder / "run"), **(usual | changes))


def planned(folder: Path, methods: str = "fedavg,fedexp", overrides: Sequence[str] = (), **options: object) -> Study:
    """Read the study of ``recipe.yaml``."""
    return read_study(folder / "recipe.yaml", overrides, StudyOptions(methods, **options))


def done(study: Study, *, fresh: bool = False, writes: bool = True) -> Path:
    """Run a study in this process and write its results; return its folder."""
    stopped, remarks, study = run_study(study, World(), None, Redo(fresh=fresh), quiet=True)
    assert not stopped
    plan = study.plan()
    raise_if_failed(plan, endings(plan))
    if writes:
        view, complete = write_study(study, plan, ["recipe.yaml"], remarks)
        assert complete
        if view is not None and study.options.bootstrap:
            write_intervals(view, ["recipe.yaml"], remarks, ResampleProgress("study"))
    return study.folder
