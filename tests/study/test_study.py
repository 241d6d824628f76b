"""Whole studies of three small sites: their numbers by hand, every kind of split, going on, and refusals."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.metrics import confusion_matrix, roc_auc_score

import hpcfed
from hpcfed.config.load import load_recipe, to_plain
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.atomic import write_new
from hpcfed.lab.report.files import latex_of_table
from hpcfed.lab.report.tables import Table
from hpcfed.lab.study.cells import value_text
from hpcfed.lab.study.ensemble import mean_prediction
from hpcfed.lab.study.figures import curves_of
from hpcfed.lab.study.folder import prepare
from hpcfed.lab.study.measures import StudyMetric, metrics_of
from hpcfed.lab.study.page import without_results, write_results
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.results import RunResult, StudyResults
from hpcfed.lab.study.rows import rows_of
from hpcfed.lab.study.session import run_study, write_study
from hpcfed.lab.study.statistics import DELONG, WILSON, auroc_interval, wilson
from hpcfed.lab.study.tables import _worst_tenth, differences_table, results_table, spread_table
from hpcfed.lab.study.view import View
from hpcfed.lab.sweep.claims import Claim
from hpcfed.lab.sweep.failures import raise_if_failed
from hpcfed.lab.sweep.run import Redo, run_sweep
from hpcfed.ranks.world import World
from tests.launch import launch
from tests.report import browser
from tests.report.test_browser import CLIPPED, FAINT, OVERFLOW
from tests.study.conftest import (
    SITES,
    done,
    of_labels,
    of_numbers,
    of_one_class,
    of_survival,
    of_two_samples,
    planned,
    recipe,
    table,
    write_sites,
)
from tests.sweep.test_kill_and_resume import BLOWN


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished study of two methods and all baselines on two holdouts."""
    folder = tmp_path_factory.mktemp("made")
    write_sites(folder / "sites.h5")
    recipe(folder, rounds=2)
    return done(planned(folder, splits=2, seeds=[3]))


NETS = str(Path(__file__).parents[1] / "mpi")
A4 = 718
"""Width of a page's text in CSS pixels, with the browser's margins."""


def outputs(run: Path, x: np.ndarray) -> np.ndarray:
    averaged = run / "model-evaluated.safetensors"  # FedExP's
    model = load_file(averaged if averaged.exists() else run / "model.safetensors")
    return x @ model["weight"].T + model["bias"]


def test_the_tables_are_the_models_measured_by_hand(made):
    """Values of each run at each site, the ensemble's mean probabilities, means over splits, a paired difference."""
    values = {(r["arm"], r["split"], r["seed"], r["model"], r["site"]): r for r in table(made / "tables/values.csv")}
    ours: dict[tuple[str, int], list[list[float]]] = {}
    for split in (0, 1):
        with h5py.File(made / f"data/split-{split}.sites.h5") as file:
            ends = file["test/offsets"][:]
            tests = [(file["test/x"][a:b], file["test/y"][a:b]) for a, b in itertools.pairwise(ends)]
        for seed in ("3",):
            for k, (site, (x, y)) in enumerate(zip(SITES, tests, strict=True)):
                alone = [outputs(made / f"sweep/runs/alone-{n}.split-{split}.seed-{seed}", x) for n in range(3)]
                powers = [np.exp(one - one.max(1, keepdims=True)) for one in alone]
                mean = np.mean([one / one.sum(1, keepdims=True) for one in powers], axis=0)
                found = {"ensemble": mean, **{f"alone-{n}": one for n, one in enumerate(alone)}}
                for arm in ("fedavg", "fedexp", "pooled", "pooled-long", "travelling", "travelling-long"):
                    found[arm] = outputs(made / f"sweep/runs/{arm}.split-{split}.seed-{seed}", x)
                for arm, output in found.items():
                    row = values[arm, str(split), seed, "global", site]
                    right = np.mean(output.argmax(1) == y)
                    assert float(row["accuracy"]) == pytest.approx(right)
                    assert json.loads(row["confusion-matrix"]) == confusion_matrix(y, output.argmax(1)).tolist()
                    score = output[:, 1] - output[:, 0] if arm != "ensemble" else np.log(output[:, 1] / output[:, 0])
                    assert float(row["auroc"]) == pytest.approx(roc_auc_score(y, score))
                    ours.setdefault((arm, k), []).append(right)
    results = {(r["method"], r["metric"], r["site"]): r for r in table(made / "tables/results.csv")}
    for title, arm in (("FedAvg", "fedavg"), ("FedExP", "fedexp"), ("Pooled, 10 steps", "pooled")):
        for k, site in enumerate(SITES):
            own, base = (np.array(ours[name, k]) for name in (arm, "fedavg"))
            row = results[title, "accuracy", site]
            assert float(row["mean"]) == pytest.approx(own.mean())
            assert float(row["difference_mean"]) == pytest.approx((own - base).mean(), abs=1e-12)
    alone = [ours[f"alone-{k}", k] for k in range(3)]
    found = results["Each site alone", "accuracy", "Mean of sites"]
    assert float(found["mean"]) == pytest.approx(np.mean(alone))
    cross = table(made / "tables/cross-site-accuracy.csv")
    assert [row["south"] for row in cross] == [f"{100 * np.mean(ours[f'alone-{n}', 1]):.1f}" for n in range(3)]


def test_each_arm_takes_its_steps(made):
    """R · K, or R · K · |S|; a site alone and a model that travels see the samples of their clients alone."""

    def record(arm: str) -> list[dict]:
        text = (made / f"sweep/runs/{arm}.split-0.seed-3/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    last = {
        arm: record(arm)[-1] for arm in ("fedavg", "pooled", "pooled-long", "travelling", "travelling-long", "alone-2")
    }
    steps = {arm: row["gradients"] for arm, row in last.items()}
    assert steps == dict(zip(last, (30, 10, 30, 10, 30, 10), strict=True))
    assert last["alone-2"]["cohort"] == [2]
    assert [row["cohort"] for row in record("travelling-long")] == [[k] for k in (0, 1, 2)] * 2


def test_names_stay_as_they_are_in_latex():
    """OT1 fonts print < and > as other signs, and long names would stand unbroken."""
    long = "hospital_" * 11
    text = latex_of_table(Table("t", ("Method", 'a<b>"c"'), ((long, "–"),)))
    assert r"a\textless{}b\textgreater{}''c''" in text
    assert r"\parbox[t]{4cm}{\raggedright\hspace{0pt}hospital\_\allowbreak{}hospital" in text
    text = latex_of_table(Table("t", ("Site", "n"), (("[A]", "1"), ("*B", "2"))))
    assert text.splitlines()[-4:-2] == [r"{}[A] & 1 \\", r"{}*B & 2 \\"]  # else options of the line above


def test_the_page_needs_nothing_else(made):
    """Its tables stand beside it as CSV and LaTeX with as many cells; it names sites, methods and steps."""
    page = (made / "study.html").read_text()
    assert not re.search(r'(src|href)="(?!#|data:,)', page)
    for words in (
        f"Simulated federated learning on {len(SITES)} sites.",
        *SITES,
        "FedExP",
        "Ensemble of the sites&#39; models",
        "Travelling, 30 steps",
        "Learning curves",
    ):
        assert words in page
    for path in (made / "tables").glob("*.tex"):
        lines = [line for line in path.read_text().splitlines() if line.endswith(r"\\")]
        rows = list(csv.reader(path.with_suffix(".csv").read_text().splitlines()))
        assert [line.count(" & ") + 1 for line in lines] == [len(row) for row in rows]
    assert re.search(r"\d \[\d+\.\d,~\d+\.\d\]", (made / "tables/accuracy-by-site.tex").read_text())
    assert str(made.parent) not in page  # recipes name its files as they lie beside it
    assert f"data: {made.name}/" in page


def test_the_comparison_has_a_picture(made):
    """Forest plots of values and differences as PNG and PDF, and on the page a picture a site and of their mean."""
    names = {f"{name}{suffix}" for name in ("by-site", "differences") for suffix in (".png", ".pdf")}
    assert {path.name for path in (made / "figures").iterdir()} == names | {".written"}
    page = (made / "study.html").read_text()
    for words in ("west: 6 tested.", "Mean of sites: 3 sites.", "Diamond and dashed line: FedAvg;"):
        assert words in page


@pytest.mark.every(2)
@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(made, width):
    with browser.started() as tab:
        events = tab.open(made / "study.html", width=width, dark=width < 600)
        assert [event["method"] for event in events] == ["Network.requestWillBeSent"]
        assert tab.value("document.documentElement.scrollWidth") == width
        assert [tab.value(check) for check in (OVERFLOW, CLIPPED, FAINT)] == [[], [], []]
        tab.open(made / "study.html", width=A4, dark=width < 600)
        tab.ask("Emulation.setEmulatedMedia", media="print")
        assert tab.value("document.documentElement.scrollWidth") == A4
        assert tab.value(CLIPPED) == []


@pytest.mark.parametrize(("better", "worst"), [(True, "0.150"), (False, "0.950")])
def test_classes_have_calibration_and_many_sites_a_worst_tenth(folder, better, worst):
    recipe(folder, evaluate={})
    assert [metric.name for metric in planned(folder).metrics] == ["auroc", "calibration-error", "accuracy"]
    means = np.array([0.1, 0.2, *[0.5] * 8, 0.9, 1.0, np.nan])
    assert _worst_tenth(means, StudyMetric("auroc", better)) == worst


def test_leaving_a_site_out(folder):
    """Each site is tested on by models of the others; there is no personalised one, and a line says so."""
    recipe(folder, rounds=1)
    study = planned(folder, "fedavg", kind="leave-one-site-out", baselines="alone,personalised")
    assert any("personalised models are left out" in line for line in study.remarks)
    place = done(study)
    rows = table(place / "tables/accuracy-by-site.csv")
    assert [row["Method"] for row in rows] == ["FedAvg", "A single other site, mean"]
    with h5py.File(place / "data/split-1.sites.h5") as file:
        x, y = file["test/x"][:], file["test/y"][:]
    right = np.mean(outputs(place / "sweep/runs/fedavg.split-1.seed-0", x).argmax(1) == y)
    low, high = (100 * end for end in wilson(right, len(y)))
    assert rows[0]["south"] == f"{100 * right:.1f} [{low:.1f},\u00a0{high:.1f}]"
    found = {(row["method"], row["metric"], row["site"]): row for row in table(place / "tables/results.csv")}
    output = outputs(place / "sweep/runs/fedavg.split-1.seed-0", x)
    ends = auroc_interval([output[:, 1] - output[:, 0]], y == 1)
    row = found["FedAvg", "auroc", "south"]
    assert (float(row["low"]), float(row["high"])) == pytest.approx(ends, rel=1e-6)
    assert [row["interval"], found["FedAvg", "accuracy", "south"]["interval"]] == [DELONG, WILSON]
    assert found["FedAvg", "accuracy", "Mean of sites"]["interval"] == "Student's t, on the logit"
    note = (place / "tables/accuracy-by-site.tex").read_text()
    assert "Nadeau" not in note
    assert "Intervals of 95 %: Student's t, on the logit; Wilson." in note
    cross = table(place / "tables/cross-site-accuracy.csv")
    assert [row[site] for row, site in zip(cross, SITES, strict=True)] == ["–"] * 3


def test_values_at_a_site_that_is_left_out_are_those_of_its_split(folder):
    """Of the models of single sites, the others' mean; means of sites, and of differences, are over such values."""
    study = planned(folder, "fedavg", kind="leave-one-site-out", baselines="alone")
    values = {
        "fedavg": [[0.5, None, None], [None, 0.6, None], [None, None, 0.9]],
        "alone-0": [[None] * 3, [None, 0.2, None], [None, None, 0.4]],
        "alone-1": [[0.1, None, None], [None] * 3, [None, None, 0.6]],
        "alone-2": [[0.3, None, None], [None, 0.4, None], [None] * 3],
    }
    view, auroc = view_of(study, values), StudyMetric("auroc", True)
    row = view.rows[-1]
    assert [one.mean for one in view.estimates(row, auroc)[:-1]] == pytest.approx([0.2, 0.3, 0.5, 1 / 3])
    assert [one.mean for one in view.differences(row, auroc)[:-1]] == pytest.approx([-0.3, -0.3, -0.4, -1 / 3])
    alone = [[np.nan, 0.2, 0.4], [0.1, np.nan, 0.6], [0.3, 0.4, np.nan]]
    np.testing.assert_allclose(view.cross_values(auroc), alone)
    values["alone-1"][2] = [None] * 3  # a run without value: no method's mean has the site
    view = view_of(study, values)
    assert view.measured(auroc).tolist() == [True, True, False]
    assert [view.estimates(row, auroc)[-2].mean for row in view.rows] == pytest.approx([0.55, 0.25])
    del values["alone-1"]  # runs that have not finished exclude none
    assert view_of(study, values).measured(auroc).all()


@pytest.mark.soak
def test_epochs_are_the_steps_of_each_split(folder):
    """Without a large site the others' epochs are shorter, and so are the pooled models' runs."""
    of_two_samples(folder / "sites.h5")
    recipe(folder, rounds=2, local={"epochs": 1, "batch_size": 10, "lr": 0.05})
    study = planned(folder, "fedavg", kind="leave-one-site-out", baselines="pooled")
    assert [arm.title for arm in study.arms[1:]] == ["Pooled, 4 to 8 steps", "Pooled, 8 to 16 steps"]
    place = done(study, writes=False)
    records = [place / f"sweep/runs/pooled.split-{k}.seed-0/metrics.jsonl" for k in range(3)]
    assert [json.loads(path.read_text().splitlines()[-1])["gradients"] for path in records] == [4, 6, 8]


def test_files_that_were_cut_or_exchanged_are_noticed(folder):
    """Scores of an earlier round are not taken for the last ones; another split's data are written anew."""
    recipe(folder, rounds=2)
    place = done(planned(folder, "fedavg", splits=2, baselines="none"), writes=False)
    files = [place / f"data/split-{k}.sites.h5" for k in range(2)]
    whole = files[0].read_bytes()
    shutil.copy(files[1], files[0])
    done(planned(folder, "fedavg", splits=2, baselines="none"), writes=False)
    assert files[0].read_bytes() == whole
    scores = place / "sweep/runs/fedavg.split-0.seed-0/clients.csv"
    scores.write_text("".join(scores.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=r"seed-0/clients\.csv: is not the file that the run's certificate names"):
        done(planned(folder, "fedavg", splits=2, baselines="none"))
    (scores.parent / "certificate.json").unlink()
    with pytest.raises(InputError, match=r"clients\.csv: rows are missing: expected rows of round 2 for all sites"):
        done(planned(folder, "fedavg", splits=2, baselines="none"))
    shutil.rmtree(scores.parent)
    other = place / "sweep/runs/fedavg.split-1.seed-0"
    shutil.copytree(other, scores.parent)
    with pytest.raises(InputError, match=r"seed-0: output holds another recipe's run: got data_content 'sha256:"):
        done(planned(folder, "fedavg", splits=2, baselines="none"))
    shutil.rmtree(scores.parent)
    done(planned(folder, "fedavg", splits=2, baselines="none"), writes=False)
    shutil.copy(other / "model.safetensors", scores.parent)
    with pytest.raises(InputError, match=r"seed-0/model\.safetensors: is not the file that the run's certificate"):
        done(planned(folder, "fedavg", splits=2, baselines="none", bootstrap=100))


def test_a_site_of_one_class_is_in_no_mean(folder):
    """It has no AUROC; the others' mean and its intervals are there, and each table's note names the site."""
    of_one_class(folder / "sites.h5", 2)
    recipe(folder, rounds=1)
    place = done(planned(folder, "fedavg", splits=2, baselines="none", fraction=0.4, bootstrap=100))
    found = {(row["metric"], row["site"]): row for row in table(place / "tables/results.csv")}
    each = [float(found["auroc", site]["mean"]) for site in SITES[:2]]
    assert found["auroc", "west"]["mean"] == ""
    assert float(found["auroc", "Mean of sites"]["mean"]) == pytest.approx(np.mean(each))
    of_accuracy = [float(found["accuracy", site]["mean"]) for site in SITES]
    assert float(found["accuracy", "Mean of sites"]["mean"]) == pytest.approx(np.mean(of_accuracy[:2]))
    assert of_accuracy[2] > 0.8
    assert [found[metric, "Mean of sites"]["sites"] for metric in ("auroc", "accuracy")] == ["2", "2"]
    weights = [16, 13, 11]
    pooled = float(found["accuracy", "All samples together"]["mean"])
    assert pooled == pytest.approx(np.average(of_accuracy, weights=weights))
    resampled = {(row["metric"], row["site"]): row for row in table(place / "tables/bootstrap.csv")}
    assert resampled["auroc", "west"]["low"] == ""
    assert float(resampled["auroc", "Mean of sites"]["low"]) < float(resampled["auroc", "Mean of sites"]["high"])
    page = (place / "study.html").read_text()
    why = "west: tested samples of one class in a split, or no value in a split of some method"
    assert page.count(f"{why}; so means are over 2 of 3 sites, the same for all methods.") == 4
    assert page.count("the same for all methods. Labels that tested samples lack: ill at west.") == 2
    assert re.search(r"Mean of 2 of 3 sites, \d\d of \d\d tested samples", page)
    assert page.index("<h2>AUROC") < page.index("<h2>Accuracy")


@pytest.mark.soak
@pytest.mark.filterwarnings("error")
def test_a_metric_that_no_site_has(folder):
    """The usual one gives way to accuracy, and a line says why; the recipe's stays, and its empty tables say why."""
    of_one_class(folder / "sites.h5", 0, 1, 2)
    recipe(folder, rounds=1, evaluate={})
    study = planned(folder, "fedavg,fedexp", splits=2, baselines="alone", bootstrap=100)
    lack = "ill at north; ill at south; ill at west"
    undefined = "AUROC is defined in no split at any site"
    why = f"accuracy is the main metric, since {undefined}; labels that tested samples lack: {lack}"
    assert why in study.remarks
    page = (done(study) / "study.html").read_text()
    assert page.index("<h2>Accuracy") < page.index("<h2>AUROC")
    assert "Accuracy in % of each site&#39;s model" in page
    assert "north: accuracy on its test samples." in page
    recipe(folder, rounds=1)
    study = planned(folder, "fedavg", splits=2, baselines="none", output=folder / "named")
    assert why not in study.remarks
    page = (done(study) / "study.html").read_text()
    assert page.index("<h2>AUROC") < page.index("<h2>Accuracy")
    assert f"AUROC is defined in no split at any site. Labels that tested samples lack: {lack}." in page
    assert "AUROC is defined in no evaluation at any site: there is none to draw." in page


@pytest.mark.parametrize(
    ("columns", "of", "lacks"), [(1, "", "ill"), (2, "of label cough in 2 of 2, of label fever ", "cough=1")]
)
def test_labels_of_one_class(folder, columns, of, lacks):
    """One column of zeros and ones is two classes; of several the notes name the label."""
    of_one_class(folder / "sites.h5", 2)
    of_labels(folder / "sites.h5", columns)
    recipe(folder, evaluate={"metrics": ["auroc"]}, model={"name": "linear"})
    study = planned(folder, "fedavg", splits=2, baselines="none", fraction=0.3)
    for metric in study.metrics:
        note = results_table(view_of(study, {"fedavg": [[0.5, 0.6, None]] * 2}, metric.name), metric).note
        assert f"west 8 (one class {of}in 2 of 2)" in note
        assert ("a model that always says it is right in all" in note) == (metric.name == "accuracy")
        assert "means are over 2 of 3 sites, the same for all methods." in note
        assert (f"for all methods. Labels that tested samples lack: {lacks}" in note) == (metric.name == "auroc")


def test_labels_that_are_missing_in_some_splits(folder):
    with h5py.File(folder / "sites.h5", "a") as file:
        file["train/y"][54:] = 0
        file["test/y"][18:] = 0
        file["test/y"][-1] = 1
    study = planned(folder, "fedavg", kind="k-fold", splits=4, baselines="none")
    assert study.tested_labels.missing(SITES) == "ill at west in 3 of 4 splits"


@pytest.mark.soak
def test_a_site_alone_weighs_classes_by_its_own_samples(folder):
    """In training, a class that it lacks by 1; all arms are measured with the weights of all sites."""
    with h5py.File(folder / "sites.h5", "a") as file:
        file["train/y"][-20:] = 1
        file["test/y"][-8:] = 1
    recipe(folder, rounds=1, loss={"weights": "balanced"}, evaluate={})
    study = planned(folder, "fedavg", splits=1, baselines="pooled,alone")
    place = done(study)
    with h5py.File(place / "data/split-0.sites.h5") as file:
        ends, labels = file["train/offsets"][:], file["train/y"][:]
        bounds, x, y = file["test/offsets"][:], file["test/x"][:], file["test/y"][:]
    weights = len(labels) / (2 * np.bincount(labels))
    values = table(place / "tables/values.csv")
    assert {row["arm"] for row in values} == {"fedavg", "pooled", "pooled-long", "alone-0", "alone-1", "alone-2"}
    for row in values:
        k = SITES.index(row["site"])
        own = slice(bounds[k], bounds[k + 1])
        output = outputs(place / f"sweep/runs/{row['arm']}.split-0.seed-0", x[own])
        losses = np.log(np.exp(output).sum(1)) - output[np.arange(len(output)), y[own]]
        assert float(row["loss"]) == pytest.approx(np.mean(weights[y[own]] * losses), rel=1e-5)
    for k, unit in enumerate(unit for unit in study.plan().units if unit.recipe.name.startswith("alone")):
        counts = np.bincount(labels[ends[k] : ends[k + 1]], minlength=2)
        own = np.where(counts, counts.sum() / (2 * np.maximum(counts, 1)), 1.0).tolist()
        given = {**to_plain(unit.recipe), "loss": {"weights": own}, "output": str(folder / f"again-{k}")}
        again = hpcfed.run(given, quiet=True)
        assert (again.folder / "model.safetensors").read_bytes() == (
            unit.recipe.output / "model.safetensors"
        ).read_bytes()


@pytest.mark.filterwarnings("ignore:.*the model is code")
def test_a_site_alone_has_the_statistics_of_its_own_samples(folder):
    """``evaluate.statistics: training``, by hand; other arms have those of all sites. Ensembles are of these models."""
    model = {"factory": "nets:mlp", "args": {"inputs": 4, "outputs": 2}}
    evaluate, parameters = {"statistics": "training", "metrics": ["auroc"]}, {"buffers": "averaged"}
    recipe(folder, rounds=1, model=model, python_path=[NETS], parameters=parameters, evaluate=evaluate)
    study = planned(folder, "fedavg", splits=1, baselines="pooled,alone,ensemble")
    place = done(study)
    with h5py.File(place / "data/split-0.sites.h5") as file:
        ends, x = file["train/offsets"][:], torch.tensor(file["train/x"][:])
        test_x, test_y = torch.tensor(file["test/x"][: file["test/offsets"][1]]), file["test/y"][:]
    shares = []
    for unit in study.plan().units:
        alone, name = unit.recipe.name.startswith("alone"), unit.recipe.name
        own = slice(*ends[int(name[-1]) :][:2]) if alone else slice(None)
        evaluated = hpcfed.load(unit.recipe.output).evaluated
        with torch.no_grad():
            hidden = evaluated[1](x[own])
            shares += [evaluated(test_x).softmax(1)] * alone
        torch.testing.assert_close(evaluated[2].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
    auroc = roc_auc_score(test_y[: len(test_x)], torch.stack(shares).mean(0)[:, 1])
    values = {(row["arm"], row["site"]): row["auroc"] for row in table(place / "tables/values.csv")}
    assert float(values["ensemble", "north"]) == pytest.approx(auroc)


@pytest.mark.soak
def test_updates_that_were_left_out_are_reported(folder):
    """``on_bad_client: skip``: else the table says nothing of a site that took no part."""
    with h5py.File(folder / "sites.h5", "a") as file:
        file["train/x"][-20:] = 3e38
    recipe(folder, rounds=1, on_bad_client="skip", evaluate={})
    study = planned(folder, "fedavg,fedexp", splits=2, baselines="pooled", standardize="none")
    _, remarks, study = run_study(study, World(), None, Redo(), quiet=True)
    view, _ = write_study(study, study.plan(), [], remarks)
    what = "updates were left out (on_bad_client: skip), of 2 runs: west in 2."
    said = [f"{title}: {what}" for title in ("FedAvg", "FedExP")]
    assert without_results(view)[:2] == said
    assert said[0] in (study.folder / "study.html").read_text()


def test_sites_own_models_are_compared_and_baselines_have_no_part_in_what_is_sent(folder):
    """The common model of Ditto is FedAvg's; its rows are of the personal ones, tuning and intervals too."""
    recipe(folder, rounds=2, updates=[{"quantize": {"bits": 8}}])
    study = planned(folder, "fedavg,ditto", splits=1, baselines="pooled,alone", bootstrap=100, tune=["ditto:mu=0.1,1"])
    place = done(study)
    title = "Ditto, each site's model"
    values = {(r["arm"], r["model"], r["site"]): r["auroc"] for r in table(place / "tables/values.csv")}
    results = {(r["method"], r["metric"], r["site"]): r for r in table(place / "tables/results.csv")}
    assert values["ditto", "global", "south"] == values["fedavg", "global", "south"]
    assert values["ditto", "personal", "south"] != values["fedavg", "global", "south"]
    for site in SITES:
        assert float(results[title, "auroc", site]["mean"]) == pytest.approx(float(values["ditto", "personal", site]))
    with h5py.File(place / "data/split-0.sites.h5") as file:
        rows = slice(*file["test/offsets"][1:3])
        x, y = torch.tensor(file["test/x"][rows]), file["test/y"][rows]
    with torch.no_grad():
        output = hpcfed.load(place / "sweep/runs/ditto.split-0.seed-0").evaluated_of(1)(x).double().numpy()
    ends = auroc_interval([output[:, 1] - output[:, 0]], y == 1)
    row = results[title, "auroc", "south"]
    assert (float(row["low"]), float(row["high"])) == pytest.approx(ends, rel=1e-6)
    assert any(line.startswith("updates: of the federated methods alone") for line in study.remarks)
    runs = place / "sweep/runs"
    sent = {arm: load_recipe(runs / f"{arm}.split-0.seed-0/recipe.yaml").updates for arm in ("ditto", "pooled")}
    assert (len(sent["ditto"]), sent["pooled"]) == (1, [])


def test_what_cannot_be_scaled_is_refused_before_a_folder_is_made(folder, command):
    with h5py.File(folder / "sites.h5", "a") as file:
        file.attrs["normalization"] = json.dumps({"mean": 0.5, "std": 2.0})
    done = command(["study", "recipe.yaml", "--standardize", "pooled"], folder)
    assert (done.returncode, done.stderr.count("normalized by constants of its own")) == (2, 1)
    assert not (folder / "run-study").exists()


def test_baselines_are_not_called_fedavg_where_methods_are_measured_otherwise(folder):
    recipe(folder, weights="uniform", evaluate={"model": "last-two"})
    study = planned(folder, "fedavg,fedexp", splits=2, baselines="pooled")
    prepare(study, fresh=False)
    models = "last-two for FedAvg, FedExP; last for the baselines"
    assert study.plan().unlike() == [f"evaluated models differ between methods: {models} (evaluate.model)"]


def test_a_recipe_that_a_run_has_resolved_says_which_samples_are_split(folder):
    recipe(folder, rounds=1)
    content = planned(folder, splits=1).samples.content
    assert planned(folder, overrides=[f"data_content={content}"], splits=1).recipe.data_content is None
    with pytest.raises(InputError, match=rf"data_content: expected other, got {content}"):
        planned(folder, overrides=["data_content=other"], splits=1)


def test_fewer_rounds_than_sites_leave_some_unvisited(folder):
    recipe(folder, rounds=2)
    (line,) = [line for line in planned(folder, "fedavg", baselines="travelling").remarks if "visits" in line]
    assert line == "Travelling, 10 steps: visits 2 of 3 sites, since it has fewer rounds than there are sites"


@pytest.mark.soak
def test_private_parameters(folder):
    """Those of methods; the baselines share theirs."""
    recipe(folder, rounds=1, parameters={"private": ["*bias"]}, evaluate={})
    place = done(planned(folder, "fedavg", splits=1, baselines="pooled,personalised"))
    rows = table(place / "tables/accuracy-by-site.csv")
    assert len(rows) == 4
    assert all(row[site] != "–" for row in rows for site in SITES)


@pytest.mark.soak
def test_numbers_epochs_and_cohorts_of_some_sites(folder):
    """Targets without labels; epochs are the steps of a site of mean size, here one full batch."""
    of_numbers(folder / "sites.h5")
    local = {"epochs": 1, "batch_size": "full", "lr": 0.01}
    recipe(folder, rounds=1, model={"name": "linear"}, local=local, cohort={"size": 2}, evaluate={})
    pooled = [arm.title for arm in planned(folder, "fedavg", baselines="pooled").arms[1:]]
    assert pooled == ["Pooled, 1 step", "Pooled, 2 steps"]
    place = done(planned(folder, "fedavg", kind="k-fold", splits=2, baselines="ensemble"))
    assert (place / "tables/rmse-by-site.csv").exists()
    with h5py.File(place / "data/split-0.sites.h5") as file:
        tests = file["test/x"][: file["test/offsets"][1]], file["test/y"][: file["test/offsets"][1]]
    alone = [outputs(place / f"sweep/runs/alone-{k}.split-0.seed-0", tests[0])[:, 0] for k in range(3)]
    error = np.sqrt(np.mean((np.mean(alone, axis=0) - tests[1]) ** 2))
    values = {(row["arm"], row["split"], row["site"]): row for row in table(place / "tables/values.csv")}
    assert float(values["ensemble", "0", "north"]["rmse"]) == pytest.approx(error, rel=1e-6)


@pytest.mark.soak
def test_survival_counts_events(folder):
    """Those of each split, not its samples, are what concordance and bold differences stand on."""
    of_survival(folder / "sites.h5")
    recipe(folder, rounds=1, model={"name": "linear"}, evaluate={})
    study = planned(folder, "fedavg,fedexp", kind="k-fold", splits=2, baselines="ensemble")
    place, samples = done(study), study.samples
    said = []
    for k, site in enumerate(SITES):
        each = [samples.dataset.y[one.tests & (samples.owner == k), 0].sum() for one in study.splits.each]
        low, high = int(min(each)), int(max(each))
        said.append(f"{site} {(samples.owner == k).sum() // 2} ({f'{low} to ' if low < high else ''}{high} events)")
        assert low < 10
    few = f"Fewer than 10 events at {', '.join(SITES)}: numbers only, no claim."
    for title in ("by-site", "over-sites"):
        text = (place / f"tables/concordance-{title}.tex").read_text()
        assert f"Tested samples of a split: {', '.join(said)}. {few}" in text
    assert few in (place / "tables/concordance-difference-from-fedavg.tex").read_text()
    assert "the ensemble is left out: log hazards of separate Cox models have no common scale" in study.remarks
    assert [arm.key for arm in study.arms] == ["fedavg", "fedexp"]  # no site is trained alone for it


def view_of(study: Study, values: dict[str, list[list[float | None]]], metric: str = "auroc") -> View:
    """Return results without runs: of each arm, a value of a metric at each site in each split."""
    runs = {
        arm: [
            RunResult(split, 0, {("global", k): {metric: value} for k, value in enumerate(each)})
            for split, each in enumerate(splits)
        ]
        for arm, splits in values.items()
    }
    results = StudyResults({arm.key: [] for arm in study.arms} | runs, {arm.key: 0 for arm in study.arms})
    return View(study, results, rows_of(study, results))


@pytest.mark.parametrize(
    ("better", "worst", "best"), [(True, "north 0.600", "west 0.800"), (False, "west 0.800", "north 0.600")]
)
def test_the_spread_over_sites_is_that_of_their_means(folder, better, worst, best):
    study = planned(folder, "fedavg", splits=2, baselines="none")
    view = view_of(study, {"fedavg": [[0.5, 0.6, 0.7], [0.7, 0.7, 0.9]]})
    (row,) = spread_table(view, StudyMetric("auroc", better)).rows
    assert row[2:6] == (worst, best, "0.200", f"{np.std([0.6, 0.65, 0.8]):.3f}")


def test_seeds_have_a_mean_and_their_confusion_matrices_a_sum(folder):
    """The matrices of sites, too; a seed without a value is in no mean."""
    values = {(0, 0): 0.5, (0, 1): 0.8, (1, 0): 0.9, (1, 1): None}
    runs = [
        RunResult(split, seed, {("global", k): {"auroc": value, "of": [[k, seed], [0, 1]]} for k in range(3)})
        for (split, seed), value in values.items()
    ]
    study = planned(folder, "fedavg", splits=2, baselines="none")
    results = StudyResults({"fedavg": runs}, {"fedavg": 4})
    view = View(study, results, rows_of(study, results))
    assert view.site_values(view.rows[0], StudyMetric("auroc", True)) == pytest.approx(np.array([[0.65, 0.9]] * 3))
    assert results.counts("fedavg", "of", "global", 2).tolist() == [[8, 2], [0, 4]]
    assert view.counts(view.rows[0], "of").tolist() == [[12, 6], [0, 12]]


def test_the_accuracy_of_sites_own_models_together_is_that_of_all_samples(folder):
    study = planned(folder, "fedavg", splits=2, baselines="alone")
    view = view_of(study, {f"alone-{k}": [[0.5, 0.6, 0.9]] * 2 for k in range(3)}, "accuracy")
    assert view.tested.tolist() == [[8, 6, 6]] * 2
    together = np.average([0.5, 0.6, 0.9], weights=[8, 6, 6])
    assert view.pooled(view.rows[-1], StudyMetric("accuracy", True)) == pytest.approx([together] * 2)
    assert np.isnan(view.pooled(view.rows[-1], StudyMetric("auroc", True))).all()


def test_curves_are_means_over_splits_in_the_methods_rounds(folder):
    """Of the rounds that all splits have; a model that travels as far as all sites train has three times as many."""
    study = planned(folder, "fedavg", splits=2, baselines="travelling")
    view = view_of(study, {"fedavg": [[None] * 3] * 2, "travelling-long": [[None] * 3] * 2})
    courses = {
        "fedavg": [[(1, 0.5), (2, 0.7)], [(1, 0.7), (2, 0.9), (3, 1.0)]],
        "travelling-long": [[(3, 0.5), (9, 0.7)], [(3, 0.6), (9, 0.8)]],
    }
    runs = {
        arm: [
            replace(run, curves={("global", 1, "auroc"): course})
            for run, course in zip(view.results.runs[arm], each, strict=True)
        ]
        for arm, each in courses.items()
    }
    view = replace(view, results=StudyResults({**view.results.runs, **runs}, view.results.planned))
    curves = curves_of(view, StudyMetric("auroc", True), 1)
    assert [(x.tolist(), y.tolist()) for x, y in curves.values()] == [
        ([1, 2], pytest.approx([0.6, 0.8])),
        ([1, 3], pytest.approx([0.55, 0.75])),
    ]


def test_an_ensembles_probabilities_are_the_models_mean():
    one, other = torch.tensor([[2.0, -3.0], [0.5, 40.0]]), torch.tensor([[-1.0, -5.0], [1.5, 50.0]])
    found = mean_prediction([one, other], "multi-label")
    torch.testing.assert_close(found.sigmoid(), (one.sigmoid() + other.sigmoid()) / 2)
    assert found[1, 1] > 40  # a logit that saturates keeps its rank
    torch.testing.assert_close(mean_prediction([one, other], "regression"), (one + other) / 2)


def test_steps_are_those_of_a_split(folder):
    """The ensemble is of the models of the sites that train; clients with a budget draw their steps."""
    study = planned(folder, "fedavg", kind="leave-one-site-out", baselines="ensemble")
    steps = [row.steps for row in view_of(study, {"ensemble": []}).rows]
    assert steps == ["15 at each of 2 sites", "15 at each of 2 sites"]
    methods = "fedavg,fedexp:budget.low=1"
    study = planned(folder, methods, ["budget={low: 2, high: 5}"], baselines="personalised")
    steps = [row.steps for row in view_of(study, {}).rows]
    assert steps == ["6 to 15 at each of 3 sites", "3 to 15 at each of 3 sites", "6 to 15 at each of 3 sites, + 5"]


def test_notes_explain_the_cells_that_are_there(folder):
    """A value of some splits, one value in all, and a model that always says the only class."""
    auroc, error = StudyMetric("auroc", True), StudyMetric("calibration-error", False)
    study = planned(folder, "fedavg,fedexp", splits=2, baselines="none")
    apart, same, some = [[0.5, 0.6, 0.7], [0.6, 0.5, 0.9]], [[0.5, 0.6, 0.7]] * 2, [[None, 0.6, 0.7], [0.6, 0.5, 0.9]]
    for values, sentences in ((apart, ()), (same, ("without interval",)), (some, ("1 of 2: defined in so many",))):
        note = results_table(view_of(study, {"fedavg": apart, "fedexp": values}), auroc).note
        for sentence in ("without interval", "1 of 2: defined in so many"):
            assert (sentence in note) == (sentence in sentences)
    note = differences_table(view_of(study, {"fedavg": apart, "fedexp": apart}), auroc).note
    assert "A number without interval is the same in all splits." in note
    assert (
        differences_table(view_of(planned(folder, "fedavg", splits=2, baselines="none"), {"fedavg": apart}), auroc)
        is None
    )
    with h5py.File(folder / "sites.h5", "a") as file:
        for part in ("train", "test"):
            file[f"{part}/y"][file[f"{part}/offsets"][2] :] = 0
    study = planned(folder, "fedavg", splits=2, baselines="none")
    always = "Of one class, a model that always says it is right in all"
    for metric in metrics_of(
        load_recipe({**to_plain(study.recipe), "evaluate": {"metrics": METRICS}}), "classification"
    ):
        assert (always in results_table(view_of(study, {}), metric).note) == (metric.name in ("f1-macro", "accuracy"))
    assert [error.title, error.in_text, auroc.in_text] == ["Calibration error", "calibration error", "AUROC"]


METRICS = ["auroc", "f1-macro", "calibration-error"]


def test_accuracies_are_in_percent_and_own_metrics_are_not(folder):
    metrics = {"balance": "balanced-accuracy", "my_accuracy": {"whole": "mine:f", "better": "higher"}}
    found = metrics_of(load_recipe(recipe(folder, evaluate={"metrics": metrics})), "classification")
    assert [value_text(0.875, metric) for metric in found] == ["87.5", "0.875", "87.5"]


def test_average_precision_is_of_the_second_class(folder):
    recipe(folder, evaluate={"metrics": ["average-precision", "auroc"]})
    view = view_of(planned(folder, "fedavg", splits=2, baselines="none"), {})
    notes = [results_table(view, metric).note for metric in metrics_of(view.study.recipe, "classification")]
    assert ["Of the class 'ill', the positive one." in note for note in notes] == [True, False, False]


def test_the_page_of_one_method_and_a_site_of_one_class(folder):
    """Numbers have their nouns, and what is not there is said, or left out."""
    recipe(folder, rounds=1)
    study = planned(folder, "fedavg", splits=2, baselines="none", standardize="client")
    view = view_of(study, {"fedavg": [[0.5, 0.6, None], [0.6, 0.5, None]]})
    curves = {("global", k, "auroc"): [(1, 0.5)] for k in (0, 1)}
    runs = [replace(run, curves=curves) for run in view.results.runs["fedavg"]]
    page = write_results(replace(view, results=StudyResults({"fedavg": runs}, {"fedavg": 2})), [], [])["study.html"]
    for words in ("sites: 1 method at 3 sites", "has 1 round of 5 gradient steps at each of 3 sites"):
        assert words in page
    assert "AUROC is defined in no evaluation at west." in page
    assert "Difference from" not in page
    assert not any("that is left out" in line for line in study.remarks)


@pytest.mark.soak
@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_long_names_leave_the_means_in_sight(folder):
    with h5py.File(folder / "sites.h5", "a") as file:
        del file["train/client"]
        file["train/client"] = [f"University_Hospital of the {site}ern Lakes and Mountains".encode() for site in SITES]
    study = planned(folder, "fedavg,fedexp", splits=2, baselines="none")
    values = [[0.5, 0.6, 0.7], [0.6, 0.5, 0.8]]
    files = write_results(view_of(study, {"fedavg": values, "fedexp": values}), [], [])
    (folder / "study.html").write_text(files["study.html"])
    with browser.started() as tab:
        tab.open(folder / "study.html", width=1000, dark=False)
        wider = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth).length"
        assert tab.value(wider) == 0


@pytest.mark.soak
def test_a_study_that_is_killed_goes_on(folder, command):
    """One of two ranks is killed in the middle; the same command ends with the tables of an uninterrupted study."""
    (folder / "blown.py").write_text(BLOWN.replace("12, 4", "4, 2"))
    recipe(folder, rounds=2, model={"factory": "blown:Linear"}, checkpoint={"every": 1}, evaluate={})
    words = ["study", "recipe.yaml", "--methods", "fedavg", "--splits", "2", "--baselines", "pooled"]
    done(planned(folder, "fedavg", splits=2, baselines="pooled", output=folder / "whole"))
    (folder / "order").write_text(f"{int(signal.SIGKILL)} 12")
    first = launch(2, [*words, "--output", "cut"], cwd=folder)
    assert (folder / "landed").exists()
    assert first.returncode not in (0, 2, 3, 4, 75), first.stderr
    again = command([*words, "--output", "cut"], folder)
    assert again.returncode == 0, again.stderr
    for kind in ("sweep/runs/*/model.safetensors", "data/*.h5", "tables/*", "splits.csv"):
        files = sorted((folder / "whole").glob(kind))
        assert len(files) > 0
        for path in files:
            other = folder / "cut" / path.relative_to(folder / "whole")
            assert other.read_bytes() == path.read_bytes(), path


LATE = '''
import os
import signal
from pathlib import Path

import torch


class Linear(torch.nn.Linear):
    """Sends its process a signal in the only round of the last run that tunes."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        if len(list(Path("cut/tuning/sweep/claims").glob("[!.]*"))) == 4 and not Path("landed").exists():
            Path("landed").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)
'''


@pytest.mark.soak
def test_a_signal_in_the_last_round_that_tunes_stops_the_study(folder, command):
    """That run ends by itself; no other begins."""
    (folder / "late.py").write_text(LATE)
    recipe(folder, rounds=1, model={"factory": "late:Linear"}, evaluate={})
    words = ["study", "recipe.yaml", "--splits", "2", "--baselines", "none", "--tune", "local.lr=0.1,0.01"]
    first = command([*words, "--output", "cut", "--quiet"], folder)
    assert (folder / "landed").exists()
    assert first.returncode == 75, first.stderr
    assert "cut stopped, runs are left; the same command goes on from there" in first.stderr
    assert len(list(folder.glob("cut/tuning/sweep/runs/*/model.safetensors"))) == 4
    assert not list(folder.glob("cut/sweep/runs/*"))
    again = command([*words, "--output", "cut", "--quiet"], folder)
    assert again.returncode == 0, again.stderr
    assert len(list(folder.glob("cut/sweep/runs/*/model.safetensors"))) == 2


def test_other_splits_are_refused_or_set_aside(folder):
    """A folder holds one study; the same one goes on with more methods, and keeps its runs."""
    recipe(folder, rounds=1)
    options = {"splits": 1, "baselines": "none"}
    place = done(planned(folder, "fedavg", **options), writes=False)
    kept = place / "sweep/runs/fedavg.split-0.seed-0/model.safetensors"
    before = kept.stat().st_mtime_ns
    done(planned(folder, "fedavg,fedexp", **options), writes=False)
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(InputError, match=r"a study of other splits: got split_seed 0 there and 1 here; .*--fresh"):
        prepare(planned(folder, "fedavg", split_seed=1, **options), fresh=False)
    done(planned(folder, "fedavg", split_seed=1, **options), fresh=True, writes=False)
    assert (place / "previous-1/sweep/runs/fedavg.split-0.seed-0/model.safetensors").stat().st_mtime_ns == before
    (folder / "other").mkdir()
    (folder / "other/thesis.txt").touch()
    with pytest.raises(InputError, match=r"not a study's: got thesis\.txt"):
        prepare(planned(folder, "fedavg", output=folder / "other"), fresh=False)


def test_of_studies_that_begin_at_once_in_a_folder_one_goes_on(folder, monkeypatch):
    """Another job's study appears after this one has found the folder empty."""
    recipe(folder, rounds=1)

    def overtaken(path: Path, content: str) -> bool:
        assert write_new(path, content.replace("split_seed: 0", "split_seed: 7"))
        return write_new(path, content)

    monkeypatch.setattr("hpcfed.lab.study.folder.write_new", overtaken)
    with pytest.raises(InputError, match="a study of other splits: got split_seed 7 there and 0 here"):
        prepare(planned(folder, "fedavg", splits=1, baselines="none"), fresh=False)
    assert sorted(path.name for path in (folder / "run-study").iterdir()) == ["study.yaml"]


@pytest.mark.soak
def test_metrics_that_finished_runs_have_not_measured_are_refused(folder):
    recipe(folder, rounds=1, evaluate={"metrics": ["f1-macro", "brier"]})
    done(planned(folder, "fedavg", splits=1, baselines="none"), writes=False)
    recipe(folder, rounds=1, evaluate={"metrics": ["brier"]})
    done(planned(folder, "fedavg", splits=1, baselines="none"))
    recipe(folder, rounds=1, evaluate={"metrics": ["balanced-accuracy"]})
    with pytest.raises(InputError, match="this run has not measured balanced-accuracy; name the metrics"):
        done(planned(folder, "fedavg", splits=1, baselines="none"))


@pytest.mark.soak
def test_runs_of_fewer_rounds_are_in_no_table(folder):
    """A study that goes on to more rounds, and is stopped after one run of four."""
    recipe(folder, rounds=1, evaluate={})
    done(planned(folder, "fedavg", splits=4, baselines="none"), writes=False)
    more = planned(folder, "fedavg", splits=4, baselines="none", rounds=2)
    plan = more.plan()
    run_sweep(replace(plan, units=plan.units[:1]), World(), quiet=True)
    view, complete = write_study(more, plan, [], [])
    assert view is not None
    assert not complete
    assert [run.split for run in view.results.runs["fedavg"]] == [0]
    assert "FedAvg: 3 of 4 runs have no result" in (folder / "run-study" / "study.html").read_text()


@pytest.mark.soak
def test_a_later_call_has_the_remarks_on_the_splits_too(folder):
    """Which the first call has written, or the one that submits an array."""
    of_two_samples(folder / "sites.h5")
    recipe(folder, rounds=1, evaluate={})
    options = {"kind": "k-fold", "splits": 2, "standardize": "client", "baselines": "none"}
    for _ in range(2):
        place = done(planned(folder, "fedavg", **options))
        assert (
            "split 1: scaled as all clients are, for want of training rows: west" in (place / "study.html").read_text()
        )


def test_a_site_that_is_left_out_is_scaled_by_the_others(folder):
    """One line says so: a study has no common test set."""
    recipe(folder, rounds=1, evaluate={})
    options = {"kind": "leave-one-site-out", "baselines": "none"}
    study = planned(folder, "fedavg", standardize="client", **options)
    said = [*study.remarks, *prepare(study, fresh=False)]
    assert said == ["the site that is left out is scaled by the training samples of all others, not by its own"]
    assert not planned(folder, "fedavg", standardize="pooled", **options).remarks
    x, owner = study.samples.dataset.x.astype(np.float64), study.samples.owner
    with h5py.File(study.folder / "data/split-1.sites.h5") as file:
        others = x[owner != 1]
        np.testing.assert_allclose(file["test/x"][:], (x[owner == 1] - others.mean(0)) / others.std(0), atol=1e-5)


def test_a_method_of_ones_own_has_its_title(folder):
    own = "from hpcfed.algorithms.fedavg import Plain, ServerStep\nfrom hpcfed.types import Method\n"
    (folder / "fedmine.py").write_text(f"{own}def method():\n    return Method('FedMine', Plain(), ServerStep())\n")
    factory = ["algorithm={factory: fedmine:method}"]
    titles = [arm.title for arm in planned(folder, "recipe", factory, baselines="none").arms]
    assert titles == ["FedAvg", "FedMine"]
    with pytest.raises(InputError, match=r"no method 'fedmine'; .*; the recipe's own method is 'recipe'"):
        planned(folder, "fedmine", factory)


@pytest.mark.soak
def test_tables_of_an_earlier_call_are_removed(folder):
    """Those that hpcfed wrote and nobody has changed; files of others stay, whatever their names."""
    recipe(folder, rounds=1, evaluate={})
    options = {"splits": 1, "fraction": 0.4}
    more = {"baselines": "alone", "bootstrap": 100, "tune": ["local.lr=0.01,0.1"]}
    tables = done(planned(folder, "fedavg,fedexp", **options, **more)) / "tables"
    old = {path.name for path in tables.iterdir()}
    assert old > {"bootstrap.csv", "tuning-points.csv", "cross-site-accuracy.csv"}
    (tables / "tuning-chosen-values.tex").write_text("% edited for the paper")
    (tables / "my-cross-site-accuracy.csv").touch()
    (tables / "values.csv").unlink()
    for name in (".values.csv.77.tmp", ".mine.csv.77.tmp"):
        (tables / name).touch()
        os.utime(tables / name, (0, 0))
    (tables / ".summary.csv.77.tmp").touch()  # which another node may be writing
    done(planned(folder, "fedavg,fedprox", **options, baselines="none"), fresh=True)
    alone = planned(folder, "fedavg,fedprox", **options, baselines="none", output=folder / "fresh")
    new = {path.name for path in (done(alone) / "tables").iterdir()}
    others = {"tuning-chosen-values.tex", "my-cross-site-accuracy.csv", ".mine.csv.77.tmp", ".summary.csv.77.tmp"}
    assert {path.name for path in tables.iterdir()} == new | others


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "fedevg"}, "--methods: no method 'fedevg'; did you mean 'fedavg'?"),
        ({"methods": "fedavg,fedavg"}, "the method 'FedAvg' stands twice"),
        ({"methods": "feddyn:alpha"}, "expected name:key=value, got 'alpha'"),
        ({"methods": "fedavg:local.steps=9"}, "expected one local.steps for all methods"),
        ({"methods": ","}, "expected names with commas between"),
        ({"kind": "k-folds"}, "--kind 'k-folds'; did you mean 'k-fold'?"),
        ({"kind": "k-fold", "splits": 1}, "--splits: expected 2 to 1000, got 1"),
        ({"kind": "leave-one-site-out", "splits": 3}, "--splits has no effect"),
        ({"kind": "k-fold", "fraction": 0.3}, "--test-fraction has no effect with --kind k-fold without --tune"),
        ({"kind": "leave-one-site-out", "fraction": 0.3}, "--test-fraction has no effect with --kind leave-one"),
        ({"fraction": 1.0}, "--test-fraction: expected a number between 0 and 1"),
        ({"baselines": "pooled,along"}, "no baseline 'along'; did you mean 'alone'?"),
        ({"baselines": "pooled,all"}, "--baselines all: expected no other beside it, got pooled,all"),
        ({"kind": "k-fold", "splits": 40}, "site 'west' is too small"),
        ({"overrides": ["stop={patience: 3}"]}, "stop in a study"),
        ({"overrides": ["stop={metric: loss, target: 0.1}"]}, "stop in a study"),
        ({"overrides": ["cohort={schedule: [[0]]}"]}, "cohort.schedule in a study"),
        (
            {"overrides": ["cohort.without=[west]"]},
            "cohort.without in a study: expected none: all sites train every arm",
        ),
        (
            {"kind": "leave-one-site-out", "overrides": ['parameters={private: ["*bias*"]}']},
            "FedAvg: private parts with --kind leave-one-site-out: the site that is left out has none",
        ),
        ({"overrides": ["loss=squared"]}, "FedAvg: loss.name 'squared' does not fit a classification federation"),
    ],
)
def test_wrong_inputs(folder, options, message):
    with pytest.raises(InputError) as refused:
        planned(folder, **options)
    assert message in str(refused.value)


def test_a_wrong_key_names_its_method(folder):
    """Before any file is written; and the command ends with one line and exit code 2."""
    with pytest.raises(InputError, match=r"FedExP \(epss 1\): .*unknown key 'algorithm.epss'"):
        planned(folder, "fedavg,fedexp:epss=1", splits=2)


@pytest.mark.soak
def test_runs_of_different_code_are_reported(folder, command):
    """A method that is added after an edit stands in one table with runs of the code before."""
    (folder / "mine.py").write_text(
        "def wrong(output, target):\n    return (output.argmax(1) != target).sum(), len(target)"
    )
    metric = "evaluate.metrics={wrong: {sum: 'mine:wrong', better: lower}}"
    words = ["study", "recipe.yaml", "--splits", "2", "--baselines", "none", "--accept-code", metric, "--methods"]
    first = command([*words, "fedavg"], folder)
    assert first.returncode == 0, first.stderr
    assert "different code" not in first.stdout
    (folder / "mine.py").write_text((folder / "mine.py").read_text().replace("!=", "=="))
    second = command([*words, "fedavg,fedexp"], folder)
    assert "runs had different code, mine.py " in second.stdout
    assert "runs had different code, mine.py " in (folder / "run-study/study.html").read_text()


def test_runs_that_are_refused_are_wrong_input(folder, command):
    """No empty tables, exit code 2, and the mended recipe goes on; a run that failed makes it the machine's, 4."""
    words = ["study", "recipe.yaml", "--splits", "2", "--baselines", "none", "--quiet"]
    (folder / "broken.py").write_text("def model():\n    raise ValueError('no such layer')\n")
    wrong = command([*words, "model={factory: 'broken:model'}"], folder)
    assert wrong.returncode == 2
    assert "2 of 2 runs have no result; the first was refused: got " in wrong.stderr
    assert "broken.py, line 2, in model); mend the recipe; if the cause lies elsewhere" in wrong.stderr
    assert "mend the recipe; if the cause lies elsewhere, --retry tries them again" in wrong.stderr
    assert wrong.stdout == ""
    assert not (folder / "run-study/study.html").exists()
    mended = command(words, folder)
    assert mended.returncode == 0, mended.stderr
    plan = planned(folder, "fedavg", splits=2, baselines="none").plan()
    first, second = (unit.name for unit in plan.units)
    ended = {
        first: Claim(ending="refused", message="no such mood"),
        second: Claim(ending="failed", message="the disk is full"),
    }
    with pytest.raises(EnvironmentFailure, match="2 of 2 runs have no result; the first was refused: got no such mood"):
        raise_if_failed(plan, ended)
    with pytest.raises(InputError, match="with --fresh where other runs change with it"):
        raise_if_failed(plan, ended | {second: Claim(ending="finished")})


def test_the_command_refuses_in_one_line(folder, command):
    wrong = command(["study", "recipe.yaml", "--methods", "fedavg,fedexq"], folder)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines() == ["hpcfed: --methods: no method 'fedexq'; did you mean 'fedexp'?"]
    assert not (folder / "run-study").exists()
