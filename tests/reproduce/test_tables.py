"""Tables of the experiments, from made-up records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind

from hpcfed.client.effective_steps import effective_steps
from hpcfed.cohort import Cohort
from hpcfed.lab.report.read import read_run
from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.lab.reproduce.coefficients import coefficients, constants
from hpcfed.lab.reproduce.experiment import Goal
from hpcfed.lab.reproduce.figures import heat_map
from hpcfed.lab.reproduce.measure import SettingRuns, best_of, last_rounds, rounds_apart
from hpcfed.lab.reproduce.plan import Setting
from hpcfed.lab.reproduce.projections import projections
from hpcfed.lab.reproduce.published import HEADER, rows, verdict
from hpcfed.lab.reproduce.table import _ratio, make_table, setting_records
from hpcfed.lab.sweep.grid import parse_grids, points
from tests.report.conftest import NUM_PARAMETERS, make_rows, write_run

WITHOUT, WITH = "fedprox", "fedprox-gel"


def measured(
    folder: Path, accuracies: Mapping[str, Sequence[Sequence[float]]], column: str = "test_accuracy"
) -> list[SettingRuns]:
    """Records of methods of GeL's synthetic experiment, with accuracies, or another column, by seed and round."""
    found = []
    for method, by_seed in accuracies.items():
        folders = []
        for seed, values in enumerate(by_seed):
            rows = make_rows(len(values), "fedavg", seed)
            for row, value in zip(rows, values, strict=True):
                row[column] = value
            folders.append(write_run(folder / f"{method}-{seed}", seed=seed, rows=rows))
        (point,) = points([])
        setting = Setting("tuned", method, point, 500, tuple(folders))
        found.append(SettingRuns(setting, method, {seed: read_run(path) for seed, path in enumerate(folders)}))
    return found


def test_the_best_of_a_grid_has_the_largest_concordance(tmp_path):
    """And the smallest loss: whether larger is better depends on the column. All its runs are there, none diverged."""
    grid = []
    for k, (concordance, loss) in enumerate([(0.6, 0.3), (0.8, 0.2), (0.7, 0.1), (0.9, 0.01), (0.9, 0.01)]):
        rows = make_rows(1, "fedavg", 0)
        rows[0] |= {"test_concordance": concordance, "test_loss": loss}
        folder = write_run(tmp_path / f"run-{k}", seed=0, rows=rows)
        (point,) = points([])
        run = replace(read_run(folder), status="diverged" if k == 3 else "finished")
        planned = (folder, tmp_path / "not-yet") if k == 4 else (folder,)
        grid.append(SettingRuns(Setting("training", "fedavg", point, 1, planned), str(k), {0: run}))
    for name, best in (("flamby-tcga-tuning", ["1", "2", "0"]), ("flamby-heart-tuning", ["2", "1", "0"])):
        assert [one.title for one in best_of(experiments()[name], grid)] == best


def test_the_papers_choice_has_its_place_in_the_grid(tmp_path):
    """FedExP writes the base-10 logarithms of η_g and η_l: 0 and −0.523."""
    experiment = experiments()["fedexp-step-sizes"].limited(["emnist"])
    grid = []
    for k, (point, accuracy) in enumerate(
        zip(points(parse_grids(["algorithm.server_lr=0.1,1", "local.lr=0.3,1"])), (0.7, 0.5, 0.6, 0.4), strict=True)
    ):
        folder = write_run(tmp_path / str(k), rows=[make_rows(1, "fedavg", 0)[0] | {"test_accuracy": accuracy}])
        grid.append(SettingRuns(Setting("emnist", "fedavg", point, 1, (folder,)), "FedAvg", {0: read_run(folder)}))
    (row,) = make_table(experiment, grid).rows
    assert row[2:] == ("server_lr 0.1, lr 0.3", "70.00 %", "server_lr 1, lr 0.3", "60.00 %", "2 of 4")


@pytest.mark.parametrize(("unit", "ratio"), [("rounds", "1.00"), ("models", "2.00")])
def test_a_ratio_is_in_the_papers_unit(unit, ratio, tmp_path):
    """FedExP's Table 1 counts rounds, FedDyn's tables models, of which SCAFFOLD sends two a round."""
    experiment = experiments()["gel-synthetic"].limited(["tuned"])
    methods = {WITHOUT: experiment.methods[WITHOUT].model_copy(update={"models": 2}), WITH: experiment.methods[WITH]}
    measure = experiment.measure.model_copy(update={"unit": unit, "beyond": False, "savings": False})
    experiment = experiment.model_copy(update={"methods": methods, "measure": measure})
    alike = {name: [[0.5, 0.86]] for name in methods}
    table = make_table(experiment, measured(tmp_path, alike))
    (row,) = [row for row in table.rows if row[2] == WITHOUT]
    assert row[table.header.index("Ratio")] == ratio
    some = {WITHOUT: [[0.5, 0.86], [0.5, 0.6]], WITH: [[0.5, 0.86]] * 2}  # a mean of some seeds has no ratio
    (row,) = [row for row in make_table(experiment, measured(tmp_path / "some", some)).rows if row[2] == WITHOUT]
    assert (row[3], row[table.header.index("Ratio")]) == ("1 of 2: 2", "–")
    assert _ratio(3.0, 0.0) == "–"  # a paper may write 0


@pytest.mark.parametrize(("window", "rounds"), [(1, "2"), (2, "3")])
def test_a_moving_average_that_reaches_the_target_is_named(window, rounds, tmp_path):
    experiment = experiments()["gel-synthetic"].limited(["tuned"])
    measure = experiment.measure.model_copy(update={"window": window, "beyond": False, "savings": False})
    experiment = experiment.model_copy(update={"measure": measure})
    table = make_table(experiment, measured(tmp_path, {name: [[0.5, 0.86, 0.9]] for name in (WITHOUT, WITH)}))
    assert {row[3] for row in table.rows if row[1] == "85 %"} == {rounds}
    assert (" or better in the mean of 2 evaluations, ±" in table.note) == (window == 2)


@pytest.mark.parametrize(
    ("of_the_reference", "told"),
    [
        ([[0.5, 0.86, 0.87, 0.88], [0.5, 0.86, 0.89, 0.9]], "+3.50 ± 6.35"),  # after 4 and 3 rounds
        ([[0.5, 0.86, 0.87], [0.5, 0.86, 0.89]], "–"),  # which ended before
    ],
)
def test_how_far_beyond_the_target_the_reference_is(of_the_reference, told, tmp_path):
    own = [[0.5, 0.8, 0.84, 0.85], [0.5, 0.8, 0.851, 0.9]]
    experiment = experiments()["gel-synthetic"]
    table = make_table(experiment, measured(tmp_path, {WITHOUT: own, WITH: of_the_reference}))
    rows = {row[2]: row for row in table.rows}
    assert table.header[-4:] == ("Beyond", "Paper: beyond", "Saved: network", "Saved: gradients")
    assert rows[WITHOUT][-4:-2] == (told, "+1.18")
    assert rows[WITH][-4:-2] == ("–", "–")
    # Rounds 4 and 3 without, 2 and 2 with; 20 × parameters up and down and 10,000 gradients a round.
    assert rows[WITHOUT][-2:] == (f"{1.5 * 20 * NUM_PARAMETERS * 4 / 2**20:.2f} MiB", "15,000")
    assert rows[WITHOUT][3] == f"3.5 ± {12.7062 * 0.5:.1f}"  # the 95 % interval of two seeds


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_how_far_beyond_the_target_an_own_metric_is_in_its_unit(better, tmp_path):
    own = {"evaluate": {"every": 1, "metrics": {"my_accuracy": {"whole": "mine:f", "better": better}}}}
    experiment = experiments()["gel-synthetic"].limited(["tuned"])
    measure = experiment.measure.model_copy(update={"column": "test_my_accuracy"})
    experiment = experiment.model_copy(update={"measure": measure, "recipe": {**experiment.recipe, **own}})
    values = {WITHOUT: [[0.5, 0.84, 0.86]] * 2, WITH: [[0.5, 0.86, 0.88], [0.5, 0.86, 0.9]]}
    if better == "lower":
        values = {WITHOUT: [[0.9, 0.86, 0.84]] * 2, WITH: [[0.9, 0.84, 0.82], [0.9, 0.84, 0.8]]}
    table = make_table(experiment, measured(tmp_path, values, "test_my_accuracy"))
    (row,) = [row for row in table.rows if row[2] == WITHOUT]
    assert row[1] == "0.85"
    assert row[-4:-2] == ("+0.04 ± 0.127", "+1.18")


@pytest.mark.parametrize(("kind", "score"), [("best", "80.00 ± 14.14 %"), ("final", "70.00 ± 7.07 %")])
def test_the_best_accuracy_of_a_run_may_lie_before_its_end(kind, score, tmp_path):
    """FedDyn's figure 1b; a final one is the mean of the last two evaluations."""
    experiment = experiments()["gel-synthetic"].limited(["tuned"])
    measure = experiment.measure.model_copy(update={"kind": kind, "last": 2, "intervals": False})
    best = experiment.model_copy(update={"measure": measure})
    table = make_table(best, measured(tmp_path, {WITHOUT: [[0.5, 0.9, 0.6], [0.5, 0.6, 0.7]]}))
    assert table.rows[0][2] == score


def test_a_published_mean_agrees_differs_or_cannot_be_told(tmp_path):
    """By Welch's interval, as SciPy computes it."""
    experiment = experiments()["niid-mnist"]
    values = {"fedavg": (0.9890, 0.9886, 0.9894), "scaffold": (0.95, 0.9502, 0.9498), "fedprox": (0.4, 0.6, 0.5)}
    found = measured(tmp_path, {name: [[each, each - 0.01] for each in own] for name, own in values.items()})
    settings = [replace(one, setting=replace(one.setting, rounds=2)) for one in found]
    case = experiment.cases["dir05"].model_copy(
        update={"paper": {"fedavg": [98.89, 0.07], "scaffold": [99.07, 0.06], "fedprox": [51.79, 26.75]}}
    )
    table = {row[1]: dict(zip(HEADER, row, strict=True)) for row in rows(experiment, case, settings)}
    assert [row["Verdict"] for row in table.values()] == ["agrees", "differs", "this table cannot tell"]
    assert table["fedavg"]["Best"] == "98.90 ± 0.04 %"
    assert table["fedavg"]["Last"] == "97.90 ± 0.04 %"
    welch = ttest_ind(values["fedavg"], (0.9882, 0.9889, 0.9896), equal_var=False).confidence_interval(0.95)
    assert table["fedavg"]["Difference"] == f"+0.01 [{100 * welch.low:+.2f}, {100 * welch.high:+.2f}]".replace("-", "−")
    assert rows(experiment, case, found)[0][-1] == "not finished"
    alone = [replace(one, setting=replace(one.setting, folders=one.setting.folders[:1])) for one in settings]
    alone = [replace(one, runs={0: one.runs[0]}) for one in alone]
    assert {row[-1] for row in rows(experiment, case, alone)} == {"one run cannot tell"}
    assert verdict(0.012, 0.01) == "not decided"


def test_a_run_that_diverged_says_so_in_each_table(tmp_path):
    """It has fewer rounds than planned, as one that goes on, and its last value stands for its end."""
    names, without = experiments(), {"beyond": False, "savings": False, "unit": "rounds"}
    for name, method, kind, place in (
        ("niid-mnist", "fedavg", "published", "Seeds"),
        ("gel-synthetic", WITHOUT, "final", "Seeds"),
        ("gel-synthetic", WITHOUT, "rounds", "Rounds"),
    ):
        case = next(iter(names[name].cases))
        measure = names[name].measure.model_copy(update={**without, "kind": kind})
        experiment = names[name].limited([case]).model_copy(update={"measure": measure})
        (one,) = measured(tmp_path / f"{name}-{kind}", {method: [[0.5, 0.6], [0.5, 0.9]]})
        runs = {seed: replace(run, status="finished" if seed else "diverged") for seed, run in one.runs.items()}
        drawn = make_table(experiment, [replace(one, runs=runs, setting=replace(one.setting, case=case, rounds=3))])
        cells = {row[drawn.header.index(place)] for row in drawn.rows}
        assert {cell.endswith(", 1 diverged") for cell in cells} == {True}
        assert kind != "published" or {row[-1] for row in drawn.rows} == {"diverged"}


def test_two_grids_are_drawn_as_a_heat_map_that_names_no_cell_without_runs(tmp_path):
    """GeL's figure 7: test accuracies, the least training loss outlined."""
    experiment = experiments()["gel-fedopt-synthetic"]
    grid = []
    for place, point in enumerate(points(parse_grids(["algorithm.server_lr=0.1,1", "local.lr=0.01,0.1"]))):
        folder = write_run(
            tmp_path / str(place), rows=[row | {"train_loss": 1.0} for row in make_rows(3, "fedavg", place)]
        )
        runs = {0: read_run(folder)} if place else {}
        grid.append(SettingRuns(Setting("synthetic", "fedavgcm", point, 3, (folder,)), "FedAvgCM", runs))
    drawn = heat_map(experiment, grid)
    assert {name.rpartition(".")[2] for name in drawn} == {"png", "pdf"}
    assert heat_map(experiment, []) == {}


def test_averages_in_figures_are_over_as_many_rounds_of_every_column(tmp_path):
    """FedExP's 20 rounds are one value of the training columns where these are measured every 20."""
    rows = [
        row | {"train_loss": 1.0 if row["round"] in (1, 20, 40, 60) else None} for row in make_rows(60, "fedavg", 0)
    ]
    folder = write_run(tmp_path / "run", rows=rows)
    (point,) = points([])
    found = [SettingRuns(Setting("tuned", WITHOUT, point, 60, (folder,)), WITHOUT, {0: read_run(folder)})]
    assert [rounds_apart(found, column) for column in ("test_accuracy", "train_loss", "none")] == [1, 20, 1]
    assert rounds_apart([], "train_loss") == 1
    averaged, alone = (experiments()[name] for name in ("gel-fedopt-tuning", "feddyn-mnist-tuning"))
    assert last_rounds(averaged, found, "train_loss") == 20 * averaged.measure.last > 20
    assert last_rounds(alone, found, "train_loss") == 1


def test_methods_with_grids_are_compared_at_the_points_that_reach_the_target_first(tmp_path):
    """FedDyn's Table 6: the target is what the best of FedAvg's points has at a round."""
    experiment, grid = experiments()["feddyn-synthetic-tuned"].limited(["models"]), []
    losses = {"fedavg": [[3, 2, 1.9, 1.8], [3, 2.5, 1.5, 1.4]], "feddyn": [[3, 1.6, 1.5, 1.2], [1.9, 1.8, 1.7, 1.5]]}
    case = experiment.cases["models"].model_copy(update={"targets": [Goal(of="fedavg", round=3)]})
    experiment = experiment.model_copy(update={"cases": {"models": case}})
    for method, by_point in losses.items():
        for point, values in zip(points(parse_grids(["local.lr=1,0.1"])), by_point, strict=True):
            rows = [row | {"test_loss": v} for row, v in zip(make_rows(4, "fedavg", 0), values, strict=True)]
            folder = write_run(tmp_path / f"{method}{point.label}", rows=rows)
            grid.append(SettingRuns(Setting("models", method, point, 4, (folder,)), method, {0: read_run(folder)}))
    found = {row[2]: row[3] for row in make_table(experiment, grid).rows}
    assert found == {"fedavg (lr 0.1)": "3", "feddyn (lr 1)": "3"}
    cells = setting_records(experiment, grid)
    keys = ("method", "local.lr", "runs", "score")
    assert [tuple(row[key] for key in keys) for row in cells[:2]] == [
        ("fedavg", "1", 1, 1.8),
        ("fedavg", "0.1", 1, 1.4),
    ]
    table = make_table(experiment, [one for one in grid if one.setting.method == "feddyn"])
    assert {row[3] for row in table.rows} == {"no target yet"}


def test_coefficients_of_gradients_and_the_constants_of_gels_bound():
    steps, guessed, momentum = 5, 7, 0.9
    ours = coefficients(steps, guessed, momentum)
    np.testing.assert_allclose(ours, coefficients(steps + guessed, 0, momentum)[:steps])  # as figure 3 says
    effective = effective_steps(steps, guessed, lr=0.1, momentum=momentum, mu=0.0)
    assert ours.sum() == pytest.approx(effective)
    alike, shares = np.full(4, 5), np.full(4, 0.25)
    equal = Cohort(np.arange(4), shares, np.ones(4), 1.0, alike, np.zeros(4), alike)
    assert constants(equal, 0.0) == pytest.approx((5, 1, 4, 20))  # τ, 1, τ − 1, τ² − τ without momentum
    guessing = Cohort(np.arange(4), shares, np.ones(4), 1.0, alike, np.full(4, 7.0), alike)
    first, square, last = ours.sum(), ours @ ours, ours[-1]
    wanted = (first, square / first, square - last**2, first**2 - first * last)
    assert constants(guessing, momentum) == pytest.approx(wanted)
    shares, steps, two = np.array([0.25, 0.75]), np.array([1, 2]), np.arange(2)
    unequal = Cohort(two, shares, 2 * shares, 1.0, steps, np.zeros(2), steps)
    # a_i are (1,) and (1.5, 1), τ_eff is 2.125, w = (2, 15)/17: the sums of equation 12 by hand
    assert constants(unequal, 0.5) == pytest.approx((2.125, 1.779412, 1.985294, 3.75), rel=1e-6)
    endless = Cohort(two, shares, 2 * shares, 1.0, steps, np.full(2, np.inf), steps)
    assert constants(endless, 0.5)[0] == pytest.approx(2 * 0.25 + 4 * 0.75)


def test_fedexps_condition_as_its_definition_has_it_from_the_record_of_a_run():
    """Three clients' quadratics with the common minimum w*, some steps too long for condition (6)."""
    rng = np.random.default_rng(1)
    matrices, optimum, w = rng.normal(size=(3, 2, 6)), rng.normal(size=6), np.zeros(6)
    wanted, rows = [], []
    for lr in (0.05, 0.08, 0.3, 0.05):
        models = [w.copy() for _ in matrices]
        for _ in range(3):
            models = [y - lr * a.T @ (a @ (y - optimum)) for a, y in zip(matrices, models, strict=True)]
        deltas = w - np.array(models)
        mean, used = deltas.mean(axis=0), 1.7
        before = ((w - optimum) ** 2).sum()
        closest = (w - optimum) @ mean / (mean @ mean)
        wanted.append((np.mean(((np.array(models) - optimum) ** 2).sum(axis=1)) / before, closest))
        w = w - used * mean
        rows.append((((w - optimum) ** 2).sum(), used, mean @ mean, (deltas**2).sum(axis=1).mean()))
    distance, used, delta_sq, mean_delta_sq = np.array(rows).T
    columns = {"server_lr": used, "delta_sq": delta_sq, "mean_delta_sq": mean_delta_sq}
    found = projections(float(optimum @ optimum), distance, columns)
    np.testing.assert_allclose(np.stack([found.residual, found.optimal], axis=1), wanted, rtol=1e-9)
    assert found.holds.tolist() == [residual <= 1 for residual, _ in wanted]
    assert 0 < found.holds.sum() < 4
    optimal = np.array([best for _, best in wanted])
    assert found.closer.tolist() == [abs(best - 1.7) <= abs(best - 1) for best in optimal]
    assert found.within.tolist() == [best >= 1.7 for best in optimal]
    assert found.falls.tolist() == (distance < np.array([optimum @ optimum, *distance[:-1]])).tolist()
    for told in (found.closer, found.within, found.falls):
        assert 0 < told.sum() < 4


@pytest.mark.parametrize(("lr", "lemma"), [(0.4, True), (1.9, False)])
def test_fedexp_ms_lemma_is_measured_by_its_momentum(lr, lemma):
    """Two quadratics with a common minimum; where local steps overshoot, the lemma's assumption fails."""
    rng, beta = np.random.default_rng(5), 0.6
    optimum, matrices = rng.normal(size=4), [np.diag([1.0, 0.5, 0.0, 0.0]), np.diag([0.0, 0.5, 1.0, 0.5])]
    w, v, discounted, rows, wanted, held = np.zeros(4), np.zeros(4), 0.0, [], [], []
    for _ in range(5):
        models = [w.copy(), w.copy()]
        for _ in range(3):
            models = [y - lr * a @ (y - optimum) for a, y in zip(matrices, models, strict=True)]
        deltas = w - np.array(models)
        mean, squares = deltas.mean(axis=0), (deltas**2).sum(axis=1).mean()
        v, discounted = mean + beta * v, squares + beta / 2 * discounted
        used = discounted / (2 * v @ v)
        residual = np.mean(((np.array(models) - optimum) ** 2).sum(axis=1)) / ((w - optimum) ** 2).sum()
        wanted.append((residual, (w - optimum) @ v / (v @ v), (w - optimum) @ v / discounted))
        held.append((w - optimum) @ mean >= squares)
        w = w - used * v
        rows.append((((w - optimum) ** 2).sum(), used, mean @ mean, squares))
    distance, used, delta_sq, mean_delta_sq = np.array(rows).T
    columns = {"server_lr": used, "delta_sq": delta_sq, "mean_delta_sq": mean_delta_sq}
    found = projections(float(optimum @ optimum), distance, columns, beta)
    assert found.momentum is not None
    np.testing.assert_allclose(np.stack([found.residual, found.optimal, found.momentum], 1), wanted, rtol=1e-8)
    assert found.assumed.tolist() == np.logical_and.accumulate(held).tolist()
    assert found.assumed.all() == lemma
    assert (found.momentum[found.assumed] >= 1).all()
