"""Tuning inside the training part, against the choice of a computation on the raw samples alone."""

from __future__ import annotations

import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import load_file
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.preprocessing import StandardScaler

from hpcfed.errors import InputError
from hpcfed.lab.study.folder import prepare, prepare_inner
from hpcfed.lab.study.results import GLOBAL, OWN, RunResult, mean_of
from hpcfed.lab.study.session import next_runs
from hpcfed.lab.study.tuning import choose, variant
from hpcfed.lab.sweep.claims import Claims, RunState
from hpcfed.lab.sweep.run import Redo
from tests.launch import launch
from tests.study.conftest import done, of_numbers, of_one_class, of_two_samples, planned, recipe, table

RATES = (0.0001, 0.05)


def recipe_at(run: Path) -> dict:
    return YAML(typ="safe").load((run / "recipe.yaml").read_text())


@pytest.mark.parametrize("kind", [pytest.param("holdout", marks=pytest.mark.soak), "leave-one-site-out"])
def test_values_are_chosen_on_the_training_part_alone(folder, kind):
    """The tried models are measured here on raw samples, scaled by the inner training part; no test sample is near."""
    recipe(folder, rounds=2, evaluate={})
    is_holdout = kind == "holdout"
    options = {"kind": kind, "standardize": "pooled", "fraction": 0.25, "splits": 1 if is_holdout else None}
    grids = ("local.lr=0.0001,0.05", "feddyn:alpha=0.1,1")
    baselines = "alone" if is_holdout else "none"
    methods = "fedavg,feddyn:alpha=0.1" if is_holdout else "fedavg"
    study = planned(folder, methods, tune=grids[: 1 + is_holdout], baselines=baselines, **options)
    place = done(study)
    dataset, owner = study.samples.dataset, study.samples.owner
    points = {(row["arm"], row["split"], row["point"]): row for row in table(place / "tables/tuning-points.csv")}
    assert len(points) == 2 * len(study.arms) * len(study.splits.each)
    for number, split in enumerate(study.splits.each):
        with h5py.File(place / f"tuning/data/split-{number}.sites.h5", locking=False) as file:
            training, rows, ends = file["train/row"][:], file["test/x"][:], file["test/offsets"][:]
        held = np.setdiff1d(np.flatnonzero(~split.tests), training)
        assert len(rows) == len(held)  # inner training and test part together are the split's training part
        assert not split.tests[training].any()
        scaler = StandardScaler().fit(dataset.x[training].astype(np.float64))
        sites = [k for k in range(3) if k != split.site]
        assert ends[-1] == len(held)
        for arm in ("fedavg", "alone-1") if is_holdout else ("fedavg",):
            found = []
            for point in range(2):
                model = load_file(
                    place / f"tuning/sweep/runs/{arm}.point-{point}.split-{number}.seed-0/model.safetensors"
                )
                right, losses = [], []
                for k in sites if arm != "alone-1" else [1]:
                    own = held[owner[held] == k]
                    out = scaler.transform(dataset.x[own].astype(np.float64)) @ model["weight"].T + model["bias"]
                    right.append(roc_auc_score(dataset.y[own], out[:, 1] - out[:, 0]))
                    powers = np.exp(out - out.max(1, keepdims=True))
                    losses.append(log_loss(dataset.y[own], powers / powers.sum(1, keepdims=True), labels=[0, 1]))
                found.append((np.mean(right), -np.mean(losses)))
                row = points[arm, str(number), f"local.lr={RATES[point]:g}"]
                assert float(row["value"]) == pytest.approx(found[-1][0], abs=1e-6)
                assert float(row["loss"]) == pytest.approx(-found[-1][1], rel=1e-5)
            best = RATES[max(range(2), key=lambda point: found[point])]
            used = recipe_at(place / f"sweep/runs/{arm}.split-{number}.seed-0")
            assert used["local"]["lr"] == best
    if is_holdout:  # its own value is not tuned
        assert recipe_at(place / "sweep/runs/feddyn-alpha-0.1.split-0.seed-0")["algorithm"]["alpha"] == 0.1
    page = (place / "study.html").read_text()
    assert "Tuned inside each split&#39;s training part: local.lr=0.0001,0.05" in page


@pytest.mark.soak
def test_values_are_chosen_when_the_runs_of_other_jobs_have_ended(folder):
    """Another job holds the run of the better value for a while, and leaves it undone."""
    recipe(folder, rounds=1, evaluate={})
    options = {"tune": ["local.lr=0.0001,0.05"], "splits": 1, "baselines": "none"}
    whole = done(planned(folder, "fedavg", output=folder / "whole", **options))
    study = planned(folder, "fedavg", **options)
    plan = next_runs(study, Redo())
    held, other = plan.units[1], Claims(plan.folder, "other")
    number = other.take(held.name, held.digest, RunState())
    leaves = threading.Timer(1.5, other.end, (held.name, number, "stopped"))
    leaves.start()
    place = done(study)
    leaves.join()
    assert (place / "tables/tuning-points.csv").read_bytes() == (whole / "tables/tuning-points.csv").read_bytes()
    assert recipe_at(place / "sweep/runs/fedavg.split-0.seed-0")["local"]["lr"] == RATES[1]
    (only,) = next_runs(study, Redo()).units
    assert only.recipe.output == place / "sweep/runs/fedavg.split-0.seed-0"


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("local.steps=1,2", "--tune local.steps=1,2: 'local.steps' cannot be tuned"),
        ("algorithm.alpha=1,2", "not every arm has 'algorithm.alpha'; name its method"),
        ("lr=0.1,1", "not every arm has 'lr'; did you mean 'local.lr'?"),
        ("fedexq:eps=1,2", "no method 'fedexq' in the study; did you mean 'fedexp'?"),
        ("local.lr", "--tune local.lr: a grid: expected section.key=values"),
        ("local.lr=0.1,-1", "--tune: FedAvg: recipe: local.lr: expected greater than 0, got -1"),
    ],
)
def test_wrong_grids(folder, tune, message):
    with pytest.raises(InputError) as refused:
        planned(folder, tune=(tune,))
    assert message in str(refused.value)


def test_a_parameter_of_which_only_an_example_is_known_is_tuned(folder):
    recipe(folder)
    study = planned(folder, "fedavg,feddyn", tune=("feddyn:alpha=0.01,0.1",), baselines="none")
    (arm,) = (arm for arm in study.arms if arm.key == "feddyn")
    tried = [value.text for point in study.tuning.points_of(arm) for value in point.values]
    assert tried == ["0.01", "0.1"]
    assert arm.title == "FedDyn"
    named = planned(folder, "fedavg,feddyn:alpha=0.1", tune=("feddyn:alpha=0.01,0.1",), baselines="none")
    (arm,) = (arm for arm in named.arms if arm.key == "feddyn-alpha-0.1")
    assert [point.overrides for point in named.tuning.points_of(arm)] == [[]]


def test_values_that_do_not_train_are_never_chosen(folder):
    """One that diverges is not; where all do, a line names them."""
    recipe(folder, rounds=1, model={"name": "linear"}, evaluate={})
    of_numbers(folder / "sites.h5")
    place = done(planned(folder, "fedavg", splits=1, baselines="none", tune=("local.lr=1e15,0.001",)))
    assert [row["chosen"] for row in table(place / "tables/tuning-points.csv")] == ["0", "1"]
    with pytest.raises(InputError, match=r"FedAvg: no value of local.lr trains in split 0; try smaller ones"):
        done(planned(folder, "fedavg", splits=1, baselines="none", tune=("local.lr=1e14,1e15",), output=folder / "far"))


@pytest.mark.parametrize(("larger_is_better", "chosen"), [(True, 1), (False, 2), (None, 2)])
def test_values_tied_up_to_rounding_are_chosen_by_loss(folder, larger_is_better, chosen):
    """Sites with the same accuracies in another order: their means differ in the last bit."""
    recipe(folder)
    study = planned(folder, "fedavg", splits=1, baselines="none", tune=("local.lr=0.1,0.2,0.3",))
    values = {0: (0.1, 0.2, 0.3), 1: (0.3, 0.2, 0.1), 2: (0.1, 0.1, 0.1)}
    losses = {0: 0.5, 1: 0.4, 2: 0.3}
    sites = {
        point: {(GLOBAL, site): {"accuracy": value, "loss": losses[point]} for site, value in enumerate(of)}
        for point, of in values.items()
    }
    assert mean_of([0.1, 0.2, 0.3]) != mean_of([0.3, 0.2, 0.1])
    runs = {variant("fedavg", point): [RunResult(0, 0, of, {}, {})] for point, of in sites.items()}
    found = choose(study.arms, study.tuning, runs, [range(3)], "accuracy", larger_is_better)
    assert found.candidates.index(found.chosen["fedavg", 0]) == chosen


def test_models_of_a_site_are_measured_where_they_are_used(folder):
    """Personal ones at their sites, and that of a site alone at this site, when values are chosen."""
    recipe(folder)
    study = planned(folder, "ditto:mu=0.1", splits=1, baselines="alone", tune=("local.lr=0.1,0.2",))
    values = {GLOBAL: ((0.9, 0.1, 0.9), (0.1, 0.2, 0.1)), OWN: ((0.1, 0.1, 0.1), (0.2, 0.2, 0.2))}
    runs = {
        variant(arm.key, point): [
            RunResult(0, 0, {
                (model, site): {"accuracy": value, "loss": 1.0}
                for model, of in values.items() for site, value in enumerate(of[point])
            })
        ]
        for arm in study.arms for point in range(2)
    }  # fmt: skip
    found = choose(study.arms, study.tuning, runs, [range(3)], "accuracy", True)
    chosen = {arm: float(one.point.values[0].text) for (arm, _), one in found.chosen.items()}
    assert chosen == {"fedavg": 0.1, "ditto-mu-0.1": 0.2, "alone-0": 0.1, "alone-1": 0.2, "alone-2": 0.1}


@pytest.mark.every(2)
@pytest.mark.parametrize("better", ["higher", None])
def test_a_metric_of_ones_own_chooses_by_its_direction(folder, better):
    """The initial outputs are the largest; without a direction the loss chooses, and lines say so."""
    (folder / "mine.py").write_text("def size(output, target):\n    return float(output.abs().mean())\n")
    recipe(folder, rounds=2, evaluate={"metrics": {"size": {"whole": "mine:size", "better": better}}})
    study = planned(folder, "fedavg", splits=1, baselines="none", tune=("local.lr=0.0001,0.05",))
    assert ("Size has no direction (better: higher or lower), so tuned by loss" in study.remarks) == (better is None)
    place = done(study)
    assert recipe_at(place / "sweep/runs/fedavg.split-0.seed-0")["local"]["lr"] == RATES[better is None]
    page = (place / "study.html").read_text()
    by = "By size on" if better else "Size has no direction (better: higher or lower), so by loss. By loss on"
    assert by in page
    assert ("no worst and best site" in page) == (better is None)
    (row,) = table(place / "tables/size-over-sites.csv")
    assert (row["Worst site"] == "–") == (better is None)
    assert float(row["Range"]) > 0


@pytest.mark.soak
def test_values_are_chosen_by_loss_where_the_metric_is_undefined(folder):
    """By AUROC of sites of one class, which the recipe asks for; without a metric named, by accuracy."""
    of_one_class(folder / "sites.h5", 0, 1, 2)
    options = {"splits": 1, "baselines": "none", "tune": ("local.lr=0.0001,0.05",)}
    recipe(folder, rounds=1)
    page = (done(planned(folder, "fedavg", **options)) / "study.html").read_text()
    assert "AUROC is defined at no site of the inner holdout in 1 of 1 choices of values: these are by loss." in page
    recipe(folder, rounds=1, evaluate={})
    page = (done(planned(folder, "fedavg", output=folder / "usual", **options)) / "study.html").read_text()
    assert "By accuracy on an inner holdout" in page
    assert "these are by loss" not in page


def test_inner_splits_of_other_settings_are_refused_or_set_aside(folder):
    """Folds are the same for every --test-fraction, what is held out of their training parts is not."""
    recipe(folder)
    options = {"kind": "k-fold", "splits": 2, "baselines": "none", "tune": ("local.lr=0.01,0.05",)}
    study = planned(folder, "fedavg", **options)
    prepare(study, fresh=False)
    prepare_inner(study.inner(), fresh=False)
    other = planned(folder, "fedavg", fraction=0.4, **options)
    words = r"--tune: .*/tuning: a study of other splits: got test_fraction 0.2 there and 0.4 here; .*--fresh"
    with pytest.raises(InputError, match=words):
        done(other)
    prepare(other, fresh=True)
    prepare_inner(other.inner(), fresh=True)
    prepare_inner(other.inner(), fresh=False)
    held = {}
    for place in ("tuning", "tuning/previous-1"):
        with h5py.File(study.folder / place / "data/split-0.sites.h5", locking=False) as file:
            held[place] = len(file["test/x"])
    assert held == {"tuning": 20, "tuning/previous-1": 10}
    assert not (study.folder / "previous-1").exists()


def test_errors_of_inner_splits_name_the_option(folder):
    """A site of two samples, one in each fold, has none left to hold out: refused before anything is written."""
    of_two_samples(folder / "sites.h5")
    recipe(folder)
    with pytest.raises(InputError, match=r"^--tune: holdout of 1 split: site 'west' is too small"):
        planned(folder, "fedavg", kind="k-fold", splits=2, baselines="none", tune=("local.lr=0.01,0.05",))


@pytest.mark.soak
def test_a_study_on_three_ranks_has_the_files_of_one(folder):
    """The page, all tables, data and models, with tuning, to the last byte."""
    recipe(folder, rounds=1, evaluate={})
    words = ["study", "recipe.yaml", "--methods", "fedavg,scaffold", "--splits", "2", "--baselines", "none"]
    for ranks in (1, 3):
        ran = launch(ranks, [*words, "--tune", "local.lr=0.001,0.05"], cwd=folder)
        assert ran.returncode == 0, ran.stderr
        (folder / "run-study").rename(folder / str(ranks))
    kinds = ("study.html", "splits.csv", "tables/*", "**/data/*.h5", "**/model.safetensors")
    files = [path for kind in kinds for path in sorted((folder / "1").glob(kind))]
    assert sum(path.name == "model.safetensors" for path in files) == 12
    for path in files:
        assert (folder / "3" / path.relative_to(folder / "1")).read_bytes() == path.read_bytes(), path
