"""Grouping, and the numbers of the tables, against values worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hpcfed.errors import InputError
from hpcfed.io.figure_style import PAGE
from hpcfed.lab.report.comparison import compare
from hpcfed.lab.report.group import differences, group_runs, method_name
from hpcfed.lab.report.measure import (
    CRITERIA,
    Spread,
    best,
    curve,
    default_target,
    final,
    moving,
    reach,
    round_reached,
    spread,
)
from hpcfed.lab.report.paired import choose_baseline
from hpcfed.lab.report.plots import PERCENT, Scene
from hpcfed.lab.report.read import read_run
from hpcfed.lab.report.sections import own_metrics
from hpcfed.lab.report.tables import recipes_table
from hpcfed.lab.report.text import difference_text, hours_text, rounds_difference_text, seconds_text
from tests.report.conftest import make_rows, read_runs, write_code, write_run

ACCURACY, LOSS = CRITERIA[:2]


def cells(table, label):
    row = next(row for row in table.rows if row[0] == label)
    return dict(zip(table.header, row, strict=True))


def test_runs_that_differ_only_in_seed_name_and_output_are_grouped(tmp_path):
    methods = ("fedavg", "fedprox", "fedexp", "feddyn")
    rows = make_rows(2, "fedavg", 0)
    folders = [write_run(tmp_path / f"{name}-{seed}", name, seed, rows=rows) for seed in range(3) for name in methods]
    groups = group_runs(read_runs(folders))
    assert [group.label for group in groups] == ["FedAvg", "FedProx", "FedExP", "FedDyn"]
    assert [group.seeds for group in groups] == ["0, 1, 2"] * 4


@pytest.mark.parametrize("key", ["data_content", "rounds", "local"])
def test_any_other_key_makes_another_group(tmp_path, key):
    other = {"data_content": "ffff", "rounds": 61, "local": {"steps": 20, "batch_size": 50, "lr": 0.2}}
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1, change={key: other[key]})]
    assert [group.label for group in group_runs(read_runs(folders))] == ["a", "b"]
    this = {"lr": 0.1} if key == "local" else 1
    folders = [
        write_run(tmp_path / name / "run", change={key: value}) for name, value in (("c", this), ("d", other[key]))
    ]
    labels = [group.label for group in group_runs(read_runs(folders))]
    assert len(labels) == len(set(labels)) == 2
    assert all(label.startswith("FedAvg (") for label in labels)


def test_other_code_makes_another_group(tmp_path):
    own, rows = {"name": "her", "algorithm": {"factory": "mine:rule"}}, make_rows(1, "fedavg", 0)
    codes = [("ab12cd34ef",), ("ab12cd34ef",), ("0123456789",), ("0123456789", "ab12cd34ef")]
    folders = [
        write_code(write_run(tmp_path / str(seed), seed=seed, rows=rows, change=own), *code)
        for seed, code in enumerate(codes)
    ]
    groups = group_runs(read_runs(folders))
    assert [group.label for group in groups] == [
        "mine:rule (code mine.py ab12cd34)",
        "mine:rule (code mine.py 01234567)",
        "mine:rule (code mine.py ab12cd34, then 01234567 from round 6)",
    ]
    assert groups[0].seeds == "0, 1"
    table = recipes_table(groups)
    assert [row[:3] for row in table.rows] == [("code mine.py", "ab12cd34", "01234567")]
    assert table.note == "All other keys and recorded files of code are equal."
    folders[-1].joinpath("code.json").unlink()
    assert "Whether the code of mine:rule is the same was not" in recipes_table(group_runs(read_runs(folders))).note
    (folders[0] / "code.json").write_text('{"files": []}', encoding="utf-8")
    with pytest.raises(InputError, match="not a record of code"):
        read_runs(folders)


def test_labels_have_the_keys_that_can_change_a_model(tmp_path):
    changes = [
        {"local": {"lr": lr}, "rounds": rounds, "gpu_reduce": bool(lr)} for lr, rounds in ((0, 1), (1, 2), (1, 3))
    ]
    folders = [write_run(tmp_path / str(n), change={"name": "x", **change}) for n, change in enumerate(changes)]
    labels = [group.label for group in group_runs(read_runs(folders[:2]))]
    assert labels == ["FedAvg (lr 0)", "FedAvg (lr 1)"]
    assert group_runs(read_runs(folders))[2].label == "FedAvg (lr 1) (rounds 3)"


@pytest.mark.parametrize(
    ("lists", "labels"),
    [
        ([[{"median": {}}], [{"krum": {"attackers": 1}}], None], ["FedAvg (median)", "FedAvg (krum)", "FedAvg"]),
        (
            [[{"clip": {"norm": 1.0}}, {"quantize": {"bits": bits, "block": 9}}] for bits in (4, 8)],
            ["FedAvg (clip + quantize bits 4)", "FedAvg (clip + quantize bits 8)"],
        ),
        ([[{"factory": "mine:P", "args": {"a": a}}] for a in (1, 2)], ["FedAvg (mine:P a 1)", "FedAvg (mine:P a 2)"]),
        ([["sign"], ["cast"]], ['FedAvg (updates ["sign"])', 'FedAvg (updates ["cast"])']),
    ],
)
def test_labels_name_parts_and_the_arguments_that_differ(lists, labels, tmp_path):
    folders = [
        write_run(tmp_path / f"run-{k}", change={"updates": parts, "name": "run"}) for k, parts in enumerate(lists)
    ]
    assert [group.label for group in group_runs(read_runs(folders))] == labels


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([("mnist-fedavg", "fedavg"), ("mnist-fedexp", "fedexp")], ["FedAvg", "FedExP"]),
        ([("fedexp", "fedexp"), ("fedexp-eps", "fedexp")], ["FedExP", "fedexp-eps"]),
        ([("pooled", "fedavg"), ("fedprox", "fedprox")], ["pooled (FedAvg)", "FedProx"]),
        ([("x", "fedavg"), ("x", "fedavg"), ("y", "fedavg")], ["x (lr 0)", "x (lr 1)", "y"]),
    ],
)
def test_names_are_labels_where_they_tell_runs_apart(tmp_path, runs, labels):
    folders = [
        write_run(
            tmp_path / str(number), method, rows=make_rows(1, method, 0), change={"name": name, "local": {"lr": number}}
        )
        for number, (name, method) in enumerate(runs)
    ]
    groups = group_runs(read_runs(folders))
    assert [group.label for group in groups] == labels
    if runs[0][0] == "pooled":
        assert choose_baseline(groups, "Pooled") is groups[0]
        with pytest.raises(InputError, match=r"--baseline: .* a run's name.* got 'poold'; did you mean 'pooled'"):
            choose_baseline(groups, "poold")


def test_method_names():
    assert method_name({"algorithm": {"local": "prox", "normalize": "steps", "server": "fedexp", "mu": 1}}) == (
        "prox + steps + fedexp"
    )
    assert method_name({"algorithm": {"name": "fedprox"}, "guess": "limit"}) == "FedProx + GeL (limit)"
    own = {"algorithm": {"factory": "mine.rule:make"}, "guess": "limit"}
    assert method_name(own) == "rule:make + GeL (limit)"
    assert method_name(own, "A\x1b[31m\nrule") == "A[31mrule + GeL (limit)"


def test_differences_are_dotted_and_null_is_absent():
    assert differences([{"a": {"b": 1, "c": None}, "d": [1]}, {"a": {"b": 2}, "d": [1]}]) == {"a.b": ["1", "2"]}


def test_rounds_to_target_first_evaluated_round_counts(accuracies):
    run = read_run(accuracies("run", [None, 0.5, None, 0.9, 0.6, 0.95]))
    assert round_reached(run, ACCURACY, 0.9) == 4
    assert round_reached(run, ACCURACY, 0.951) is None
    assert round_reached(run, ACCURACY, 0.7, window=2) == 4  # (0.5 + 0.9) / 2
    assert round_reached(run, ACCURACY, 0.75, window=2) == 5
    assert round_reached(run, ACCURACY, 0.1, window=5) is None  # only four evaluations


@pytest.mark.parametrize(
    ("change", "sent", "title"),
    [
        ({"updates": [{"sign": {}}]}, "bytes_up", "Bytes up"),
        ({"down": [{"quantize": {"bits": 8}}]}, "bytes_down", "Bytes down"),
    ],
)
def test_bytes_are_shown_where_a_recipe_packs_what_is_sent(change, sent, title, accuracies):
    plain, packed = accuracies("plain", [0.1, 0.9]), accuracies("packed", [0.1, 0.9], change=change)
    for folder, size in ((plain, 32), (packed, 1)):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = (json.dumps(row | {sent: 1000 * size * row["round"]}) for row in rows)
        (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    for table in compare([plain, packed], [0.8]).results[:2]:
        column = table.header.index(title)
        assert [row[column] for row in table.rows] == ["64.0 k", "2000"]
    assert all(title not in table.header for table in compare([plain], [0.8]).results)


def test_never_reached_is_counted_and_in_no_mean(accuracies):
    folders = [
        accuracies("a", [0.1, 0.8, 0.9, 0.9], seed=0),
        accuracies("b", [0.1, 0.2, 0.3, 0.9], seed=1),
        accuracies("c", [0.1, 0.2, 0.3, 0.4], seed=2),
    ]
    (group,) = group_runs(read_runs(folders))
    cost = reach(group, ACCURACY, 0.8)
    assert (cost.reached, cost.runs) == (2, 3)
    assert (cost.spent["rounds"].mean, cost.spent["rounds"].std) == (3, pytest.approx(math.sqrt(2)))
    assert cost.spent["params"].mean == 3 * 2 * 1_781_100
    assert cost.spent["seconds"].mean == pytest.approx(3 * 0.26)
    results, targets = compare(folders, [0.8, 0.99]).results
    assert targets.rows[0][:3] == ("FedAvg", "80 %", "2 of 3: 3 ± 1.4")
    assert targets.rows[1][2:] == ("not reached", "–", "–", "–")
    assert cells(results, "FedAvg")["Final test accuracy"] == "73.33 ± 28.87 %"
    targets = compare(
        [*folders, accuracies("losses", [None, None], change={"algorithm": {"name": "fedexp"}})], [0.8]
    ).results[1]
    assert [row[2] for row in targets.rows] == ["2 of 3: 3 ± 1.4", "not measured"]


def test_a_run_still_going_has_not_reached_it_yet(accuracies):
    table = compare([accuracies("a", [0.1, 0.2], status=None)], [0.9]).results[1]
    assert table.rows[0][2] == "not reached yet"


def test_default_target_is_what_the_worst_finished_run_ends_with(accuracies):
    folders = [
        accuracies("a", [0.5, 0.9678]),
        accuracies("b", [0.5, 0.9345], change={"rounds": 9}),
        accuracies("c", [0.5, 0.1], change={"rounds": 8}, status="diverged"),
    ]
    groups = group_runs(read_runs(folders))
    assert default_target(groups, ACCURACY) == 0.93
    assert default_target(groups, ACCURACY, window=2) == 0.71  # (0.5 + 0.9345) / 2
    finals = [run.column("test_loss")[-1] for group in groups[:2] for run in group.runs]
    target = default_target(groups, LOSS)
    assert max(finals) <= target <= max(finals) * 1.1


def test_regression_is_compared_by_loss(accuracies):
    comparison = compare([accuracies("run", [None, None, None])])
    assert comparison.criterion == LOSS
    assert comparison.results[1].rows[0][2] == "3"  # the loss falls, and the target is where the run ends


def with_metrics(folder, metrics, **values):
    """Write a run of 3 rounds whose recipe has these metrics, with these test values round by round."""
    rows = make_rows(3, "fedavg", 0)
    for name, course in values.items():
        for row, value in zip(rows, course, strict=True):
            row[f"test_{name}"] = value
    return write_run(folder, rows=rows, change={"evaluate": {"every": 1, "metrics": metrics}})


def test_results_and_targets_go_by_any_metric_that_the_recipe_names(tmp_path):
    metrics = {"auroc": "auroc", "rmse": "rmse", "gain": {"whole": "mine:gain", "better": "higher"}}
    run = with_metrics(tmp_path / "run", metrics, auroc=[0.6, 0.9, 0.8], rmse=[3.0, 1.5, 2.0], gain=[-4.0, -2.0, -3.0])
    for name, target, final_value, best_value in (
        ("auroc", 0.85, "0.8", "0.9"),
        ("rmse", 1.7, "2", "1.5"),
        ("gain", -2.5, "-3", "-2"),
    ):
        comparison = compare([run], [target], metric=name)
        row = cells(comparison.results[0], "FedAvg")
        assert (row[f"Final test {name}"], row[f"Best test {name}"]) == (final_value, best_value)
        assert comparison.results[1].rows[0][1:3] == (f"{target:g}", "2")
    assert compare([run], metric="loss").criterion == LOSS


def test_a_finished_run_is_compared_by_a_metric_whose_direction_is_said_later(tmp_path):
    """Of runs with and without a direction in the recipe, the one that is said counts for both."""
    silent = with_metrics(tmp_path / "silent", {"gain": "mine:gain"}, gain=[3.0, 1.0, 2.0])
    says = with_metrics(tmp_path / "says", {"gain": {"whole": "mine:gain", "better": "lower"}}, gain=[3.0, 1.0, 2.0])
    for metric, larger in (("gain:max", True), ("gain:min", False)):
        assert compare([silent], [2.0], metric=metric).criterion.higher_is_better is larger
    assert not compare([silent, says], [2.0], metric="gain").criterion.higher_is_better
    best = cells(compare([silent], [2.0], metric="gain:max").results[0], "FedAvg")["Best test gain"]
    assert best == "3"


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("aurok", "expected one that a run recorded on its test set, got 'aurok'; did you mean 'auroc'"),
        ("brier", "expected one that a run recorded on its test set, got 'brier'; add it to evaluate.metrics"),
        ("silent", "metric 'silent': without a better direction; say it by --metric silent:max or silent:min"),
        ("silent:up", "expected silent:max or silent:min, got 'silent:up'"),
        ("auroc:min", "expected auroc:max, got 'auroc:min'"),
        ("turned", "metric 'turned': better in two directions"),
    ],
)
def test_a_metric_that_compares_nothing_is_refused(tmp_path, metric, says):
    def run(name, better):
        turned = {"whole": "mine:turned", "better": better}
        metrics = {"auroc": "auroc", "silent": "mine:silent", "turned": turned}
        return with_metrics(tmp_path / name, metrics, auroc=[0.5] * 3, silent=[1.0] * 3, turned=[1.0] * 3)

    with pytest.raises(InputError, match=says):
        compare([run("a", "higher"), run("b", "lower")], metric=metric)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("table", "metric 'table' is a matrix, which is not compared; use accuracy or loss"),
        ("auroc", "metric 'auroc' has no value in any run; use accuracy or loss"),
        ("confusion-matrix", "expected one that a run recorded on its test set, got 'confusion-matrix'"),
    ],
)
def test_a_metric_of_the_recipe_that_cannot_be_compared_says_why(tmp_path, metric, says):
    metrics = {"auroc": "auroc", "table": "confusion-matrix"}
    run = with_metrics(tmp_path / "run", metrics, auroc=[None] * 3, table=[[[1, 0], [0, 1]]] * 3)
    with pytest.raises(InputError, match=says):
        compare([run], metric=metric)


@pytest.mark.parametrize(
    ("metric", "is_what", "values", "target", "words"),
    [
        ("top5_accuracy", {"whole": "mine:f", "better": "higher"}, (60, 80), 70, ("80", "70", "")),
        ("inaccuracy", {"whole": "mine:f", "better": "lower"}, (30, 20), 25, ("20", "25", "")),
        ("neg_loss", {"whole": "mine:f", "better": "higher"}, (-4, -2), -2.5, ("-2", "-2.5", "")),
        ("balanced-accuracy", {"whole": "mine:f", "better": "higher"}, (0.6, 0.8), 70, ("0.8", "70", "")),
        ("balanced-accuracy", "balanced-accuracy", (0.6, 0.8), 0.7, ("80.00 %", "70 %", ", points")),
        ("balance", "balanced-accuracy", (0.6, 0.8), 0.7, ("80.00 %", "70 %", ", points")),
    ],
)
def test_units_are_the_metrics_and_not_their_names(tmp_path, metric, is_what, values, target, words):
    rows = [with_metrics(tmp_path / name, {metric: is_what}, **{metric: [*values, values[-1]]}) for name in "ab"]
    recipe = rows[1] / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lr: 0.1", "lr: 0.2").replace('"lr": 0.1', '"lr": 0.2'))
    comparison = compare(rows, [target], metric=metric)
    results, targets = comparison.results
    assert results.rows[0][3] == words[0]
    assert targets.rows[0][1] == words[1]
    assert comparison.differences.header[2] == f"Final test {metric}{words[2]}"
    (figure,) = [plot for plot in own_metrics(comparison.runs).plots if plot.column == f"test_{metric}"]
    scene = Scene(comparison.groups, comparison.criterion, comparison.targets, 1, comparison.baseline)
    formatter = figure.draw(scene, PAGE).axes[0].yaxis.get_major_formatter()
    assert (formatter is PERCENT) == words[0].endswith("%")


@pytest.mark.parametrize(
    ("better", "value", "target"),
    [
        *(("higher", 0.00456, 0.0045), ("higher", -0.00412, -0.0042), ("higher", -0.004, -0.004)),
        *(("higher", 73.25, 73.0), ("higher", 0, 0.0), ("lower", 0, 0.0), ("lower", -2.57, -2.5)),
        *(("lower", 1234, 1300.0), ("lower", 0.3, 0.3), ("lower", 5e-324, 5e-324)),
    ],
)
def test_default_targets_of_ones_own_metrics_are_two_digits_towards_the_worse(tmp_path, better, value, target):
    run = with_metrics(tmp_path / "run", {"gain": {"whole": "mine:gain", "better": better}}, gain=[None, None, value])
    comparison = compare([run], metric="gain")
    assert comparison.targets == (target,)
    assert comparison.results[1].rows[0][2] == "3"


def test_spread_uses_the_sample_deviation():
    assert spread([1.0, 3.0, math.nan]).std == pytest.approx(math.sqrt(2))
    assert spread([2.0]).std is None
    assert spread([math.nan]) is None


def test_curve_is_the_mean_where_all_seeds_are_and_each_seed_alone_after_that(accuracies):
    folders = [accuracies("a", [0.1, 0.2, 0.3, 0.4], seed=0), accuracies("b", [0.3, 0.4], seed=1, status=None)]
    (group,) = group_runs(read_runs(folders))
    line = curve(group, "test_accuracy", "round")
    np.testing.assert_allclose(line.mean, [0.2, 0.3])
    np.testing.assert_allclose(line.std, [math.sqrt(0.02)] * 2)
    ((x, y),) = line.tails
    assert (x.tolist(), y.tolist()) == ([2, 3, 4], [0.2, 0.3, 0.4])


def test_evaluations_every_few_rounds_make_a_line_without_gaps(tmp_path):
    (group,) = group_runs([read_run(write_run(tmp_path / "run", rows=make_rows(20, "fedexp", 0, every=5)))])
    assert curve(group, "test_accuracy", "round").x.tolist() == [5, 10, 15, 20]
    assert not curve(group, "train_loss", "round")


def test_a_window_averages_evaluations_in_a_row_and_skips_the_rounds_between(accuracies):
    run = read_run(accuracies("run", [None, 0.5, None, 0.9, 0.6]))
    means = moving(run.column("test_accuracy"), 2)
    assert np.isnan(means).tolist() == [True, True, True, False, False]
    assert means[3:] == pytest.approx([0.7, 0.75])
    assert (final(run, "test_accuracy", 2), best(run, ACCURACY, 2)) == (pytest.approx(0.75), pytest.approx(0.75))
    assert final(run, "test_accuracy", 9) == pytest.approx(2 / 3)  # of all there are
    assert math.isnan(best(run, ACCURACY, 9))


@pytest.mark.parametrize("window", [3, 10])
def test_equal_values_reach_their_own_target_and_have_no_deviation(window, accuracies):
    """Though a mean of equal values may differ from them in its last bit."""
    right = next(k / 359 for k in range(359) if moving(np.full(window, k / 359), window)[-1] < k / 359)
    folders = [accuracies(str(seed), [0.0, *[right] * 12], seed) for seed in range(3)]
    assert compare(folders, [right], window).results[1].rows[0][2] == str(window + 1)
    assert spread([0.1, 0.1, 0.1]) == Spread(0.1, 0.0, 3)


def test_an_earlier_value_does_not_stand_for_one_that_is_not_finite_at_the_end(accuracies):
    """Of a round that was evaluated; one between evaluations, where a signal ended the run, says nothing."""
    folders = [accuracies("a", [0.5, 0.6, 0.7], 0), accuracies("b", [0.5, 0.6, None], 1)]
    assert compare(folders).results[0].rows[0][3] == "1 of 2: 70.00 %"
    between = accuracies("c", [None, 0.6, None], change={"evaluate": {"every": 2}}, status="stopped")
    assert final(read_run(between), "test_accuracy") == 0.6


def test_a_curve_loses_no_more_than_its_first_fifth_to_the_window(accuracies):
    (group,) = group_runs([read_run(accuracies("run", [number / 20 for number in range(20)]))])
    assert curve(group, "test_accuracy", "round", 3).x[0] == 3
    assert curve(group, "test_accuracy", "round", 20).x[0] == 4
    assert curve(group, "test_accuracy", "seconds").x == pytest.approx(0.26 * np.arange(1, 21))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (seconds_text(Spread(0.0, None, 1)), "0 s"),
        (seconds_text(Spread(0.0123, 0.001, 3)), "12.3 ± 1.0 ms"),
        (seconds_text(Spread(125.0, None, 1)), "125 s"),
        (seconds_text(Spread(11556.0, 360.0, 2)), "3.21 ± 0.10 h"),
        (rounds_difference_text(-15.25), "−15.2"),
        (rounds_difference_text(0.0), "0"),
        (difference_text(-0.00512, ACCURACY), "−0.51"),
        (difference_text(0.0123, LOSS), "+0.0123"),
        (hours_text(Spread(0.00144, None, 1)), "0.00144"),
        (hours_text(Spread(12345.6, None, 1)), "12,346"),
    ],
)
def test_numbers_in_words(text, words):
    assert text == words
