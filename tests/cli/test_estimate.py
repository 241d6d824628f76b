"""``hpcfed estimate``: its estimates agree with real runs, and it leaves no files."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest
from click.testing import CliRunner, Result

import hpcfed
from hpcfed.cli.estimate import command
from hpcfed.cli.verify import command as verify
from hpcfed.cli.watch import command as watch
from hpcfed.cluster.estimate import _mask_seconds
from hpcfed.errors import InputError
from hpcfed.reduce.masks import Masks
from tests.launch import launch
from tests.mpi.recipes import write_recipe

NUM_CLIENTS = 5
PARAMETERS = 12 * 8 + 16 + 8 * 4 + 16
"""Of the small recipe's model: a bias takes up 64 bytes, 16 numbers."""

NOT_FINITE = ("nan", "inf")


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def call(*arguments: str) -> Result:
    before = sorted(Path().iterdir())
    done = CliRunner().invoke(command, ["recipe.yaml", *arguments])
    if done.exception is not None:
        raise done.exception
    assert sorted(Path().iterdir()) == before
    return done


def estimated(*arguments: str) -> dict:
    return json.loads(call("--json", *arguments).output)


@pytest.mark.parametrize(
    "changes",
    [
        ["updates=[{clip: {norm: 1.0, scales: {}}}]", "secure_aggregation={dropout: 0.3, survivors: 4}"],
        ["means=[{krum: {attackers: 1}}]"],
    ],
    ids=["masked", "krum"],
)
def test_rounds_that_few_clients_cannot_hold_are_measured(changes) -> None:
    """What needs more clients than a measurement trains otherwise."""
    told = estimated(*changes)
    assert min(told["measured"]["sample_seconds"], told["reduced_bytes"]) > 0


def test_personal_models_are_counted() -> None:
    common = estimated("algorithm=fedavg")["models_bytes"]
    assert estimated("algorithm={name: ditto, mu: 0.1}")["models_bytes"] == common * (1 + NUM_CLIENTS)
    assert estimated("evaluate.model=last-two")["models_bytes"] == 2 * common  # the last one is kept beside it


@pytest.mark.parametrize(("tile", "trained", "slots"), [(1, 2, 3), (2, 2, 4), (5, 5, 5)])
def test_time_is_the_measured_parts_put_together(tile: int, trained: int, slots: int) -> None:
    """A tile takes the same time however many of its slots have a client: as many are trained as it has."""
    options = "--ranks", "2", "--allreduce", "2"
    told = estimated(*options, "rounds=1000", "threads=2", "evaluate.every=10", f"local.tile={tile}")
    measured = told["measured"]
    assert measured["clients"] in [trained * rounds for rounds in range(1, 7)]
    assert min(measured["sample_seconds"], measured["server_seconds"], measured["evaluate_seconds"]) > 0
    reduced = told["reduced_bytes"]
    assert reduced == PARAMETERS * 8
    work = told["round_seconds"] - measured["server_seconds"] - reduced / 2e9
    assert work / measured["sample_seconds"] == pytest.approx(slots * 4 * 10)  # steps × batch, of the slower rank
    assert told["imbalance"] == pytest.approx(3 / (NUM_CLIENTS / 2))
    seconds = 1000 * told["round_seconds"] + 100 * measured["evaluate_seconds"] / 2
    assert told["hours"] == pytest.approx(seconds / 3600)
    assert told["core_hours"] == pytest.approx(told["hours"] * 2 * 2)
    assert told["rounds_per_second"] == pytest.approx(1000 / seconds)
    assert told["gpu_hours"] == 0


def test_no_rank_has_less_than_one_client() -> None:
    """More ranks than clients help nobody: the slowest still trains one."""
    told = estimated("--ranks", "20")
    assert told["imbalance"] == pytest.approx(4)
    assert told["idle"] == "cohorts of 5 for 20 ranks: at least 15 ranks wait in each round"


def test_gpus_that_are_not_here_are_not_said_to_cost_nothing() -> None:
    assert estimated("--gpus", "64", "device=cpu")["gpu_hours"] is None
    (line,) = [line for line in call("--gpus", "64", "device=cpu").output.splitlines() if line.startswith("GPU-hours")]
    assert "unknown" in line
    assert "not measured on a GPU: none is here" in line


def test_seeds_take_a_run_each() -> None:
    told = estimated("seeds=[1, 2, 3]")
    measured = told["measured"]
    assert told["seeds"] == 3
    assert told["rounds_per_second"] == pytest.approx(9 / (3600 * told["hours"]))
    assert 3600 * told["evaluation_hours"] == pytest.approx(9 * measured["evaluate_seconds"])
    assert told["hours"] - told["evaluation_hours"] == pytest.approx(9 * told["round_seconds"] / 3600)
    assert told["models_bytes"] == 3 * estimated()["models_bytes"]
    work = NUM_CLIENTS * 4 * 10 * measured["sample_seconds"]  # one rank has no Allreduce
    assert told["round_seconds"] == pytest.approx(work + measured["server_seconds"], rel=1e-9)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8)])
def test_ranks_share_the_samples_and_the_states(dtype: str, size: int) -> None:
    told = estimated("--ranks", "2", f"dtype={dtype}", "algorithm={name: scaffold}")
    with h5py.File("small.h5") as file:
        samples = len(file["train/y"]) + len(file["test/y"])
    shared = samples * (12 * size + 8) + told["state_bytes"]  # features, and a label
    assert told["host_bytes_per_rank"] - told["measured"]["host_bytes"] == shared // 2


def test_pairs_of_masks_are_those_of_clients_on_other_ranks_and_of_lost_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfed.cluster.estimate.seconds_of", lambda deed: 1.0)  # for the words of a pair
    pairs = {ranks: _mask_seconds(Masks(lambda name: 1.0, 0.2, 2, 0), 10, 99, ranks) for ranks in (1, 2)}
    assert pairs == {1: pytest.approx(8 * 2), 2: pytest.approx(4 * 6 + 8 * 2)}


@pytest.mark.parametrize(
    "options", [("--ranks", "10" * 6), ("--gpus", "10" * 6), *(("--allreduce", x) for x in NOT_FINITE)]
)
def test_numbers_out_of_bounds_are_refused(options: tuple[str, str]) -> None:
    assert CliRunner().invoke(command, ["recipe.yaml", *options]).exit_code == 2


@pytest.mark.parametrize("text", NOT_FINITE)
def test_verify_and_watch_take_finite_numbers_alone(text: str) -> None:
    for other, option in ((verify, "--tolerance"), (watch, "--every")):
        done = CliRunner().invoke(other, [".", option, text])
        assert (done.exit_code, "is not a finite number" in done.output) == (2, True)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_checkpoint_is_no_larger(folder: Path, name: str) -> None:
    write_recipe(folder, algorithm={"name": name}, checkpoint={"every": 1, "keep": 1})
    told = estimated()
    assert told["state_bytes"] == (NUM_CLIENTS * PARAMETERS * 4 if name == "scaffold" else 0)
    assert told["checkpoints_bytes"] == 2 * told["checkpoint_bytes"]
    hpcfed.run("recipe.yaml", quiet=True)
    files = list((folder / "run" / "checkpoints").glob("round-*3.*"))
    left = sum(path.stat().st_size for path in files if path.suffix != ".json")
    headers = 1024  # of the format, beside the numbers
    assert 0.5 * told["checkpoint_bytes"] < left <= told["checkpoint_bytes"] + headers


def test_evenly_spaced_checkpoints_are_counted(folder: Path) -> None:
    write_recipe(folder, rounds=50)
    told = estimated()
    assert told["num_checkpoints"] == 2 + 20
    assert told["checkpoints_bytes"] == 23 * told["checkpoint_bytes"]


def test_clients_that_are_evaluated_take_time_and_disk(folder: Path) -> None:
    evaluate = {
        "every": 1,
        "clients": {"every": 2, "models": ["global", "fine-tuned"], "fine_tune": {"steps": 3, "lr": 0.1}},
    }
    write_recipe(folder, rounds=40, evaluate=evaluate)
    told, without = estimated(), estimated("evaluate.clients.every=0")
    assert told["evaluation_hours"] > 1.5 * without["evaluation_hours"] > 0
    rare = estimated("--ranks", "2", "evaluate.every=3", "evaluate.train.every=4", "evaluate.clients.every=7")
    measured = rare["measured"]
    with h5py.File("small.h5") as file:
        forward = measured["evaluate_seconds"] / len(file["test/y"]) * len(file["train/y"])
    tuned = NUM_CLIENTS * 3 * 10 * measured["sample_seconds"]
    seconds = 14 * measured["evaluate_seconds"] + 10 * forward + 6 * (2 * forward + tuned)  # of 40 rounds
    assert 3600 * rare["evaluation_hours"] == pytest.approx(seconds / 2)
    hpcfed.run("recipe.yaml", quiet=True)
    written = sum((folder / "run" / name).stat().st_size for name in ("metrics.jsonl", "clients.csv"))
    assert 0.5 < told["record_bytes"] / written < 2
    assert without["record_bytes"] < told["record_bytes"]
    assert estimated("seeds=[1, 2]")["record_bytes"] == 2 * told["record_bytes"]


def test_each_line_of_the_table_says_where_it_is_from() -> None:
    lines = call("--ranks", "2", "rounds=100000").output.splitlines()
    assert all(any(word in line for word in ("measured", "computed", "trained")) for line in lines)
    (allreduce,) = [line for line in lines if line.startswith("Allreduce")]
    assert "assumed (--allreduce)" in allreduce


def test_a_recipe_that_diverges_is_reported(folder: Path) -> None:
    with pytest.raises(InputError, match="the recipe diverges at once"):
        call("local.lr=1.0e15", "rounds=2")


@pytest.mark.soak
def test_under_a_launcher_it_answers_once(folder: Path) -> None:
    done = launch(2, ["estimate", "recipe.yaml", "--json"], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1  # of --ranks, whatever measures
