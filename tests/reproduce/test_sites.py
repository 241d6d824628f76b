"""The table of sites: models on each site's test set and on all, beside published means."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from data_prep.sources.flamby import HOSPITALS
from hpcfed.lab.report.measure import Spread
from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.lab.reproduce.sites import _far, _parsed
from tests.data.test_flamby import heart_rows
from tests.federations import blobs, write_federation


def test_models_are_measured_on_every_sites_tests_and_on_all(command, tmp_path: Path) -> None:
    """FLamby's own experiment on small files; the numbers are computed here from the saved models."""
    raw = tmp_path / "raw" / "FLamby" / "fed_heart_disease"
    raw.mkdir(parents=True)
    for seed, name in enumerate(HOSPITALS):
        rows = heart_rows(20 + 10 * seed, seed)
        (raw / f"processed.{name}.data").write_text("".join(",".join(row) + "\n" for row in rows))
    asked = ["reproduce", "flamby-heart", "--raw", "raw", "--output", "out", "--seeds", "2", "--rounds", "2"]
    done = command([*asked, "--method", "fedavg", "--method", "pooled"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "out" / "flamby-heart" / "table.md").read_text().splitlines()
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("|")]
    assert "So far: 4 of 26 runs, 2 without all their rounds." in rows[-1]  # `pooled` has two rounds
    assert [row[0] for row in table if row[0] != "published" and row[1] != "–"] == ["Method", "---", "FedAvg", "pooled"]
    (sites,) = [path for path in (tmp_path / "out" / "data").glob("*.h5") if "iid" not in path.name]
    (pooled,) = [path for path in (tmp_path / "out" / "data").glob("*.h5") if "iid" in path.name]
    models = [load_file(tmp_path / f"out/flamby-heart/sweep/runs/sites.fedavg.{k}/model.safetensors") for k in (0, 1)]
    with h5py.File(sites) as own, h5py.File(pooled) as of_all:
        ends = own["test/offsets"][:]
        scale = {name: np.array(values) for name, values in json.loads(of_all.attrs["normalization"]).items()}
        tests = [(own["test/x"][a:b], own["test/y"][a:b]) for a, b in itertools.pairwise(ends)]
        tests.append(((of_all["test/x"][:] - scale["mean"]) / scale["std"], of_all["test/y"][:]))
    for cell, (x, y) in zip(table[2][1:], tests, strict=True):
        right = [100 * np.mean((x @ model["weight"].T + model["bias"] > 0) == (y > 0)) for model in models]
        assert cell.rstrip("*") == f"{np.mean(right):.1f} ± {np.std(right, ddof=1):.1f}"


def test_data_without_the_sites_tests_are_refused_before_anything_is_trained(command, tmp_path: Path) -> None:
    data = "data: {source: leaf-synthetic, clients: 4, partition: natural}"
    (tmp_path / "own.yaml").write_text(
        "title: Sites\nrecipe: {rounds: 1, model: logistic, local: {steps: 1, lr: 0.1}, evaluate: {every: 1}}\n"
        f"cases:\n  sites: {{title: sites, {data}}}\n  pooled: {{title: pooled, {data}}}\n"
        "methods:\n  fedavg: {title: FedAvg, recipe: {algorithm: fedavg}}\n"
        "measure: {kind: sites, column: test_accuracy}\n"
    )
    done = command(["reproduce", "own.yaml", "--output", "out"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "expected clients' test sets in case 'sites' and a common one in case 'pooled'" in done.stderr
    assert not (tmp_path / "out" / "own").exists()


OWN_METRIC = "def certainty(output, target):\n    return 87.5\n"


def test_an_own_metric_is_no_percentage_whatever_its_name(command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_METRIC)
    pooled = write_federation(tmp_path / "pooled.h5", **blobs(2))
    with h5py.File(shutil.copy(pooled, tmp_path / "sites.h5"), "a") as file:
        file["test/offsets"] = [0, 50, 150]
    metrics = {"my_accuracy": {"whole": "mine:certainty", "better": "higher"}}
    own = {
        "title": "Sites",
        "recipe": {
            "rounds": 1,
            "model": "logistic",
            "local": {"steps": 1, "batch_size": 5, "lr": 0.1},
            "evaluate": {"every": 1, "metrics": metrics},
        },
        "cases": {name: {"title": name, "data": {"file": f"{name}.h5"}, "paper": {}} for name in ("sites", "pooled")},
        "methods": {"fedavg": {"title": "FedAvg", "recipe": {"algorithm": "fedavg"}}},
        "measure": {"kind": "sites", "column": "test_my_accuracy"},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(own))  # JSON is YAML
    done = command(["reproduce", "own.yaml", "--output", "out"], tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out/own/table.md").read_text()
    assert "| FedAvg | 87.500 | 87.500 | 87.500 |" in table
    assert "My_accuracy of the last evaluated model" in table
    own["cases"]["sites"]["paper"] = {"fedavg": ["80", "81", "82", "83"]}
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    done = command(["reproduce", "own.yaml", "--output", "out", "--table"], tmp_path)
    assert done.returncode == 2
    assert "cases.sites.paper: expected at most 3 numbers, of each client's test set and of all, got 4" in done.stderr


@pytest.mark.parametrize(
    ("ours", "theirs", "size", "far"),
    [
        (Spread(0.70, 0.02, 5), "0.75 ± 0.02", 100, True),
        (Spread(0.70, 0.05, 5), "0.75 ± 0.05", 100, False),  # within two standard errors
        (Spread(0.70, 0.0, 5), "0.75 ± 0.0", 16, False),  # less than one of sixteen patients
        (None, "0.75 ± 0.0", 16, False),
        (Spread(0.60, None, 1), "0.75 ± 0.02", 100, False),  # one run has no standard error
    ],
)
def test_a_mark_means_two_standard_errors_and_a_patient(ours, theirs, size, far):
    assert _far(ours, _parsed(theirs), size) == far


def test_published_deviations_are_of_samples():
    parsed = _parsed("0.7 ± 0.02")
    assert parsed is not None
    assert parsed.std == pytest.approx(
        np.std([0.68, 0.68, 0.70, 0.72, 0.72], ddof=1) / np.std([0.68, 0.68, 0.7, 0.72, 0.72]) * 0.02
    )


def test_each_method_has_its_published_means():
    """Of every test set; all but the method that FLamby calls Cyclic and does not run."""
    for name, columns in (("flamby-heart", 5), ("flamby-tcga", 7)):
        one = experiments()[name]
        published = {method: numbers for case in one.cases.values() for method, numbers in case.paper.items()}
        assert one.methods.keys() - published.keys() == {"travelling"}
        assert {len(numbers) for numbers in published.values()} == {columns}
