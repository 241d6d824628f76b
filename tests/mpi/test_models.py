"""Every kind of model, task, loss and augmentation leaves the same bits on all ranks as in a world of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.federations import write_federation
from tests.mpi.recipes import small
from tests.mpi.test_same_result import check_same_as_alone

pytestmark = pytest.mark.one_mpi

OWN = """
import torch
from torch.nn import functional


def focal(gamma):
    def each(output, target):
        certainty = functional.log_softmax(output, 1).gather(1, target[:, None])[:, 0]
        return -((1 - certainty.exp()) ** gamma) * certainty
    return each


def top2(output, target):
    return (output.topk(2).indices == target[:, None]).sum(), len(target)


def of_class_0(output, target):
    return ((output.argmax(1) == 0) & (target == 0)).sum(), (target == 0).sum()
"""
FLIPS, SHIFTS = {"flip": 0.5, "per": "batch", "crop": 2}, {"crop": 3, "crop_probability": 0.5}
LOCAL = {"steps": 3, "batch_size": 4, "lr": 0.05}
CASES: Mapping[str, Mapping[str, Any]] = {
    "dropout": {"data": "images.h5", "model": {"name": "emnist-cnn"}},
    "batch-augmentation": {"data": "images.h5", "model": {"name": "femnist-cnn"}, "local": {**LOCAL, "augment": FLIPS}},
    "sample-augmentation": {
        "data": "colours.h5",
        "model": {"name": "feddyn-cnn", "hidden": 24},
        "local": {**LOCAL, "augment": SHIFTS},
        "dtype": "float64",
    },
    "class-weights": {"data": "colours.h5", "model": {"name": "mlp", "hidden": [6]}, "loss": {"weights": [1, 3, 1, 1]}},
    "cifar-cnn": {"data": "colours.h5", "model": {"name": "cifar-cnn"}, "cohort": {"size": 3}},
    "lstm": {"data": "tokens.h5", "model": {"name": "lstm"}},
    "multi-label": {"data": "labels.h5", "model": {"name": "mlp", "hidden": [6]}},
    "own-loss-and-metrics": {
        "data": "colours.h5",
        "model": {"name": "logistic"},
        "loss": {"factory": "own_loss:focal", "args": {"gamma": 2.0}},
        "evaluate": {
            "metrics": {"top2": "own_loss:top2", "zeros": "own_loss:of_class_0"},
            "train": {"every": 1},
            "batch_size": 3,
        },
    },
    "resnet18-gn": {"data": "colours.h5", "model": {"name": "resnet18-gn"}, "local": {**LOCAL, "steps": 1}},
}


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with federations of images, tokens and label sets; the working folder of all ranks."""
    world.on_root(lambda: write_all(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def write_all(folder: Path) -> None:
    rng = np.random.default_rng(1)

    def write(name: str, shape: tuple[int, ...], top: int, target: tuple[int, ...] = (), task: str = "") -> None:
        pieces = [
            (rng.integers(top, size=(count, *shape), dtype=np.uint8), rng.integers(2, size=(count, *target)))
            for count in (5, 9, 0, 7, 11)
        ]
        path = write_federation(
            folder / name, pieces[:4], num_classes=(target or (top if task else 4,))[0], test=pieces[4]
        )
        if task:
            with h5py.File(path, "r+") as file:
                file.attrs["task"] = task

    write("images.h5", (16, 16), 256)
    write("colours.h5", (3, 16, 16), 256)
    write("tokens.h5", (9,), 30, task="next-token")
    write("labels.h5", (5,), 256, (3,), task="multi-label")
    (folder / "own_loss.py").write_text(OWN, encoding="utf-8")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.soak if name == "resnet18-gn" else []) for name in CASES]
)
def test_a_run_is_the_same_as_alone(case, world, folder):
    recipe = small("run", **{"rounds": 2, "local": LOCAL, "evaluate": {"batch_size": 4}, **CASES[case]})
    check_same_as_alone(world, folder, recipe)
