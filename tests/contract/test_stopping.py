"""When a run ends before its last round, and that it says so."""

from __future__ import annotations

import json

import pytest

import hpcfed
from hpcfed.config.recipe import Stop
from hpcfed.evaluate import Scores
from hpcfed.stopping import Stopping
from tests.mpi.recipes import small, write_small


def told(rule: dict, accuracies: list[float | None], losses: list[float] | None = None) -> int | None:
    """The number of the evaluation after which the rule ends the run."""
    stopping = Stopping(Stop(**rule))
    losses = losses or [1.0] * len(accuracies)
    for number, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), 1):
        if stopping.reason(Scores(), late=False) is not None:  # a round without evaluation
            raise AssertionError("ended by a round that was not evaluated")
        if stopping.reason(Scores(test_loss=loss, test_accuracy=accuracy), late=False) is not None:
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


def test_a_run_out_of_time_ends_with_an_evaluated_round(world, shared_tmp):
    """Rank 0's clock counts; the round in which it is found late is evaluated although it was not its turn."""
    world.on_root(lambda: write_small(shared_tmp))
    evaluate = {"every": 1000, "batch_size": 64}
    recipe = small(
        shared_tmp / "run",
        data=str(shared_tmp / "small.h5"),
        rounds=100_000,
        evaluate=evaluate,
        stop={"max_hours": 0.2 / 3600},
    )
    result = hpcfed.run(recipe, world=world, quiet=True)
    assert 1 <= len(result.metrics) < 5000
    assert result.metrics[-1]["test_loss"] is not None
    assert "stop.max_hours" in json.loads((result.folder / "result.json").read_text())["stopped"]


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
