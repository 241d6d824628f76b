"""The papers' rules of selection, on records written by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from hpcfed.errors import InputError
from hpcfed.io.figure_style import DPI, to_files
from hpcfed.lab.sweep.claims import Claim, RunState
from hpcfed.lab.sweep.figures import _curve, _heat_map, _lines, _number, _shades, _title, draw, table_of
from hpcfed.lab.sweep.grid import parse_grids, points
from hpcfed.lab.sweep.plan import Plan, make_plan
from hpcfed.lab.sweep.select import Candidate, Rule, candidates, parse_rule, remarks
from hpcfed.lab.sweep.table import read_results, result_records, summary_records

ROUNDS = 50
MASKS = ["updates=[{clip: {norm: 1.0, scales: {}}}]", "secure_aggregation={dropout: 0.3}"]
NOISE = [
    "updates=[{clip: {norm: 1.0, scales: {}}}]",
    "means=[{noise: {multiplier: 1.0}}]",
    "weights=uniform",
    "evaluate={}",
]


@pytest.fixture
def plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Three by two configurations of two seeds, 50 rounds each."""
    monkeypatch.chdir(folder)
    grids = parse_grids(["local.lr=10**-2:10**0:3", "algorithm.server_lr=1,2"])
    return make_plan("recipe.yaml", [f"rounds={ROUNDS}"], grids, [0, 1], None)


def record(plan: Plan, scores: dict[int, tuple[float, float]], statuses: dict[int, str] | None = None):
    """Write records: accuracy 0 but for the last ten rounds, where its mean is the configuration's and seed's score."""
    states = {}
    for unit in plan.units:
        score, status = scores.get(unit.point, (0.1, 0.1))[int(unit.seed)], (statuses or {}).get(unit.point, "finished")
        output = unit.recipe.output
        output.mkdir(parents=True, exist_ok=True)
        with (output / "metrics.jsonl").open("w", encoding="utf-8") as file:
            for number in range(1, ROUNDS + 1):
                late = number > ROUNDS - 10
                row = {"round": number, "train_accuracy": score + 0.001 * (-1) ** number if late else 0.9}
                row |= {"train_loss": 1 - score if late else 5.0, "cohort": [0], "seconds": {"total": 0.5}}
                file.write(json.dumps(row) + "\n")
        states[unit.name] = RunState(1, Claim(ending=status, recipe=unit.digest))
    return states


def ranked(plan: Plan, text: str, states):
    rows, rule = read_results(plan, states, parse_rule(text, plan))
    return candidates(plan, rows, rule), rows, rule


def test_the_highest_mean_accuracy_over_the_last_ten_rounds(plan):
    states = record(plan, {2: (0.6, 0.7), 3: (0.8, 0.4)})
    best, rows, rule = ranked(plan, "train_accuracy:last10", states)
    assert [(one.point, one.rank) for one in best[:2]] == [(2, 1), (3, 2)]
    assert best[0].mean == pytest.approx(0.65)
    assert best[0].std == pytest.approx(np.std([0.6, 0.7], ddof=1))
    summary = summary_records(plan, best)[0]
    assert (summary["local.lr"], summary["algorithm.server_lr"], summary["runs"]) == (0.1, 1.0, 2)
    assert summary["train_accuracy_mean"] == pytest.approx(0.651)  # the last round alone
    assert summary["train_accuracy_std"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    results = result_records(plan, rows, rule)
    assert len(results) == 12
    assert results[2] | {"score": 0.6} == results[2] | {"seed": "0", "rounds": 50, "seconds": 25.0, "score": 0.6}


def test_the_lowest_mean_loss_over_the_last_rounds(plan):
    states = record(plan, {2: (0.6, 0.7), 3: (0.8, 0.4)})
    best, _, rule = ranked(plan, "train_loss:last10", states)
    assert (best[0].point, best[0].mean) == (2, pytest.approx(0.35))
    assert str(rule) == "smallest mean train_loss over the last 10 rounds"
    best, _, _ = ranked(plan, "train_loss:last50", states)
    assert best[0].mean == pytest.approx((40 * 5 + 10 * 0.35) / 50)
    best, _, _ = ranked(plan, "train_loss:last10:max", states)
    assert best[0].point == 0


def test_what_diverged_on_any_seed_has_no_rank(plan):
    states = record(plan, {2: (0.6, 0.7), 3: (0.8, 0.9)}, {3: "finished", 5: "refused"})
    seed_1 = next(unit for unit in plan.units if (unit.point, unit.seed) == (3, "1"))
    states[seed_1.name] = RunState(1, Claim(ending="diverged", recipe=seed_1.digest))
    best, _, rule = ranked(plan, "train_accuracy:last10", states)
    assert best[0].point == 2
    assert [(one.point, one.rank, one.status) for one in best[-2:]] == [
        (3, None, "1 of 2 diverged"),
        (5, None, "refused"),
    ]
    assert "2 of 12 runs have no result" in remarks(plan, best, rule)[-1]
    summary = summary_records(plan, best)[-2]  # its metrics are those of the seed that finished
    assert (summary["score_mean"], summary["finished"]) == (None, 1)
    assert summary["train_accuracy_mean"] == pytest.approx(0.801)
    assert summary["train_accuracy_std"] is None


def test_nothing_is_best_where_all_diverged(plan):
    best, _, rule = ranked(plan, "train_accuracy:last10", record(plan, {}, dict.fromkeys(range(6), "diverged")))
    assert {one.rank for one in best} == {None}
    assert remarks(plan, best, rule) == []
    assert draw(plan, best, rule) == {}


@pytest.mark.parametrize("scores", [(0.689, 0.689), (0.687, 0.691)])
def test_ties_and_edges_are_reported(plan, scores):
    """Means that differ in their last bit, by rounding alone, are tied, too."""
    best, _, rule = ranked(plan, "train_accuracy:last10", record(plan, {4: (0.689, 0.689), 5: scores}))
    assert [(one.point, one.rank) for one in best[:3]] == [(4, 1), (5, 1), (0, 3)]
    said = remarks(plan, best, rule)
    assert said[0].startswith("tied with local.lr=1, algorithm.server_lr=2: the first")
    assert said[1].startswith("local.lr is best at the edge of its grid, 1:")
    assert len(said) == 2


@pytest.mark.parametrize(
    ("changes", "row", "says"),
    [
        (
            ["on_bad_client=skip"],
            {"skipped": [2]},
            "updates were left out (on_bad_client: skip), in 1 of 2 finished runs",
        ),
        (["on_bad_client=skip"], {"skipped": []}, None),
        (
            MASKS,
            {"skipped": [0, 1]},
            "clients dropped out, or too few were left to open the sum (secure_aggregation), in 1",
        ),
        (
            NOISE,
            {"skipped": [], "epsilon": 3.14159},
            "ε of a run is 3.142 at most (epsilon in results.csv). Choosing among",
        ),
    ],
)
def test_what_runs_left_out_and_promise_is_said(changes, row, says, folder, monkeypatch):
    monkeypatch.chdir(folder)
    plan = make_plan("recipe.yaml", ["rounds=1", *changes], parse_grids(["local.lr=0.1,0.3"]), [0], None)
    states = {}
    for unit, own in zip(plan.units, (row, {**row, "skipped": []}), strict=True):
        unit.recipe.output.mkdir(parents=True)
        (unit.recipe.output / "metrics.jsonl").write_text(json.dumps({"round": 1, "test_loss": 0.5, **own}) + "\n")
        states[unit.name] = RunState(1, Claim(ending="finished", recipe=unit.digest))
    rows, rule = read_results(plan, states, None)
    said = [one for one in remarks(plan, candidates(plan, rows, rule), rule) if not one.startswith("tied")]
    assert [one[: len(says or "")] for one in said] == ([says] if says else [])


def test_runs_that_end_by_their_scores_are_compared_by_their_last_round(folder, monkeypatch):
    """The mean over a fast run's few rounds has its poor first ones. Training columns may not be due in the last."""
    monkeypatch.chdir(folder)
    stopping = ["rounds=8", "stop.test_accuracy=0.9", "evaluate.train.every=3"]
    plan = make_plan("recipe.yaml", stopping, parse_grids(["local.lr=0.1,0.3"]), [0], None)
    states = {}
    for unit, accuracies in zip(plan.units, ([0.2, 0.5, 0.8, 0.91], [0.1, 0.7, 0.92]), strict=True):
        unit.recipe.output.mkdir(parents=True)
        lines = [
            {"round": n, "test_accuracy": one, "test_loss": {1: 3.0}.get(n), "train_loss": {3: 0.5}.get(n)}
            for n, one in enumerate(accuracies, 1)
        ]
        (unit.recipe.output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        states[unit.name] = RunState(1, Claim(ending="finished", recipe=unit.digest))
    rows, rule = read_results(plan, states, None)
    best = candidates(plan, rows, rule)
    assert (str(rule), best[0].point) == ("largest mean test_accuracy over the last round", 1)
    assert [one.mean for one in ranked(plan, "train_loss:last3", states)[0]] == [0.5, 0.5]
    assert {row["train_loss"] for row in result_records(plan, rows, rule)} == {0.5}
    assert {row["test_loss_mean"] for row in summary_records(plan, best)} == {None}  # that of round 1 is no last value
    assert not any("ended after" in said for said in remarks(plan, best, rule))
    best, _, rule = ranked(plan, "test_accuracy:last8", states)
    assert best[0].point == 0
    said = (
        "a run ended after 3 rounds, and its mean is over these; --select test_accuracy:last1 compares the last round"
    )
    assert said in " ".join(remarks(plan, best, rule))


def test_a_finished_run_that_was_measured_in_other_rounds_is_told(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for every, told in ((2, False), (3, True)):
        plan = make_plan(
            "recipe.yaml", ["rounds=8", f"evaluate.every={every}"], parse_grids(["local.lr=0.1"]), [0], None
        )
        (unit,) = plan.units
        unit.recipe.output.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"round": n, "test_accuracy": None if n % 2 else 0.1 * n}) for n in range(1, 9)]
        (unit.recipe.output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        states = {unit.name: RunState(1, Claim(ending="finished", recipe=unit.digest))}
        best, _, rule = ranked(plan, "test_accuracy:last6", states)
        said = "1 run has no test_accuracy in some of these rounds, since it was measured in others or is not finite"
        assert (said in " ".join(remarks(plan, best, rule))) == told


def test_scores_on_different_clients_samples_are_told(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for values, told in (("[0],[1]", True), ("{clients: [0], evaluate: all},{clients: [1], evaluate: all}", False)):
        plan = make_plan("recipe.yaml", [f"rounds={ROUNDS}"], parse_grids([f"cohort.without={values}"]), [0], None)
        best, _, rule = ranked(plan, "train_accuracy:last10", record(plan, {}))
        assert ("samples of different clients" in " ".join(remarks(plan, best, rule))) == told


def test_the_direction_of_a_metric_of_ones_own_is_the_recipes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text("def far(output, target):\n    return 0.0\n")
    for better in ("higher", "lower"):
        metrics = f"evaluate={{metrics: {{far: {{whole: 'mine:far', better: {better}}}}}}}"
        assert parse_rule("test_far:last1", make_plan("recipe.yaml", [metrics], [], [], None)).largest == (
            better == "higher"
        )


@pytest.mark.parametrize(
    ("column", "title", "number"),
    [
        ("test_accuracy", "test accuracy (%), last round", "87.5"),
        ("train_balance", "train balance (%), last round", "87.5"),
        ("test_my_accuracy", "test my accuracy, last round", "0.88"),
    ],
)
def test_figures_are_in_percent_where_the_metric_is_an_accuracy_whatever_its_name(
    folder, monkeypatch, column, title, number
):
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text("def far(output, target):\n    return 0.0\n")
    metrics = "{balance: balanced-accuracy, my_accuracy: {whole: 'mine:far', better: higher}}"
    plan = make_plan("recipe.yaml", [f"evaluate={{train: {{every: 1}}, metrics: {metrics}}}"], [], [], None)
    rule = parse_rule(f"{column}:last1", plan)
    assert _title(rule) == title
    assert _number(0.875, rule) == number


def test_what_a_method_reports_may_be_selected_by(plan):
    states = record(plan, {2: (0.6, 0.7), 3: (0.8, 0.4)})
    for unit in plan.units:
        path = unit.recipe.output / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[-1]["method"] = {"norm": 2.0 if unit.point == 2 else 3.0}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best, _, _ = ranked(plan, "method.norm:last1:min", states)
    assert [(one.point, one.rank, one.mean) for one in best[:2]] == [(2, 1, 2.0), (0, 2, 3.0)]


def test_a_heat_map_shows_each_mean_at_its_place(plan):
    states = record(plan, {2: (0.6, 0.7), 3: (0.8, 0.4)}, {5: "diverged"})
    best, _, rule = ranked(plan, "train_accuracy:last10", states)
    means, chosen = table_of(plan, 0, 1, {one.point: one for one in best}, rule)
    assert means == pytest.approx(np.array([[0.1, 0.1], [0.65, 0.6], [0.1, math.nan]]), nan_ok=True)
    assert np.argwhere(chosen).tolist() == [[1, 0]]
    figures = draw(plan, best, rule)
    assert list(figures) == ["local.lr-algorithm.server_lr.png", "local.lr-algorithm.server_lr.pdf"]
    assert figures["local.lr-algorithm.server_lr.png"].startswith(b"\x89PNG")


@pytest.mark.parametrize("largest", [True, False])
def test_a_cell_has_the_best_over_the_other_grids_and_the_lightest_is_the_best(largest):
    parsed = parse_grids(["local.lr=0.1,1", "algorithm.server_lr=1,2", "rounds=1,2"])
    plan = Plan("three", Path("three"), tuple(parsed), tuple(points(parsed)), ())
    means = np.array([3.0, math.nan, 1.0, 4.0, 2.0, 6.0, 5.0, 7.0])
    by_point = {point: Candidate(point, (), mean, math.nan) for point, mean in enumerate(means.tolist())}
    rule = Rule("train_loss", 1, largest)
    found, _ = table_of(plan, 0, 2, by_point, rule)
    wanted = np.array([[3.0, 4.0], [5.0, 7.0]] if largest else [[1.0, 4.0], [2.0, 6.0]])
    np.testing.assert_array_equal(found, wanted)
    shades = (wanted - wanted.min()) / np.ptp(wanted)
    assert _shades(found, rule) == pytest.approx(shades if largest else 1 - shades)


LOCAL = ",".join(f"{{steps: {steps}, batch_size: 10, lr: 0.1, weight_decay: 0.001}}" for steps in (1, 2))


@pytest.mark.parametrize("grids", [["algorithm=fedavg,fedexp", "local.lr=0.1,1"], [f"local={LOCAL}"]])
def test_the_title_lies_within_the_figure(folder, monkeypatch, grids):
    """Beside long labels, or over two columns, axes are narrower than a title."""
    monkeypatch.chdir(folder)
    plan = make_plan("recipe.yaml", [], parse_grids(grids), [0], None)
    by_point = {point: Candidate(point, (), 0.52, 0.1) for point in range(len(plan.points))}
    rule = Rule("clients.global.test.accuracy.worst_decile", 10, True, is_percentage=True)
    figure = _lines(plan, 0, by_point, rule) if len(grids) == 1 else _heat_map(plan, 0, 1, by_point, rule)
    figure.draw_without_rendering()
    (title,) = figure.texts
    assert 0 <= title.get_window_extent().x0 < title.get_window_extent().x1 <= figure.bbox.width
    assert _number(0.52, rule) == "52.0"


@pytest.mark.every(2)
@pytest.mark.parametrize("std", [0.7, 0.5 - 1e-9])
def test_a_bar_down_to_0_leaves_the_scale_of_the_means(folder, monkeypatch, recwarn, std):
    monkeypatch.chdir(folder)
    plan = make_plan("recipe.yaml", [], parse_grids(["local.lr=0.01,0.1,1"]), [0], None)
    spreads = enumerate([(0.02, 0.005), (0.5, std), (3.0, 0.2)])
    figure = _curve(plan, 0, {point: Candidate(point, (), *spread) for point, spread in spreads}, LOSS)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert 0.002 <= axes.get_ylim()[0] < 0.02
    assert to_files(figure)[".png"].startswith(b"\x89PNG")
    assert not recwarn.list


def test_values_that_are_words_have_a_line_each_with_labels_that_do_not_meet(folder, monkeypatch):
    monkeypatch.chdir(folder)
    methods = ["{name: fedavg}", "{name: fedprox, mu: 0.1}", "{name: scaffold}", "{name: fedexp, eps: 0.001}"]
    plan = make_plan("recipe.yaml", [], parse_grids([f"algorithm={','.join(methods)}"]), [0], None)
    spreads = enumerate([(0.6, 0.1), (math.nan, math.nan), (0.5, 0.2), (0.4, math.nan)])
    candidates = {point: Candidate(point, (), *spread) for point, spread in spreads}
    figure = _lines(plan, 0, candidates, LOSS)
    to_files(figure)
    (axes,) = figure.axes
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels] == ["fedavg", "fedprox, mu 0.1", "scaffold", "fedexp, eps 0.001"]
    extents = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(extents, 2))
    assert all(extent.x0 >= 0 for extent in extents)


MANY, NAMES = "local.lr=0.001:0.1:600", ",".join(f"{{name: m{number}}}" for number in range(600))


@pytest.mark.parametrize("grids", [[MANY, "rounds=1,2"], ["rounds=1,2", MANY], [f"model={NAMES}"]], ids=["a", "b", "c"])
def test_a_figure_of_many_values_can_be_opened(grids):
    parsed = parse_grids(grids)
    plan = Plan("wide", Path("wide"), tuple(parsed), tuple(points(parsed)), ())
    by_point = {point: Candidate(point, (), point / 1200, math.nan) for point in range(len(plan.points))}
    figure = _lines(plan, 0, by_point, LOSS) if len(grids) == 1 else _heat_map(plan, 0, 1, by_point, LOSS)
    assert max(figure.get_size_inches()) * DPI < 2**13


def test_of_many_that_tie_the_first_are_named(plan):
    parsed = parse_grids(["local.lr=0.001:0.1:1000"])
    wide = Plan("wide", Path("wide"), tuple(parsed), tuple(points(parsed)), plan.units)
    ties = [Candidate(point, (), 0.5, math.nan, rank=1) for point in range(1000)]
    said = remarks(wide, ties, LOSS)[0]
    assert "local.lr=0.001099; " in said
    assert said.endswith("; and 994 more: the first in the grid's order is chosen")


LOSS = Rule("train_loss", 1, largest=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train_acuracy:last10", "no column 'train_acuracy'; did you mean 'train_accuracy'"),
        ("train_loss:last", "expected column:lastK"),
        ("train_loss:last0", "the last 1 to 50 rounds"),
        ("train_loss:last51", "the last 1 to 50 rounds"),
        (f"train_loss:last{'9' * 5000}", "expected column:lastK"),
        ("method.x_loss:last1", "a direction, method.x_loss:last1:max or method.x_loss:last1:min"),
        ("server_lr:last1", "a direction, server_lr:last1:max or server_lr:last1:min"),
        ("test_accuracy:last1:best", "expected column:lastK"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(plan, text, message):
    with pytest.raises(InputError, match="--select") as refused:
        parse_rule(text, plan)
    assert message in str(refused.value)


def test_a_rule_on_what_is_not_recorded_is_refused_before_anything_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    over_clients = make_plan("recipe.yaml", ["evaluate.clients.every=1"], [], [], None)
    with pytest.raises(InputError, match="is not recorded: got clients of this federation have no test samples"):
        parse_rule("clients.global.test.accuracy.worst_decile:last1:max", over_clients)
    assert parse_rule("clients.global.train.accuracy.worst_decile:last1:max", over_clients).largest
    silent = make_plan("recipe.yaml", ["evaluate={every: 1}"], [], [], None)
    with pytest.raises(InputError, match=r"train_loss is not recorded; set evaluate\.train\.every=1"):
        parse_rule("train_loss:last1", silent)
