"""When a run ends before its last round, and that it says so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

import hpcfed
from hpcfed.config.limits import Stop
from hpcfed.config.load import load_recipe, to_plain
from hpcfed.config.metrics import WITH_ACCURACY, a_metric, check_stop
from hpcfed.errors import InputError, Stopped
from hpcfed.models.losses import ACCURACY
from hpcfed.run_folder.checkpoint.layout import StoppingState
from hpcfed.run_folder.stopping import Stopping
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by


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
def test_a_stop_rule_ends_at_the_expected_round(rule, accuracies, ends):
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
    same, other, forgetful = (
        Stopping(Stop(test_accuracy=target, for_=2, patience=3), before.progress()) for target in (0.5, 0.55, 0.5)
    )
    forgetful.forget()  # where the code that measures is another
    for stopping in (same, other, forgetful):
        stopping.add(scores(test_loss=1.0, test_accuracy=0.6))
    assert same.reason is not None
    assert "stop.test_accuracy" in same.reason
    assert forgetful.reason is None
    assert other.reason is not None
    assert "stop.patience: no better test accuracy in 3" in other.reason
    longer = Stopping(Stop(test_accuracy=0.5, for_=3, patience=9), before.progress())
    for ends in (False, True):  # it was reached in the last evaluation before
        longer.add(scores(test_loss=1.0, test_accuracy=0.5))
        assert (longer.reason is not None) == ends


METRICS = {
    name: a_metric(metric)
    for name, metric in {
        "auroc": "auroc",
        "brier": "brier",
        "own": {"whole": "mine:own", "better": "lower"},
        "silent": "mine:own",
        "cm": "confusion-matrix",
    }.items()
}
EMPTY = dict.fromkeys((f"test_{name}" for name in METRICS), None)


def saved(stopping: Stopping) -> dict[str, Any]:
    """The state as a checkpoint's manifest has it."""
    progress = json.loads(json.dumps(stopping.progress()))
    StoppingState.model_validate(progress)
    return progress


def ends_after(
    rule: Mapping[str, Any],
    values: list[dict[str, Any]],
    cut: int = 0,
    before: Mapping[str, Any] = MappingProxyType({}),
    metrics: Mapping[str, Any] = METRICS,
) -> int | None:
    """Return the evaluation, one a round, after which `rule` ends a run that another rule led through the first `cut`
    ones.
    """
    stopping = Stopping(Stop(**(before if cut else rule)), None, METRICS)
    for round, value in enumerate(values, 1):
        if round == cut + 1 and cut:
            stopping = Stopping(Stop(**rule), saved(stopping), metrics)
            stopping.go_on(cut)
            if stopping.reason is not None:
                return cut
        stopping.add({**scores(test_loss=1.0, test_accuracy=0.5), **EMPTY, **value}, round)
        if stopping.reason is not None:
            return round
    return None


def of(name: str, *values: float | None) -> list[dict[str, Any]]:
    return [{f"test_{name}": value} for value in values]


RULES = {
    "target": ({"metric": "auroc", "target": 0.5}, of("auroc", 0.4, None, math.nan, 0.5), 4),
    "target-below": ({"metric": "brier", "target": 0.2}, of("brier", 0.9, 0.3, 0.2), 3),
    "target-in-a-row": (
        {"metric": "own", "target": -1.0, "for": 2},
        of("own", -1.0, None, -1.0, math.nan, -2.0, -1.0),
        6,
    ),
    "patience": ({"metric": "auroc", "patience": 2}, of("auroc", 0.5, 0.6, 0.6, 0.5), 4),
    "patience-below": ({"metric": "brier", "patience": 2}, of("brier", 0.5, 0.6, 0.4, 0.4, 0.5), 5),
    "undefined-is-no-better": ({"metric": "auroc", "patience": 2}, of("auroc", 0.1, None, math.nan, 0.9), 3),
    "undefined-at-first": ({"metric": "own", "patience": 3}, of("own", math.nan, None, 5.0, 6.0, 7.0, 8.0), 6),
    "loss": ({"metric": "loss", "patience": 2}, of("loss", 1.0, 0.9, 0.9, 1.0), 4),
    "target-of-the-loss": ({"metric": "loss", "target": 0.9}, of("loss", 1.0, 0.9), 2),
    "accuracy": ({"metric": "accuracy", "patience": 2}, of("accuracy", 0.1, 0.2, 0.2, 0.1), 4),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_by_any_metric_ends_a_run_where_it_was_interrupted_or_not(name):
    rule, values, ends = RULES[name]
    assert ends_after(rule, values) == ends
    assert [ends_after(rule, values, cut, rule) for cut in range(1, ends)] == [ends] * (ends - 1)


@pytest.mark.parametrize("name", ["auroc", "accuracy", "loss", "own"])
def test_a_patience_added_later_knows_the_best_score_of_before(name):
    sign = -1 if name in ("loss", "own") else 1
    values = of(name, *(sign * value for value in (0.1, 0.9, 0.2, 0.3, 0.4, 0.5)))
    rule = {"metric": name, "patience": 3}
    assert ends_after(rule, values) == 5
    others = ({}, {"max_hours": 1.0}, {"metric": "brier", "patience": 9}, {"patience": 9})
    assert [ends_after(rule, values, 3, before) for before in others] == [5] * 4
    if name == "accuracy":
        assert ends_after({"patience": 3}, values, 3, {"test_accuracy": 0.95}) == 5


def test_the_best_score_of_another_function_does_not_count():
    values = of("own", 0.1, 0.5, 0.4, 0.4)
    other = METRICS | {"own": a_metric({"whole": "mine:other", "better": "lower"})}
    rule = {"metric": "own", "patience": 2}
    assert ends_after(rule, values, 1, rule) == 3
    assert ends_after(rule, values, 1, rule, other) is None
    rule = {"metric": "own", "target": 0.5, "for": 2}
    assert ends_after(rule, values, 1, rule) == 2
    assert ends_after(rule, values, 1, rule, other) == 3


def test_a_lower_patience_ends_a_run_at_once_if_its_last_round_was_evaluated():
    values = of("accuracy", 0.9, 0.1, 0.1, 0.1, 0.95)
    assert [ends_after({"patience": lower}, values, 3, {"patience": 9}) for lower in (1, 2, 3, 4)] == [3, 3, 4, None]
    before = Stopping(Stop(patience=9))
    for round, accuracy in enumerate((0.9, 0.1, 0.1), 1):
        before.add(scores(test_loss=1.0, test_accuracy=accuracy), round)
    lower = Stopping(Stop(patience=2), saved(before))
    lower.go_on(4)  # which has no score: a run's last round has
    assert lower.reason is None
    lower.go_on(3)
    assert lower.reason == "stop.patience: no better test accuracy in 2 evaluations"


def test_scores_of_another_model_are_forgotten():
    """A run that goes on with another `evaluate.model` counts from there; one that has ended is refused."""
    rule = Stop(patience=2, test_accuracy=0.95, for_=2)
    before = Stopping(rule, None, METRICS, {"model": "last", "statistics": "round"})
    for round, accuracy in enumerate((0.9, 0.1), 1):
        before.add(scores(test_loss=1.0, test_accuracy=accuracy), round)
    same, other = (
        Stopping(rule, saved(before), METRICS, {"model": model, "statistics": "round"})
        for model in ("last", "last-two")
    )
    for stopping in (same, other):
        stopping.add(scores(test_loss=1.0, test_accuracy=0.5), 3)
    assert (same.reason is None, other.reason is None) == (False, True)
    other = Stopping(rule, saved(before), METRICS, {"model": "last-two", "statistics": "round"})
    other.refuse_another_model(2, 3, "run")
    with pytest.raises(
        InputError, match=r"run: evaluate.model: .* after round 2, .* model: last; set evaluate.model=last,"
    ):
        other.refuse_another_model(2, 2, "run")


def test_how_rounds_were_measured_before_stays_known():
    """However often the run goes on; `verify` measures them so."""
    measured = [{"model": "last", "batch_size": str(size)} for size in (64, 32, 32)]
    progress: dict[str, Any] | None = None
    for number, by in enumerate(measured):
        stopping = Stopping(Stop(), progress, METRICS, by)
        stopping.go_on(2 * number)
        stopping.add(scores(test_loss=1.0, test_accuracy=0.5), 2 * number + 1)
        progress = saved(stopping)
    assert progress is not None
    assert progress["measured_before"] == [{"until": 2, "measured": measured[0]}]


@pytest.mark.parametrize(
    ("stop", "rounds", "before", "now"),
    [({}, 3, "last-two", "last"), ({"test_accuracy": 1e-9}, 9, "last", "cohort-average")],
    ids=["done", "stopped"],
)
def test_a_run_that_has_ended_keeps_the_model_that_it_measured(stop, rounds, before, now, world, shared_tmp):
    """Its record's last scores would be of another model than its files'; nothing of it is touched."""
    world.on_root(lambda: write_small(shared_tmp))
    recipe = small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), rounds=3, stop=stop)

    def files() -> dict[str, bytes] | None:
        kept = ("recipe.yaml", "metrics.jsonl", "model.safetensors", "certificate.json")
        return world.on_root(lambda: {name: (shared_tmp / "run" / name).read_bytes() for name in kept})

    hpcfed.run(recipe, [f"evaluate.model={before}"], world=world, quiet=True)
    there = files()
    with pytest.raises(InputError, match=f"evaluate.model: the run has ended after round .* with model: {before}"):
        hpcfed.run(recipe, [f"rounds={rounds}", f"evaluate.model={now}"], world=world, quiet=True)
    assert files() == there


@pytest.mark.parametrize(
    ("metric", "task", "says"),
    [
        ("f1-macro", "classification", "'f1-macro' is not evaluated; add it to evaluate.metrics"),
        ("test_auroc", "classification", "'test_auroc' is not evaluated; did you mean 'auroc'?"),
        ("cm", "classification", "'cm' is a matrix: expected a metric that is a number"),
        ("silent", "classification", "'silent' has no direction; add better: higher or lower to it in"),
        ("accuracy", "regression", "no accuracy is evaluated: got a regression federation; use loss or auroc"),
    ],
)
def test_a_metric_that_ends_nothing_is_refused(metric, task, says):
    with pytest.raises(InputError) as refused:
        check_stop(Stop(metric=metric, patience=2), METRICS, task)
    assert f"stop.metric: {says}" in str(refused.value)
    assert "\n" not in str(refused.value)
    for good in ("auroc", "own", "loss"):
        check_stop(Stop(metric=good, patience=2), METRICS, task)


def test_the_tasks_with_an_accuracy_are_those_that_measure_it():
    assert set(WITH_ACCURACY) == set(ACCURACY)


OWN = """
def wave(output, target):
    return float((output.double() * 1e3).sum() % 7) if len(target) else 0.0
"""


def test_a_run_by_a_metric_ends_alike_killed_or_not_and_a_lower_patience_at_once(world, shared_tmp, monkeypatch):
    def write() -> None:
        write_small(shared_tmp)
        (shared_tmp / "wave_metric.py").write_text(OWN, encoding="utf-8")

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    metrics = ["brier", {"wave": {"whole": "wave_metric:wave", "better": "higher"}}]
    changes = {"rounds": 40, "evaluate": {"metrics": metrics, "batch_size": 64}, "checkpoint": {"every": 1}}

    def run(output: str, **more: Any) -> tuple[Any, str]:
        result = hpcfed.run(small(output, **changes | more), world=world, quiet=True)
        return left_by(result), json.loads((result.folder / "result.json").read_text())["stopped"]

    rule = {"metric": "wave", "patience": 3}
    whole, why = run("whole", stop=rule)
    assert why == "stop.patience: no better test wave in 3 evaluations"
    waves = [row["test_wave"] for row in whole[1]]
    assert [len(waves) - 1 - waves.index(max(waves)), len(waves) < 40] == [3, True]
    run("killed", stop=rule, rounds=len(waves) - 1)
    assert run("killed", stop=rule) == (whole, why)
    run("added", rounds=len(waves) - 1)
    assert run("added", stop=rule) == (whole, why)
    run("lowered", rounds=len(waves))
    assert run("lowered", stop=rule) == (whole, why)
    goal = whole[1][1]["test_brier"]
    (_, rows), why = run("target", stop={"metric": "brier", "target": goal})
    assert [row["test_brier"] <= goal for row in rows] == [False] * (len(rows) - 1) + [True]
    assert why == f"stop.target: test brier {rows[-1]['test_brier']:.6g} reaches {goal:g}"


def test_scores_of_other_code_are_forgotten(world, shared_tmp, monkeypatch):
    """A best score, or a target reached, by what a metric was before it was edited."""
    monkeypatch.chdir(shared_tmp)
    metrics = [{"level": {"whole": "level_metric:level", "better": "higher"}}]
    stop = {"metric": "level", "patience": 2}
    about = {"evaluate": {"metrics": metrics, "batch_size": 64}, "stop": stop, "checkpoint": {"every": 1}}

    def run(level: float, rounds: int) -> list[float]:
        world.on_root(lambda: (shared_tmp / "level_metric.py").write_text(LEVEL.format(level)) and None)
        result = hpcfed.run(small("run", **about, rounds=rounds), world=world, quiet=True, accept_code=True)
        return [row["test_level"] for row in result.metrics]

    world.on_root(lambda: write_small(shared_tmp) and None)
    assert run(9.5, 2) == [9.5, 9.5]
    assert run(1.5, 9) == [9.5, 9.5, 1.5, 1.5, 1.5]


LEVEL = """
def level(output, target):
    return {} if len(target) else 0.0
"""


def test_a_recipe_records_the_new_keys_only_where_they_are_set():
    recipes = [load_recipe(small("run", stop=stop)) for stop in ({"patience": 3}, {"metric": "loss", "patience": 3})]
    plain = [to_plain(recipe)["stop"] for recipe in recipes]
    assert plain[0] == {"test_accuracy": None, "for": 1, "patience": 3, "max_hours": None}
    assert plain[1] == {**plain[0], "metric": "loss"}


def test_seeds_run_one_after_another(world, shared_tmp):
    world.on_root(lambda: write_small(shared_tmp))
    recipe = small(shared_tmp / "run", data=str(shared_tmp / "small.h5"), seeds=[3, 5])
    results = hpcfed.run_seeds(recipe, world=world, quiet=True)
    assert [result.folder.name for result in results] == ["seed-3", "seed-5"]
    assert [result.recipe.seed.cohort for result in results] == [3, 5]
    assert results[0].metrics[-1]["test_loss"] != results[1].metrics[-1]["test_loss"]
    alone = hpcfed.run(small(shared_tmp / "alone", data=recipe["data"], seed=5), world=world, quiet=True)
    assert alone.metrics[-1]["test_loss"] == results[1].metrics[-1]["test_loss"]
    with pytest.raises(hpcfed.InputError, match=r"2 seeds; give one .*hpcfed\.run_seeds"):
        hpcfed.run(recipe, world=world, quiet=True)
    with pytest.raises(hpcfed.InputError, match=r"seeds.*different whole numbers"):
        hpcfed.run_seeds({**recipe, "seeds": [1, 1]}, world=world, quiet=True)
