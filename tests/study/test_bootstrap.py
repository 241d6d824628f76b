"""Intervals over patients, against metrics of the resampled rows of each split."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.metrics import roc_auc_score

from data_prep.streams import stream
from hpcfed.errors import InputError
from hpcfed.lab.study.bootstrap import ResampleProgress, auroc
from tests.study.conftest import SITES, done, of_numbers, planned, recipe, table

RESAMPLES = 100


def with_patients(path: Path) -> np.ndarray:
    """Give the samples of the file patients of up to three each; return their numbers in its order."""
    with h5py.File(path, "a") as file:
        groups = []
        for part in ("train", "test"):
            ends = file[f"{part}/offsets"][:]
            number = np.arange(ends[-1]) // 3 + (1000 if part == "test" else 0)
            site = np.repeat(np.arange(3), np.diff(ends))
            file[f"{part}/group"] = number * 10 + site
            groups.append(file[f"{part}/group"][:])
    return np.concatenate(groups)


def units(study, group: np.ndarray | None) -> np.ndarray:
    """Return how often each sample is drawn, (B, n): by patient or by sample, from those that a split tests on."""
    owner, tested = study.samples.owner, np.any([split.tests for split in study.splits.each], axis=0)
    times = np.zeros((RESAMPLES, len(owner)), int)
    for k in range(3):
        rows = np.flatnonzero(tested & (owner == k))
        names = rows if group is None else group[rows]
        known = sorted(set(names.tolist()))
        drawn = stream(0, f"bootstrap of site {k}").multinomial(len(known), [1 / len(known)] * len(known), RESAMPLES)
        for row, name in zip(rows, names, strict=True):
            times[:, row] = drawn[:, known.index(name)]
    return times


def by_pairs(label: np.ndarray, score: np.ndarray) -> float:
    """Return the share of pairs in which the positive has the larger score, ties ½."""
    apart = score[label == 1][:, None] - score[label == 0]
    return float(np.mean((apart > 0) + 0.5 * (apart == 0)))


@pytest.mark.parametrize("by", ["patient", pytest.param("sample", marks=pytest.mark.soak)])
def test_intervals_are_those_of_resampled_rows(folder, by):
    group = with_patients(folder / "sites.h5") if by == "patient" else None
    (folder / "sick.py").write_text("def share(output, target):\n    return target.double().mean()\n")
    metrics = {"auroc": "auroc", "sick": {"whole": "sick:share"}}
    recipe(folder, rounds=1, evaluate={"metrics": metrics})
    study = planned(folder, "fedavg", splits=2, baselines="alone,personalised", fraction=0.4, bootstrap=RESAMPLES)
    place = done(study)
    times, owner = units(study, group), study.samples.owner
    found = {(row["method"], row["metric"], row["site"]): row for row in table(place / "tables/bootstrap.csv")}
    assert {method for method, _, _ in found} == {"FedAvg", "Each site alone"}
    assert {metric for _, metric, _ in found} == {"accuracy", "auroc", "sick"}
    values: dict[tuple[str, str], np.ndarray] = {}
    for title, arms in (("FedAvg", ["fedavg"] * 3), ("Each site alone", [f"alone-{k}" for k in range(3)])):
        each = {metric: np.full((2, 3, RESAMPLES), np.nan) for metric in ("accuracy", "auroc", "sick")}
        for number, split in enumerate(study.splits.each):
            for k, arm in enumerate(arms):
                rows = np.flatnonzero(split.tests & (owner == k))
                model = load_file(place / f"sweep/runs/{arm}.split-{number}.seed-0/model.safetensors")
                out = study.samples.dataset.x[rows] @ model["weight"].T + model["bias"]
                label = study.samples.dataset.y[rows]
                for b in range(RESAMPLES):
                    again = np.repeat(np.arange(len(rows)), times[b, rows])
                    if len(again):
                        each["accuracy"][number, k, b] = np.mean(label[again] == out[again].argmax(1))
                        each["sick"][number, k, b] = np.mean(label[again])
                    if len(set(label[again])) == 2:
                        each["auroc"][number, k, b] = by_pairs(label[again], (out[:, 1] - out[:, 0])[again])
        for metric, of_metric in each.items():
            values[title, metric] = np.mean(of_metric, axis=0)  # every split has a value with each sample once
            for k, site in enumerate(SITES):
                row, own = found[title, metric, site], values[title, metric][k]
                finite = own[np.isfinite(own)]
                assert int(row["resamples"]) == len(finite)
                if len(finite) >= 0.95 * RESAMPLES:
                    wanted = np.percentile(finite, (2.5, 97.5))
                    assert [float(row["low"]), float(row["high"])] == pytest.approx(wanted, abs=1e-6)
    apart = values["Each site alone", "accuracy"].mean(0) - values["FedAvg", "accuracy"].mean(0)
    row = found["Each site alone", "accuracy", "Mean of sites"]
    wanted = np.percentile(apart, (2.5, 97.5))
    assert [float(row["difference_low"]), float(row["difference_high"])] == pytest.approx(wanted, abs=1e-6)
    page = (place / "study.html").read_text()
    assert f"{RESAMPLES} resamples of the {'patients or groups' if by == 'patient' else 'samples'} that" in page


def test_auroc_of_many_samples_is_scikit_learns_in_little_memory():
    """With ties, a class that is not drawn, and outputs that are not finite; no pairs of samples are in memory."""
    rng = np.random.default_rng(0)
    count = 20_000
    target = torch.from_numpy(rng.integers(2, size=count))
    output = torch.from_numpy(np.stack([np.zeros(count), rng.normal(size=count).round(2) + target.numpy()], axis=1))
    times = rng.multinomial(count, np.full(count, 1 / count), 20)
    times[0] *= target.numpy() == 1
    tracemalloc.start()
    found = auroc(output, target)(times)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * times.nbytes
    assert np.isnan(found[0])
    score = output[:, 1].numpy()
    wanted = [roc_auc_score(target.numpy(), score, sample_weight=one) for one in times[1:]]
    assert found[1:] == pytest.approx(wanted, abs=1e-12)
    output[0, 1] = torch.inf
    assert np.isnan(auroc(output, target)(times)).all()


@pytest.mark.soak
def test_intervals_that_say_nothing_are_marked(folder):
    """A site of one class whose few samples are all right or all wrong; the table by site says that it is one."""
    with h5py.File(folder / "sites.h5", "a") as file:
        for part in ("train", "test"):
            offsets = file[f"{part}/offsets"][:]
            keep = np.r_[0 : offsets[2], offsets[2] : offsets[2] + 4]
            y = file[f"{part}/y"][:][keep]
            y[offsets[2] :] = 0
            x = file[f"{part}/x"][:][keep]
            x[offsets[2] :] = 0
            for name, value in (("x", x), ("y", y), ("offsets", np.array([*offsets[:3], len(y)]))):
                del file[f"{part}/{name}"]
                file[f"{part}/{name}"] = value
    recipe(folder, rounds=1, evaluate={"metrics": {}})
    place = done(planned(folder, "fedavg", splits=2, baselines="none", fraction=0.4, bootstrap=100))
    tested = "west 3 (one class in 2 of 2)"
    assert tested in (place / "tables/accuracy-by-site.tex").read_text()
    assert tested in (place / "tables/accuracy-over-sites.tex").read_text()
    text = (place / "tables/accuracy-bootstrap-over-patients.tex").read_text()
    assert re.search(r"& (0|100)\.0 \[--\]", text)
    assert "Fewer than 10 samples are tested on at west (" in text


STOPS = """
import os
import signal
from pathlib import Path

def share(output, target):
    if Path("run-study/study.html").exists() and not Path("stopped").exists():
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return target.double().mean()
"""
"""A metric that is computed anew on each resample, and stops the resampling once."""


@pytest.mark.soak
def test_resampling_that_is_stopped_leaves_the_page_without_it(folder, command):
    """Page and tables are written before; the same command goes on, and says how much is done."""
    (folder / "sick.py").write_text(STOPS)
    recipe(folder, rounds=1, evaluate={"metrics": {"sick": {"whole": "sick:share"}}})
    words = ["study", "recipe.yaml", "--splits", "2", "--baselines", "none", "--bootstrap", "100"]
    first = command(words, folder)
    assert first.returncode == 75, first.stderr
    assert first.stderr.splitlines() == [
        "hpcfed: run-study: resampling stopped, the page has no intervals over patients; the same command computes them"
    ]
    page = (folder / "run-study/study.html").read_text()
    assert page.endswith("</html>\n") or page.endswith("</html>")
    assert "Intervals over patients are not here yet" in page
    assert not (folder / "run-study/tables/bootstrap.csv").exists()
    again = command(words, folder)
    assert again.returncode == 0, again.stderr
    assert "run-study: 100 resamples of the patients of each of 3 sites" in again.stdout
    assert "Intervals over patients are not here yet" not in (folder / "run-study/study.html").read_text()
    assert (folder / "run-study/tables/bootstrap.csv").exists()


def test_progress_says_how_much_is_done(capsys):
    """At most a line every ten seconds."""
    progress = ResampleProgress("heart-study", speaks=True)
    progress.begin(1000, 6)
    progress.update(50, 6000)
    progress.pace._began -= 30
    progress.pace._spoke -= 30
    progress.update(1500, 6000)
    progress.update(1550, 6000)
    assert capsys.readouterr().out.splitlines() == [
        "heart-study: 1,000 resamples of the patients of each of 6 sites",
        "heart-study: 1,500/6,000 resamples done, 1,000 at each of 6 sites, 1:30 left",
    ]


def test_too_few_resamples_are_refused(folder):
    with pytest.raises(InputError, match=r"--bootstrap: expected 100 to 100,000 resamples, or 0 for none, got 7"):
        planned(folder, bootstrap=7)


@pytest.mark.soak
def test_a_main_metric_of_loss_has_no_empty_rows(folder, monkeypatch):
    """Without scikit-learn a regression is compared by loss: of the ensemble's mean output, and in resamples, too."""
    monkeypatch.setattr("hpcfed.lab.study.measures.find_spec", lambda name: None)
    of_numbers(folder / "sites.h5")
    recipe(folder, rounds=1, model={"name": "linear"}, evaluate={})
    place = done(planned(folder, "fedavg", splits=1, baselines="alone,ensemble", bootstrap=100))
    rows = {(row["method"], row["site"]): row for row in table(place / "tables/results.csv")}
    assert {row["metric"] for row in rows.values()} == {"loss"}
    with h5py.File(place / "data/split-0.sites.h5") as file:
        ends = file["test/offsets"][:]
        x, y = (file[f"test/{name}"][ends[1] : ends[2]] for name in ("x", "y"))
    models = [load_file(place / f"sweep/runs/alone-{k}.split-0.seed-0/model.safetensors") for k in range(3)]
    mean = np.mean([x @ model["weight"].T + model["bias"] for model in models], axis=0).ravel()
    title = "Ensemble of the sites' models"
    assert float(rows[title, "south"]["mean"]) == pytest.approx(np.mean((mean - y) ** 2) / 2, rel=1e-5)
    intervals = {(row["method"], row["site"]): row for row in table(place / "tables/bootstrap.csv")}
    assert set(intervals) == {key for key in rows if key[1] != "All samples together"}
    for key, row in ((key, rows[key]) for key in intervals):
        assert float(intervals[key]["low"]) < float(row["mean"]) < float(intervals[key]["high"])
