"""When a run ends before its last round, and that it says so."""

from __future__ import annotations

import json
import math

import pytest

import hpcfed
from hpcfed.config.limits import Stop
from hpcfed.errors import Stopped
from hpcfed.stopping import Stopping
from tests.mpi.recipes import small, write_small


def scores(test_loss: float | None = None, test_accuracy: float | None = None) -> dict[str, float | None]:
    return {"test_loss": test_loss, "test_accuracy": test_accuracy}


def told(rule: dict, accuracies: list[float | None], losses: list[float] | None = None) -> int | None:
    """The number of the evaluation after which the rule ends the run."""
    stopping = Stopping(Stop(**rule))
    losses = losses or [1.0] * len(accuracies)
    for number, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), 1):
        stopping.add(scores())  # a round without evaluation
        if stopping.reason is not None:
            raise AssertionError("ended by a round that was not evaluated")
        stopping.add(scores(test_loss=loss, test_accuracy=accuracy))
        if stopping.reason is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("rule", "accuracies", "ends"),
    [
        ({}, [1.0, 1.0], None),
        ({"test_accuracy": 0.5}, [0.4, 0.5, 0.6], 2),
        ({"test_accuracy": 0.5, "for": 2}, [0.5, 0.4, 0.5, 0.5], 4),
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.1], 4),
        ({"patience": 2}, [0.1, 0.0, 0.2, 0.1, 0.2], 5),
        ({"test_accuracy": 0.9, "patience": 1}, [0.5, 0.5], 2),
    ],
)
def test_rules(rule, accuracies, ends):
    assert told(rule, accuracies) == ends


def test_patience_follows_the_loss_of_a_regression():
    assert told({"patience": 2}, [None] * 5, [3.0, 2.0, 2.5, 2.0, 1.0]) == 4


def test_a_loss_that_is_not_a_number_is_no_best_one():
    assert told({"patience": 3}, [None] * 5, [math.nan, 3.0, 2.0, 1.0, 0.5]) is None
    assert told({"patience": 2}, [None] * 4, [3.0, math.nan, math.nan, 1.0]) == 3


def test_a_run_ends_at_its_target_on_all_ranks(world, shared_tmp):
    world.on_root(lambda: write_small(shared_tmp))
    recipe = small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), rounds=50, stop={"test_accuracy": 0.5})
    result = hpcfed.run(recipe, world=world, quiet=True)
    accuracies = [row["test_accuracy"] for row in result.metrics]
    assert len(accuracies) < 50
    assert [accuracy >= 0.5 for accuracy in accuracies] == [False] * (len(accuracies) - 1) + [True]
    ending = json.loads((result.folder / "result.json").read_text())
    assert (ending["status"], ending["rounds"]) == ("finished", len(accuracies))
    assert "stop.test_accuracy" in ending["stopped"]
    assert (result.folder / "model.safetensors").exists()


def test_a_run_out_of_time_stops_with_a_checkpoint_and_goes_on(world, shared_tmp):
    """Rank 0's clock counts; the run stops while the next round and a checkpoint would still fit."""
    world.on_root(lambda: write_small(shared_tmp))
    recipe = small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), rounds=100_000, evaluate={"every": 1000})
    with pytest.raises(Stopped, match=r"stop.max_hours is near; the same command goes on"):
        hpcfed.run({**recipe, "stop": {"max_hours": 0.5 / 3600}}, world=world, quiet=True)
    folder = shared_tmp / "run"
    ending = json.loads((folder / "result.json").read_text())
    assert ending["status"] == "stopped"
    done = ending["rounds"]
    assert 1 <= done < 5000
    assert not (folder / "model.safetensors").exists()
    on = hpcfed.run({**recipe, "rounds": done + 2}, world=world, quiet=True)
    assert [row["round"] for row in on.metrics] == list(range(1, done + 3))
    through = hpcfed.run({**recipe, "rounds": done + 2, "output": str(shared_tmp / "through")}, world=world, quiet=True)
    models = [(result.folder / "model.safetensors").read_bytes() for result in (on, through)]
    assert models[0] == models[1]


def test_what_was_reached_counts_for_the_same_target_only():
    """A run that goes on remembers its best accuracy; how often it reached a target is of that target."""
    before = Stopping(Stop(test_accuracy=0.5, for_=2, patience=3))
    for accuracy in (0.6, 0.4, 0.6):
        before.add(scores(test_loss=1.0, test_accuracy=accuracy))
    same, other = (
        Stopping(Stop(test_accuracy=target, for_=2, patience=3), before.progress()) for target in (0.5, 0.55)
    )
    for stopping in (same, other):
        stopping.add(scores(test_loss=1.0, test_accuracy=0.6))
    assert same.reason is not None
    assert "stop.test_accuracy" in same.reason
    assert other.reason is not None
    assert "stop.patience: no better test accuracy in 3" in other.reason
    longer = Stopping(Stop(test_accuracy=0.5, for_=3, patience=9), before.progress())
    for ends in (False, True):  # it was reached in the last evaluation before
        longer.add(scores(test_loss=1.0, test_accuracy=0.5))
        assert (longer.reason is not None) == ends


def test_seeds_run_one_after_another(world, shared_tmp):
    world.on_root(lambda: write_small(shared_tmp))
    recipe = small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), seeds=[3, 5])
    results = hpcfed.run_seeds(recipe, world=world, quiet=True)
    assert [result.folder.name for result in results] == ["seed-3", "seed-5"]
    assert [result.recipe.seed.cohort for result in results] == [3, 5]
    assert results[0].metrics[-1]["test_loss"] != results[1].metrics[-1]["test_loss"]
    alone = hpcfed.run(small(shared_tmp / "alone", data=recipe["data"], seed=5), world=world, quiet=True)
    assert alone.metrics[-1]["test_loss"] == results[1].metrics[-1]["test_loss"]
    with pytest.raises(hpcfed.InputError, match="2 seeds"):
        hpcfed.run(recipe, world=world, quiet=True)
    with pytest.raises(hpcfed.InputError, match=r"seeds.*different whole numbers"):
        hpcfed.run_seeds({**recipe, "seeds": [1, 1]}, world=world, quiet=True)
