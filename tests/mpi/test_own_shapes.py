"""Losses of the user's own: they take outputs of any shape, and have no parameters of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfed
from hpcfed.errors import InputError
from hpcfed.ranks.world import World
from tests.federations import write_federation
from tests.mpi.recipes import small
from tests.mpi.test_same_result import left_by

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]
HERE = str(Path(__file__).parent)


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """Label maps in ``maps.h5``, numbers whose spread grows in ``numbers.h5``, two classes in ``two.h5``."""

    def write() -> None:
        rng = np.random.default_rng(0)

        def maps(count: int) -> tuple[np.ndarray, np.ndarray]:
            x = rng.normal(size=(count, 1, 8, 8)).astype(np.float32)
            return x, np.digitize(x[:, 0], [-0.5, 0.5]).astype(np.float32)

        def numbers(count: int) -> tuple[np.ndarray, np.ndarray]:
            x = rng.uniform(size=(count, 4)).astype(np.float32)
            y = x[:, 0] + np.exp(-2 + 2 * x[:, 1]) * rng.normal(size=count)
            return x, y.astype(np.float32)

        def two(count: int) -> tuple[np.ndarray, np.ndarray]:
            x = rng.normal(size=(count, 4)).astype(np.float32)
            return x, (x[:, 0] + 0.3 * rng.normal(size=count) > 0).astype(np.uint8)

        for name, draw, classes in (("maps", maps, None), ("numbers", numbers, None), ("two", two, 2)):
            clients = [draw(count) for count in (20, 31, 12)]
            path = shared_tmp / f"{name}.h5"
            write_federation(path, clients, num_classes=classes, test=draw(60), content=name)

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(data: str, model: str, loss: str, *metrics: str, **changes: Any) -> dict[str, Any]:
    local = {"steps": 10, "batch_size": 10, "lr": changes.pop("lr", 0.5)}
    named = {"factory": f"own_shapes:{model}"}
    evaluate = {"train": {"every": 2}, "batch_size": 16, "metrics": [*metrics, *changes.pop("own", [])]}
    base = {"model": named, "loss": {"factory": f"own_shapes:{loss}"}, "data": f"{data}.h5", "python_path": [HERE]}
    return small("run", rounds=6, local=local, evaluate=evaluate, **base, **changes)


CASES = {
    "segmentation": (recipe("maps", "segmenter", "dice", own=[{"dice": "own_shapes:dice_score"}]), "test_dice", 0.8),
    "mean-and-variance": (recipe("numbers", "spread", "gaussian", lr=0.1), "test_loss", 0.0),
    "quantiles": (recipe("numbers", "quantiles", "pinball"), "test_loss", 0.6),
    "one-logit": (recipe("two", "logit", "bce", "auroc", "balanced-accuracy"), "test_accuracy", 0.85),
    "abstention": (recipe("two", "three", "evidence"), "test_loss", 0.4),
    "no-axis": (recipe("two", "scalar_logit", "bce"), "test_loss", 0.3),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES)
def test_a_loss_takes_outputs_of_its_own_shape(case, world, folder):
    """The same bits on all ranks as alone; a measure that the model reaches only if it was trained by that loss."""
    base, column, bound = CASES[case]
    run = hpcfed.run(base, world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run({**base, "output": "alone"}, world=World(), quiet=True)
        assert left_by(run) == left_by(alone)
    row = run.metrics[-1]
    assert (row[column] < bound) if column == "test_loss" else (row[column] > bound)
    if case == "one-logit":
        assert row["test_auroc"] > 0.95
        assert row["test_balanced-accuracy"] == pytest.approx(row["test_accuracy"], abs=0.05)
    else:
        assert row["test_accuracy"] is None


def test_scores_need_a_shape_that_they_know(world, folder, capfd):
    base = recipe("two", "three", "evidence")
    hpcfed.run({**base, "rounds": 1}, world=world)
    if world.rank == 0:
        assert "no accuracy, since the model's outputs are no scores of the classes" in "".join(capfd.readouterr())
    for changes, says in (
        ({"evaluate": {"metrics": ["auroc"]}}, r"evaluate.metrics: auroc: expected .*, got shape \(3,\)"),
        ({"stop": {"test_accuracy": 0.5}}, "stop: accuracy: expected outputs in the targets' shape"),
        ({"loss": {"name": "auto"}}, r"got shape \(2, 3\); a loss of your own"),
        ({"loss": {"factory": "own_shapes:dice"}}, "loss.factory raised .* called with output"),
    ):
        with pytest.raises(InputError, match=says):
            hpcfed.run({**base, "output": "other", **changes}, world=world, quiet=True)


@pytest.mark.parametrize(
    ("kind", "which"),
    {
        "module": "'log_scale' of Temperature",
        "idle": "'centres' of Idle",
        "attribute": "'log_scale'",
        "method": "'log_scale'",
        "closure": "'log_scale'",
        "list": "'log_scale'",
        "global": r"a tensor of shape \(1,\)",
        "partial": r"a tensor of shape \(1,\)",
    }.items(),
)
def test_a_loss_with_a_parameter_is_refused_by_its_name(kind, which, world, folder):
    """However the loss holds it: nobody would train it."""
    base = recipe("two", "three", "with_parameter")
    base["loss"]["args"] = {"kind": kind}
    with pytest.raises(InputError, match=f"the loss has a parameter of its own, {which}.*put it into the model"):
        hpcfed.run(base, world=world, quiet=True)


def test_a_loss_may_hold_constants_but_remembers_nothing(world, folder):
    base = recipe("two", "three", "with_parameter")
    base |= {"model": {"name": "logistic"}, "rounds": 1}
    for kind in ("constant", "weighted"):
        hpcfed.run({**base, "output": kind, "loss": {**base["loss"], "args": {"kind": kind}}}, world=world, quiet=True)
    base["loss"]["args"] = {"kind": "running"}
    with pytest.raises(InputError, match="a call changes the buffer 'seen' of Running"):
        hpcfed.run(base, world=world, quiet=True)
