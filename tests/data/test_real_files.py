"""The real files of ``$HPCFED_SHARED/data``: prepared, and the papers' models trained on them on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcfed.config.load import dump_yaml
from tests.launch import Completed, launch
from tests.shared_files import shared_folder


class Case(NamedTuple):
    """Files, options of `prepare`, overrides of a run, and the final loss.

    ``falls_to`` bounds the last round's `watched` loss by a multiple of the first's.
    """

    raw: str
    prepare: tuple[object, ...]
    recipe: Mapping[str, Any]
    falls_to: float
    watched: str = "test_loss"


DIRICHLET = ("--partition", "dirichlet-client", "--alpha", 0.3)
CASES = {
    "mnist": Case(
        "MNIST",
        ("mnist", *DIRICHLET, "--clients", 100),
        {
            "model": {"name": "mlp", "hidden": [200, 100]},
            "rounds": 6,
            "cohort": {"size": 10},
            "local": {"epochs": 1, "batch_size": 50, "lr": 0.1},
            "algorithm": {"name": "fedexp", "eps": 1e-3},
        },
        0.8,
    ),
    "cifar10": Case(
        "CIFAR-10",
        ("cifar10", "--incomplete", "--clients", 10),
        {
            "model": {"name": "feddyn-cnn"},
            "rounds": 4,
            "local": {"epochs": 2, "batch_size": 50, "lr": 0.1, "clip_norm": 10},
            "algorithm": {"name": "feddyn", "alpha": 0.01},
        },
        0.95,
    ),
    "femnist": Case(
        "FEMNIST",
        ("femnist",),
        {
            "model": {"name": "femnist-cnn"},
            "rounds": 6,
            "local": {"epochs": 4, "batch_size": 10, "lr": 0.03},
            "algorithm": {"name": "fedavg"},
            "evaluate": {"train": {"every": 1}},
        },
        0.95,
        "train_loss",
    ),
    "synthetic": Case(
        "LEAF/synthetic_1_1_test.json",
        ("leaf-vectors",),
        {
            "model": {"name": "logistic"},
            "rounds": 20,
            "cohort": {"size": 10},
            "local": {"epochs": 1, "batch_size": 10, "lr": 0.01},
            "algorithm": {"name": "fedprox", "mu": 1.0},
            "evaluate": {"train": {"every": 1}},
        },
        0.9,
        "train_loss",
    ),
    "shakespeare": Case(
        "Shakespeare",
        ("shakespeare", "--min-samples", 100),
        {
            "model": {"name": "lstm"},
            "rounds": 10,
            "cohort": {"size": 6},
            "local": {"steps": 10, "batch_size": 20, "lr": 1.0, "clip_norm": 5},
            "algorithm": {"name": "fedavg"},
            "evaluate": {"every": 0},  # a test set of 184,000 samples is no short run
        },
        0.9,
        "local_loss",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls(name: str, command: Callable[..., Completed], tmp_path: Path) -> None:
    case = CASES[name]
    folder = shared_folder("data")
    if folder is None or not (folder / case.raw).exists():
        pytest.skip(f"needs {case.raw} in $HPCFED_SHARED/data")
    prepared = command(["prepare", *case.prepare, "--raw", folder / case.raw, "-o", "data.h5"], tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    recipe = {"data": "data.h5", "device": "cpu", "checkpoint": {"every": 0}, "output": "run", **case.recipe}
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    done = launch(2, ["run", "recipe.yaml"], cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row[case.watched] for row in rows]
    print(f"{name}: {case.watched} {', '.join(f'{loss:.3f}' for loss in losses)}")
    assert losses[-1] < case.falls_to * losses[0]
