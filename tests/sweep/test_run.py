"""Sweeps by the command: their files, resuming, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import hpcfed
from hpcfed.config.recipe import Recipe
from hpcfed.io.pace import Pace
from hpcfed.lab.report.read import run_folders
from hpcfed.lab.sweep.grid import parse_grids
from hpcfed.lab.sweep.plan import make_plan
from hpcfed.lab.sweep.run import run_sweep
from hpcfed.loop import Round, training
from hpcfed.ranks.world import World
from hpcfed.reduce.checks import ranks_differ
from hpcfed.run_folder.rounds import numbers_of
from tests.launch import own_line
from tests.mpi.recipes import write_recipe, write_small
from tests.sweep.conftest import endings, read_claims, read_table

SWEEP = (
    "sweep",
    "recipe.yaml",
    "--grid",
    "local.lr=10**-2:10**-1:2",
    "--grid",
    "algorithm.server_lr=1,2",
    "--seeds",
    "2",
)
PICKY = """
from pathlib import Path

import torch


class Linear(torch.nn.Linear):
    def __init__(self, mood="good"):
        self.mood = mood if Path("monday").exists() else "good"
        if self.mood == "absent":
            raise RuntimeError("no such mood")
        super().__init__(12, 4)

    def forward(self, x):
        if self.mood == "bad" and len(x) > 1:
            raise RuntimeError("bad mood")
        return super().forward(x)
"""
"""A model that works, one that cannot be built, one that fails in training: the last two on Mondays."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of 4 configurations × 2 seeds that is done, but not reported."""
    folder = tmp_path_factory.mktemp("made")
    write_small(folder)
    grids = parse_grids(SWEEP[3:7:2])
    recipe = write_recipe(folder, rounds=2, evaluate={"train": {"every": 1}})
    plan = make_plan(recipe, [], grids, [0, 1], folder / "run-sweep")
    assert run_sweep(plan, World(), quiet=True) is False
    return plan.folder


@pytest.fixture
def swept(folder: Path, made: Path) -> Path:
    """A copy of it beside the recipe, and of the data that it is about."""
    shutil.copy2(made.parent / "small.h5", folder)
    return shutil.copytree(made, folder / "run-sweep")


def test_a_long_plan_says_how_far_it_is(folder, monkeypatch):
    monkeypatch.setattr(Pace, "is_due", lambda pace: True)
    write_small(folder)
    recipe, said = write_recipe(folder, rounds=2), list[str]()
    make_plan(recipe, [], parse_grids(SWEEP[3:7:2]), [], folder / "run-sweep", said.append)
    assert said[0] == f"{recipe}: 0 of 4 configurations checked"
    assert said[3].startswith(f"{recipe}: 3 of 4 configurations checked, 0:")


def test_a_run_has_one_digest_for_all_looks_at_the_claims(folder):
    """Not one of each run at every look, which is quadratic in the runs."""
    write_small(folder)
    plan = make_plan(write_recipe(folder, rounds=2), [], parse_grids(SWEEP[3:7:2]), [0, 1], folder / "run-sweep")
    assert all(unit.digest is unit.digest for unit in plan.units)
    assert len({unit.digest for unit in plan.units}) == 8


def test_files_of_a_sweep_and_of_its_repetition(swept, folder, command):
    done = command([*SWEEP, "--select", "train_loss:last2", "--parquet"], folder)
    assert done.returncode == 0, done.stderr
    assert endings(swept) == {"finished": 8}
    results, summary = read_table(swept / "results.csv"), read_table(swept / "summary.csv")
    assert len(results) == 8
    assert {row["status"] for row in results} == {"finished"}
    assert [row["rank"] for row in summary] == ["1", "2", "3", "4"]
    assert (summary[0]["local.lr"], summary[0]["algorithm.server_lr"]) == ("0.1", "2.0")  # the longest steps
    columns = parquet.read_table(swept / "results.parquet").to_pydict()
    assert columns["train_loss"] == [float(row["train_loss"]) for row in results]
    assert (swept / "figures" / "local.lr-algorithm.server_lr.png").stat().st_size > 5000

    record = [json.loads(line) for line in (swept / results[5]["folder"] / "metrics.jsonl").read_text().splitlines()]
    of_record = numbers_of(record[-1], swept)
    kept = [name for name in results[5] if name in of_record]
    assert len(kept) > 10
    assert kept == [name for name in of_record if name in kept]
    assert float(results[5]["train_loss"]) == record[-1]["train_loss"]
    assert float(results[5]["score"]) == pytest.approx(sum(row["train_loss"] for row in record) / 2)

    before = {
        path: path.stat().st_mtime_ns for path in swept.rglob("*") if "runs" in path.parts or "claims" in path.parts
    }
    again = command([*SWEEP, "--select", "train_loss:last2"], folder)
    assert again.returncode == 0
    assert "8 runs, 8 done" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_progress_of_a_sweep_shows_the_run_in_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpcfed.lab.sweep.run.QUIET_SECONDS", 0.0)
    write_small(tmp_path)
    plan = make_plan(write_recipe(tmp_path, rounds=2), [], [], [0, 1], tmp_path / "sweep")
    run_sweep(plan, World())
    _, first, last, *_, end = capsys.readouterr().out.splitlines()
    assert first.startswith("recipe: 0/2 runs done; the-recipe.seed-0: round 1/2  ")
    assert "local loss" in first
    assert last.startswith("recipe: 0/2 runs done; the-recipe.seed-0: round 2/2  ")
    assert end == "recipe: 2/2 runs done"


@pytest.mark.soak
def test_what_is_measured_over_clients_is_in_the_tables_and_may_select(folder, command):
    write_recipe(folder, rounds=2, evaluate={"clients": {"every": 2}})
    worst = "clients.global.train.accuracy.worst_decile"
    done = command(["sweep", "recipe.yaml", *SWEEP[2:4], "--seeds", "2", "--select", f"{worst}:last1:max"], folder)
    assert done.returncode == 0, done.stderr
    summary = read_table(folder / "run-sweep" / "summary.csv")
    assert [row["score_mean"] for row in summary] == [row[f"{worst}_mean"] for row in summary]
    results = read_table(folder / "run-sweep" / "results.csv")
    assert {row["params_up"].isdecimal() for row in results} == {True}
    assert "clients" not in results[0]


def test_a_run_of_a_sweep_is_that_run_alone(swept, folder):
    result = hpcfed.run(
        folder / "recipe.yaml",
        ["local.lr=0.1", "algorithm.server_lr=2", "seed=1", f"output={folder / 'alone'}"],
        quiet=True,
    )
    run = swept / "runs" / "local.lr=0.1,algorithm.server_lr=2" / "seed-1"
    assert (run / "model.safetensors").read_bytes() == (result.folder / "model.safetensors").read_bytes()


@pytest.mark.soak
def test_seeds_are_paired(folder, command):
    """All configurations see the same cohorts and, with one step, the same first batches; another seed sees others."""
    write_recipe(folder, rounds=3, cohort={"size": 2}, local={"steps": 1, "batch_size": 5, "lr": 0.1})
    methods = "algorithm={name: fedavg},{name: fedexp, eps: 1e-3},{name: scaffold}"
    done = command(["sweep", "recipe.yaml", "-g", methods, "-g", "local.lr=0.01,0.3", "--seeds", "2", "-q"], folder)
    assert done.returncode == 0, done.stderr
    cohorts: dict[str, set[str]] = {}
    losses: dict[str, set[float]] = {}
    for row in read_table(folder / "run-sweep" / "results.csv"):
        lines = (folder / "run-sweep" / row["folder"] / "metrics.jsonl").read_text().splitlines()
        record = [json.loads(line) for line in lines]
        cohorts.setdefault(row["seed"], set()).add(str([entry["cohort"] for entry in record]))
        losses.setdefault(row["seed"], set()).add(record[0]["local_loss"])
    assert [len(found) for found in (*cohorts.values(), *losses.values())] == [1, 1, 1, 1]
    assert cohorts["0"] != cohorts["1"]
    assert losses["0"] != losses["1"]


def test_failures_are_isolated_and_may_be_tried_again(folder, command):
    (folder / "picky.py").write_text(PICKY)
    (folder / "monday").touch()
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "weight_decay": 0.1}
    write_recipe(folder, model={"factory": "picky:Linear"}, local=local)
    grids = ("-g", "model.args={},{mood: absent},{mood: bad}", "-g", "algorithm.server_lr=1,1e15")
    done = command(["sweep", "recipe.yaml", *grids], folder)
    sweep = folder / "run-sweep"
    assert done.returncode == 2
    line = own_line(done.stderr)
    assert "4 of 6 runs have no result; the first was refused" in line
    assert "no such mood" in line
    assert endings(sweep) == {"finished": 1, "diverged": 1, "refused": 4}
    assert "RuntimeError: bad mood" in read_table(sweep / "results.csv")[-1]["message"]
    assert command(["sweep", "recipe.yaml", *grids], folder).returncode == 2
    assert sum(endings(sweep).values()) == 6  # none was tried again

    (folder / "monday").unlink()
    fixed = command(["sweep", "recipe.yaml", *grids, "--retry"], folder)
    assert fixed.returncode == 0, fixed.stderr
    assert endings(sweep) == {"finished": 3, "diverged": 3, "refused": 4, "again": 4}


def test_a_run_whose_ranks_differ_fails_and_the_next_begins(tmp_path, monkeypatch):
    write_small(tmp_path)
    plan = make_plan(write_recipe(tmp_path, rounds=1), [], [], [0, 1], tmp_path / "sweep")
    first = plan.units[0].recipe.output

    def diverging(recipe: Recipe, *rest: Any) -> Iterator[Round]:
        if recipe.output == first:
            raise ranks_differ(1, "rank 1 on node2")
        return training(recipe, *rest)

    monkeypatch.setattr("hpcfed.loop.training", diverging)
    assert run_sweep(plan, World(), quiet=True) is False
    assert endings(plan.folder) == {"failed": 1, "finished": 1}


def test_more_values_rounds_and_seeds_may_be_added(swept, folder, command):
    more = command([*SWEEP[:-4], "--grid", "algorithm.server_lr=1,2,3", "--seeds", "3", "--quiet"], folder)
    assert more.returncode == 0, more.stderr
    assert endings(swept) == {"finished": 18}
    longer = command([*SWEEP, "--quiet", "rounds=4"], folder)
    assert longer.returncode == 0, longer.stderr
    assert endings(swept) == {"finished": 26}
    assert {row["rounds"] for row in read_table(swept / "results.csv")} == {"4"}
    assert all(len(claims) <= 2 for claims in read_claims(swept).values())


@pytest.mark.soak
def test_seeds_may_be_added_to_a_sweep_of_one(folder, command):
    """Its run is not trained again, and a report shows all of them."""
    sweep = ["sweep", "recipe.yaml", "--grid", "local.lr=0.1,0.3", "-q"]
    assert command(sweep, folder).returncode == 0
    runs = folder / "run-sweep" / "runs"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    for seeds in "13":
        done = command([*sweep, "--seeds", seeds], folder)
        assert done.returncode == 0, done.stderr
    assert len(list(runs.rglob("model.safetensors"))) == 6
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert sorted(path.name for path in run_folders(folder / "run-sweep")) == sorted(
        ["local.lr=0.1", "local.lr=0.3", *["seed-1", "seed-2"] * 2]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "local.lrr=0.1,0.2"], "--grid local.lrr, value 0.1: recipe.yaml: unknown key 'local.lrr'; did"),
        (["--grid", "algorithm.epss=1,2"], "--grid algorithm.epss, value 1: recipe.yaml: unknown key 'algorithm.epss'"),
        (["--grid", "local.lr=0.1,-1"], "--grid local.lr, value -1: recipe.yaml: local.lr: expected greater than 0"),
        (["--grid", "local.steps=1,2", "--grid", "local.epochs=1"], "--grid local.epochs, value 1: recipe.yaml: "),
        (["--grid", "local.lr=0.1,0.2", "rounds=x"], "recipe.yaml: rounds: expected a valid integer, got 'x'"),
        (["--groups", "2"], "groups: expected 1 to 1, the number of ranks, got 2"),
        (["--select", "test_loss:last9"], "--select test_loss:last9: a rule: expected the last 1 to 2 rounds, got 9"),
        (["stop={max_hours: 1}"], "stop.max_hours: expected no such limit in a sweep"),
        (["--time", "10"], "an array of jobs: expected --array and --time, got --time"),
        (["-o", "elsewhere"], "an array of jobs: expected --array and --time, got -o/--option"),
        (["--output", "."], "the folder holds files that are not a sweep's"),
        (["--output", "recipe.yaml"], "the folder cannot be used"),
        (["--grid", "local.lr"], "--grid local.lr: a grid: expected section.key=values"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_before_anything_starts(folder, command, arguments, message):
    before = sorted(folder.rglob("*"))
    done = command(["sweep", "recipe.yaml", *arguments], folder)
    assert done.returncode == 2
    line = own_line(done.stderr)
    assert message in line
    assert "torch" not in line
    assert sorted(path for path in folder.rglob("*") if "run-sweep" not in path.parts) == before
    assert not (folder / "run-sweep" / "runs").exists()


def test_another_recipes_sweep_is_refused(swept, folder, command):
    done = command([*SWEEP, "local.batch_size=7"], folder)
    assert done.returncode == 2
    assert "output holds another recipe's run" in done.stderr
    assert "local.batch_size 10 there and 7 here" in done.stderr


@pytest.mark.parametrize(
    ("grids", "expected"),
    [
        (["--grid", "local.batch_size=5,10"], "algorithm.server_lr, local.lr, got local.batch_size; "),
        (["--grid", "local.lr=0.1,0.01", "--fresh"], "algorithm.server_lr, local.lr, got local.lr; "),
        ([], "algorithm.server_lr, local.lr, got none; "),
    ],
)
def test_other_keys_are_refused_where_a_sweep_is(swept, folder, command, grids, expected):
    before = {path: path.read_bytes() for path in swept.rglob("*") if path.is_file()}
    done = command(["sweep", "recipe.yaml", *grids], folder)
    assert done.returncode == 2
    assert f"run-sweep: the keys of the folder's sweep: expected {expected}" in own_line(done.stderr)
    assert {path: path.read_bytes() for path in swept.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("copied", "output holds another recipe's run: got seed.batches 1 there and 0 here, "),
        ("longer", "output holds another recipe's run: got rounds 3 there and 2 here; remove it to train the "),
        ("edited", "is not the file that the run's certificate names; restore it, or remove the run's folder to "),
    ],
)
def test_a_folder_with_another_run_than_its_cells_is_refused_or_trained_anew(swept, folder, command, change, message):
    cell, other = sorted(path.parent for path in (swept / "runs").rglob("result.json"))[:2]
    assert command([*SWEEP, "--quiet"], folder).returncode == 0
    summary = (swept / "summary.csv").read_text()
    if change == "copied":
        shutil.rmtree(cell)
        shutil.copytree(other, cell)
    elif change == "edited":
        shutil.copy(other / "metrics.jsonl", cell)
    else:
        hpcfed.run(cell / "recipe.yaml", ["rounds=3", f"output={cell}"], quiet=True)
    done = command([*SWEEP, "--quiet"], folder)
    assert done.returncode == 2
    assert f"{cell / 'metrics.jsonl' if change == 'edited' else cell}: {message}" in own_line(done.stderr)
    assert (swept / "summary.csv").read_text() == summary
    anew = command([*SWEEP, "--quiet", "--fresh"], folder)
    assert anew.returncode == 0, anew.stderr
    assert endings(swept) == {"finished": 9, "again": 1}
    assert (swept / "summary.csv").read_text() == summary


def test_a_finished_run_whose_record_was_cut_is_refused_and_one_that_was_removed_trained_again(swept, folder, command):
    cut, removed, without_result = sorted(path.parent for path in (swept / "runs").rglob("result.json"))[:3]
    record = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(record.splitlines(keepends=True)[0])
    done = command([*SWEEP, "--quiet"], folder)
    assert done.returncode == 2
    expected = f"{cut}/metrics.jsonl: the record of this finished run was removed or changed: expected 2 rounds, got 1"
    assert expected in own_line(done.stderr)
    (cut / "metrics.jsonl").write_text(record)
    shutil.rmtree(removed)
    (without_result / "result.json").unlink()
    again = command([*SWEEP, "--quiet"], folder)
    assert again.returncode == 0, again.stderr
    assert "recipe: trained again, since the results were removed: " in again.stderr
    assert endings(swept) == {"finished": 10, "again": 2}
    for path in (removed, without_result):
        assert len((path / "metrics.jsonl").read_text().splitlines()) == 2
