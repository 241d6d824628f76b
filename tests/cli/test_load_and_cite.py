"""`hpcfed.load` returns a run's record and module; `hpcfed cite` lists exactly the references of a run."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

import hpcfed
from data_prep.catalogue import SOURCES
from data_prep.partition import SCHEMES
from hpcfed import algorithms, updates
from hpcfed.errors import InputError, Stopped
from hpcfed.lab import cite
from hpcfed.models import named
from tests.launch import ROOT
from tests.mpi.recipes import small, write_small

pytestmark = pytest.mark.one_mpi


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A finished run of three rounds whose evaluated model is not the last iterate."""
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    return hpcfed.run(small("run", evaluate={"every": 2, "model": "last-two"}), quiet=True)


def test_what_was_recorded_comes_back_as_a_table(finished):
    run = hpcfed.load(finished.folder)
    assert run.status == "finished"
    assert run.environment["ranks"] == 1
    assert run.metrics.index.tolist() == [1, 2, 3]
    assert run.metrics["gradients"].tolist() == [row["gradients"] for row in finished.metrics]
    assert run.metrics["cohort"].tolist() == [row["cohort"] for row in finished.metrics]
    assert run.metrics["seconds.local"].tolist() == [row["seconds"]["local"] for row in finished.metrics]
    assert run.metrics["test_loss"].isna().tolist() == [True, False, False]
    assert run.metrics["train_loss"].dtype == np.float64  # null in all rounds
    assert run.clients is None
    (finished.folder / "clients.csv").write_text("round,client,accuracy\n3,0,0.5\n")
    assert hpcfed.load(finished.folder).clients["accuracy"].tolist() == [0.5]
    (finished.folder / "clients.csv").write_text("round,client,accuracy\n3,0,0.5\n3,1,0.2")  # of 0.25: being written
    assert hpcfed.load(finished.folder).clients["accuracy"].tolist() == [0.5]


def test_a_matrix_that_not_all_rounds_measured_comes_back(tmp_path, monkeypatch):
    """It is null in the others."""
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    run = hpcfed.run(small("run", evaluate={"every": 2, "metrics": ["confusion-matrix"]}), quiet=True)
    found = hpcfed.load(run.folder).metrics["test_confusion-matrix"].tolist()
    assert found == [row["test_confusion-matrix"] for row in run.metrics]
    assert [type(matrix) for matrix in found] == [type(None), list, list]
    assert "test_confusion-matrix" not in set(hpcfed.runs(run.folder)["column"])


def edit_result(run, **changes):
    (run / "result.json").write_text(json.dumps(json.loads((run / "result.json").read_text()) | changes))


def test_status_is_that_of_the_record(finished):
    """Whatever ``result.json`` says."""
    run = finished.folder
    for status in ("stopped", "failed", "diverged", "excellent"):
        edit_result(run, status=status)
        assert hpcfed.load(run).status == "finished"
    (run / "result.json").unlink()
    assert hpcfed.load(run).status == "finished"
    first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (run / "metrics.jsonl").write_text(first)
    assert hpcfed.load(run).status == "unfinished"
    (run / "result.json").write_text('{"status": "finished", "rounds": 1, "stopped": "stop.patience: …"}')
    assert hpcfed.load(run).status == "unfinished"
    edit_result(run, status="stopped")
    assert hpcfed.load(run).status == "stopped"  # why it goes no further is in no row
    edit_result(run, rounds=3)
    assert hpcfed.load(run).status == "unfinished"
    (run / "metrics.jsonl").write_text("")
    assert hpcfed.load(run).status == "unfinished"


@pytest.mark.parametrize("evaluate", [{}, {"every": 2}, {"every": 0}])
def test_status_of_a_run_that_was_stopped_by_its_scores(evaluate, tmp_path):
    write_small(tmp_path)
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), rounds=30, evaluate=evaluate)
    recipe |= {"stop": {"patience": 2}, "local": {"steps": 1, "batch_size": 10, "lr": 1e-6}}
    if evaluate.get("every") == 0:
        recipe |= {"stop": {"max_hours": 1e-9}, "checkpoint": {"every": 1}}
        with pytest.raises(Stopped):
            hpcfed.run(recipe, quiet=True)
    else:
        hpcfed.run(recipe, quiet=True)
    run = hpcfed.load(tmp_path / "run")
    assert (len(run.metrics) < 30, run.status) == (True, "finished" if "patience" in recipe["stop"] else "stopped")


def test_a_run_that_goes_on_or_has_moved(finished, tmp_path):
    moved = tmp_path / "elsewhere"
    finished.folder.rename(moved)
    (tmp_path / "small.h5").rename(tmp_path / "other.h5")
    run = hpcfed.load(moved, data=tmp_path / "other.h5")
    assert sum(parameter.numel() for parameter in run.module.parameters()) > 0
    text = (moved / "metrics.jsonl").read_text()
    (moved / "metrics.jsonl").write_text(text[:-30])
    (moved / "result.json").unlink()
    (moved / "model.safetensors").unlink()
    run = hpcfed.load(moved)
    assert (run.status, len(run.metrics)) == ("unfinished", 2)
    with pytest.raises(InputError, match="no trained model yet"):
        _ = run.module
    row = json.loads(text.splitlines()[1])
    row["attempts"] = "users"
    (moved / "metrics.jsonl").write_text(f"{text.splitlines()[0]}\n{json.dumps(row)}\n")
    with pytest.raises(InputError, match="damaged: expected numbers in the columns"):
        _ = hpcfed.load(moved).metrics
    (moved / "metrics.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="not JSON"):
        _ = hpcfed.load(moved).metrics
    with pytest.raises(InputError, match="not a run folder"):
        hpcfed.load(tmp_path)


def test_the_module_is_the_trained_one(finished):
    run = hpcfed.load(finished.folder)
    same = zip(run.module.parameters(), finished.module.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)
    assert not run.module.training
    evaluated = zip(run.evaluated.parameters(), run.module.parameters(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in evaluated)


def test_the_former_name_of_a_documented_module_still_works_and_names_the_new_one(monkeypatch):
    monkeypatch.delitem(sys.modules, "hpcfed.loaded", raising=False)
    with pytest.warns(DeprecationWarning, match=r"hpcfed\.loaded has moved: import hpcfed\.lab\.loaded"):
        former = import_module("hpcfed.loaded")
    assert former.load is hpcfed.load


def test_records_of_runs_are_one_tidy_table(finished):
    found = hpcfed.runs([finished.folder, finished.folder])
    assert [*found] == ["run", "method", "seed", "round", "column", "value"]
    assert set(found["run"]) == {str(finished.folder)}
    assert set(found["seed"]) == {"0"}
    wide = found.pivot_table(index="round", columns="column", values="value")
    assert wide["test_accuracy"].dropna().tolist() == [
        row["test_accuracy"] for row in finished.metrics if row["test_loss"]
    ]
    assert wide["seconds.local"].tolist() == [row["seconds"]["local"] for row in finished.metrics]
    assert found["value"].notna().all()
    assert hpcfed.runs(finished.folder).equals(found)
    for wrong in ([], finished.folder.parent / "none"):
        with pytest.raises(InputError):
            hpcfed.runs(wrong)


def test_the_version_is_that_of_the_changelog():
    first = re.search(
        r"^## (\S+)( \(unreleased\))?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert first
    assert hpcfed.__version__ == first[1] + (".dev0" if first[2] else "")
    assert f"version: {hpcfed.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def keys_of(text: str) -> list[str]:
    return re.findall(r"^@\w+\{(.*),$", text, flags=re.MULTILINE)


def test_a_run_is_cited_for_what_it_used(finished, command, tmp_path):
    done = command(["cite", finished.folder], tmp_path)
    assert done.returncode == 0, done.stderr
    assert keys_of(done.stdout) == [cite.FEDAVG, cite.FEDEXP, "hpcfed"]
    assert "% Data set small: no reference known here" in done.stdout
    assert f"version = {{{hpcfed.__version__}}}" in done.stdout
    assert command(["cite", tmp_path], tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ({"algorithm": {"name": "feddyn"}, "guess": "remaining"}, [cite.FEDDYN, cite.GEL]),
        (
            {"algorithm": {"local": "prox", "server": "yogi"}, "local": {"optimizer": "adam"}},
            [cite.FEDPROX, cite.ADAPTIVE, "kingma2015adam"],
        ),
        ({"algorithm": {"local": "plain", "normalize": "none", "server": "step"}}, [cite.FEDAVG]),
        ({"algorithm": {"factory": "own:method"}, "model": {"factory": "own:model"}}, []),
        ({"algorithm": {"name": "scaffold-exp"}, "model": {"name": "mlp"}}, [cite.FEDEXP, "karimireddy2020scaffold"]),
        (
            {"algorithm": {"name": "ditto"}, "local": {"noise": {"clip": 1.0}}, "secure_aggregation": {"dropout": 0.1}},
            ["li2021ditto", cite.SECURE, cite.DP_SGD],
        ),
        (
            {"algorithm": {"name": "fedavg"}, "parameters": {"private": ["*bn*"], "buffers": "private"}},
            [cite.FEDAVG, *cite.PRIVATE_PARTS, cite.SILOBN],
        ),
        (
            {"algorithm": {"name": "fedavg"}, "updates": [{"sign": {"feedback": False}}, {"clip": {"norm": 1.0}}]},
            [cite.FEDAVG, "sun2019can"],
        ),
        (
            {"algorithm": {"name": "fedavg"}, "updates": [{"topk": {"feedback": True}}, {"clip": {"quantile": 0.5}}]},
            [cite.FEDAVG, "stich2018sparsified", "karimireddy2019error", "sun2019can", "andrew2021differentially"],
        ),
    ],
)
def test_recipes_are_cited_for_their_parts(recipe, keys):
    assert [key for _, found in cite.of_recipe(recipe) for key in found] == keys


def test_gel_is_cited_by_its_journal_version():
    entry = cite.references()[cite.GEL]
    assert "Boosting Resource-Constrained Federated Learning Systems With Guessed Updates" in entry
    assert "10.1109/TPDS.2025.3578522" in entry
    assert "2110.11486" in entry


def test_data_are_cited_by_the_file_where_it_is(tmp_path):
    import h5py

    path = write_small(tmp_path)
    with h5py.File(path, "a") as file:
        file.attrs["name"] = "emnist-letters"
        file.attrs["partition"] = json.dumps({"scheme": "dirichlet-class"})
    found = list(cite.of_data({"data": str(path)}))
    assert [keys for _, keys in found] == [("cohen2017emnist",), ("yurochkin2019bayesian",)]
    ((_, keys),) = cite.of_data({"data": str(tmp_path / "gone.h5")})
    assert keys == ()


def test_everything_that_has_a_paper_is_in_the_bibliography():
    tables = (algorithms.references(), updates.references(), cite.MODELS, cite.PARTITIONS, cite.DATA)
    used = {key for table in tables for keys in table.values() for key in keys}
    used |= {*cite.OPTIMIZERS.values(), *cite.PRIVATE_PARTS}
    used |= {cite.GEL, cite.SILOBN, cite.FEDREP, cite.SECURE, cite.DP_SGD}
    assert used == set(cite.references())
    assert set(cite.MODELS) == set(named()) - {"linear", "logistic", "quadratic", "mlp"}
    assert set(cite.PARTITIONS) == set(SCHEMES) - {"iid"}
    known = {"emnist" if name.startswith("emnist-") else name for name in SOURCES}
    assert set(cite.DATA) == (known - {"own", "federation", "leaf-vectors", "leaf-shakespeare"}) | {"emnist"}


def test_entries_are_well_formed():
    for key, entry in cite.references().items():
        assert entry.count("{") == entry.count("}"), key
        fields = set(re.findall(r"^  (\w+) *=", entry, flags=re.MULTILINE))
        assert {"title", "author", "year"} <= fields, key
        assert fields & {"booktitle", "journal", "eprint", "institution", "howpublished"}, key
