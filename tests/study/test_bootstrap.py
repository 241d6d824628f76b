"""Intervals over patients, against scikit-learn on the resampled rows of each split."""

from __future__ import annotations

import csv
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.metrics import accuracy_score, roc_auc_score

from data_prep.streams import stream
from hpcfed.errors import InputError
from tests.study.conftest import SITES, done, planned, recipe

RESAMPLES = 100


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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


@pytest.mark.parametrize("by", ["patient", pytest.param("sample", marks=pytest.mark.soak)])
def test_intervals_are_those_of_resampled_rows(folder, by):
    group = with_patients(folder / "sites.h5") if by == "patient" else None
    recipe(folder, rounds=1, evaluate={"metrics": ["auroc", "balanced-accuracy"]})
    study = planned(folder, "fedavg", splits=2, baselines="alone,personalised", fraction=0.4, bootstrap=RESAMPLES)
    place = done(study)
    times, owner = units(study, group), study.samples.owner
    found = {(row["method"], row["metric"], row["site"]): row for row in table(place / "tables/bootstrap.csv")}
    assert {method for method, _, _ in found} == {"FedAvg", "Each site alone"}
    assert {metric for _, metric, _ in found} == {"accuracy", "auroc", "balanced-accuracy"}
    values: dict[tuple[str, str], np.ndarray] = {}
    for title, arms in (("FedAvg", ["fedavg"] * 3), ("Each site alone", [f"alone-{k}" for k in range(3)])):
        for metric in ("accuracy", "auroc"):
            each = np.full((2, 3, RESAMPLES), np.nan)
            for number, split in enumerate(study.splits.each):
                for k, arm in enumerate(arms):
                    rows = np.flatnonzero(split.tests & (owner == k))
                    model = load_file(place / f"sweep/runs/{arm}.split-{number}.seed-0/model.safetensors")
                    out = study.samples.dataset.x[rows] @ model["weight"].T + model["bias"]
                    label = study.samples.dataset.y[rows]
                    for b in range(RESAMPLES):
                        again = np.repeat(np.arange(len(rows)), times[b, rows])
                        if metric == "accuracy" and len(again):
                            each[number, k, b] = accuracy_score(label[again], out[again].argmax(1))
                        elif len(set(label[again])) == 2:
                            each[number, k, b] = roc_auc_score(label[again], (out[:, 1] - out[:, 0])[again])
            values[title, metric] = np.nanmean(each, axis=0)
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


def test_too_few_resamples_are_refused(folder):
    with pytest.raises(InputError, match=r"--bootstrap: expected 100 to 100,000 resamples, or 0 for none, got 7"):
        planned(folder, bootstrap=7)
