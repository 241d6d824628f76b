"""Leave-one-out and Shapley values of clients, against models trained on every subset by hand."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.collections import LineCollection
from safetensors.torch import save_file

import hpcfed
from hpcfed.cli.contributions import command
from hpcfed.errors import InputError
from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.sweep.claims import Claims, RunState
from hpcfed.lab.sweep.run import Redo
from hpcfed.lab.sweep.run import prepare as prepare_sweep
from hpcfed.lab.whatif.coalitions import Contributions, _chosen, plan_coalitions, run_coalitions
from hpcfed.lab.whatif.figure import figure_of
from hpcfed.lab.whatif.shapley import added_in, all_subsets, estimates, random_orders, shapley
from hpcfed.lab.whatif.values import NONE, CoalitionValues, Contribution, contributed, table, write_contributions
from hpcfed.ranks.world import World
from tests.federations import Arrays, write_federation
from tests.mpi.recipes import small

pytestmark = pytest.mark.one_mpi
ROUNDS, STEPS, LR = 4, 2, 0.1


def problem(num_clients: int) -> tuple[list[Arrays], Arrays]:
    """Least squares of clients whose targets differ, and a test set with a part of each client."""
    rng = np.random.default_rng(5)
    clients = []
    for k in range(num_clients):
        x = rng.normal(size=(8, 3))
        clients.append((x, x @ rng.normal([[1.0], [-1.0], [0.2 * k]], 0.3)))
    test = rng.normal(size=(4 * num_clients, 3))
    return clients, (test, test @ np.array([[1.0], [-1.0], [0.3]]))


def prepare(folder: Path, num_clients: int) -> dict[str, Any]:
    """Write the problem, and return the recipe of FedAvg on it, from w⁰ = 0."""
    clients, test = problem(num_clients)
    path = write_federation(folder / "sites.h5", clients, test=test, content="sites")
    with h5py.File(path, "a") as file:
        file["test/offsets"] = np.arange(num_clients + 1) * 4
        file["train/client"] = np.array([f"site-{k}".encode() for k in range(num_clients)])
    save_file({"weight": torch.zeros(1, 3, dtype=torch.float64)}, folder / "zero.safetensors")
    return small(
        "run", data="sites.h5", rounds=ROUNDS, dtype="float64", weights="uniform",
        model={"name": "linear", "bias": False, "init": "zero.safetensors"},
        local={"steps": STEPS, "batch_size": "full", "lr": LR},
    )  # fmt: skip


def by_hand(num_clients: int, members: Sequence[int]) -> tuple[float, np.ndarray]:
    """The loss on the test set, and on each client's, of FedAvg on some clients."""
    clients, (x, target) = problem(num_clients)
    w = np.zeros((3, 1))
    for _ in range(ROUNDS if members else 0):
        ends = []
        for own, y in (clients[k] for k in members):
            v = w.copy()
            for _ in range(STEPS):
                v -= LR * own.T @ (own @ v - y) / len(own)
            ends.append(v)
        w = np.mean(ends, axis=0)
    losses = 0.5 * (x @ w - target)[:, 0] ** 2
    return losses.mean(), losses.reshape(num_clients, 4).mean(axis=1)


def mean_gain(num_clients: int, values: Mapping[frozenset[int], float]) -> np.ndarray:
    """What each client lowers the loss by, over all orders of the clients."""
    gains = np.zeros(num_clients)
    orders = list(itertools.permutations(range(num_clients)))
    for order in orders:
        for place, k in enumerate(order):
            gains[k] += values[frozenset(order[:place])] - values[frozenset(order[: place + 1])]
    return gains / len(orders)


def compute(**options: Any) -> CoalitionValues:
    """The contributions to ``run/``, on one rank."""
    coalitions = plan_coalitions(Contributions(Path("run"), **options))
    assert run_coalitions(coalitions, World(), None, quiet=True, redo=Redo()) is False
    return contributed(coalitions)


@pytest.mark.parametrize("num_clients", [3, pytest.param(6, marks=pytest.mark.soak)])
def test_shapley_values_are_those_of_all_subsets_by_hand(num_clients, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hpcfed.run(prepare(tmp_path, num_clients), quiet=True)
    found = compute()
    hand = {subset: by_hand(num_clients, sorted(subset))[0] for subset in all_subsets(num_clients)}
    assert len(found.values[0]) == len(hand) == 2**num_clients
    assert {s: pytest.approx(v, rel=1e-12) for s, v in hand.items()} == found.values[0]
    gains = mean_gain(num_clients, hand)
    assert [one.shapley.mean for one in found.clients] == pytest.approx(gains, rel=1e-9)
    assert gains.sum() == pytest.approx(hand[frozenset()] - hand[frozenset(range(num_clients))])
    every = list(range(num_clients))
    of_all, on_each = by_hand(num_clients, every)
    for k, one in enumerate(found.clients):
        others = [j for j in every if j != k]
        without, on_each_without = by_hand(num_clients, others)
        assert one.name == f"site-{k}"
        assert one.left_out.mean == pytest.approx(without - of_all, rel=1e-9)
        assert one.takes.mean == pytest.approx(on_each_without[k] - on_each[k], rel=1e-9)
        assert one.alone == pytest.approx(by_hand(num_clients, [k])[1][k], rel=1e-9)
    check_files(found, tmp_path / "run-contributions")


@pytest.mark.soak
def test_the_job_that_ends_last_writes_the_contributions(tmp_path, monkeypatch):
    """Without all values some of the contributions would be missing."""
    monkeypatch.chdir(tmp_path)
    hpcfed.run(prepare(tmp_path, 3), quiet=True)
    plan = plan_coalitions(Contributions(Path("run"))).plan
    held, other = plan.units[2], Claims(plan.folder, "other")
    prepare_sweep(plan, other, Redo())
    number = other.take(held.name, held.digest, RunState())
    done = CliRunner().invoke(command, ["run", "--quiet"], catch_exceptions=False)
    assert done.output == "1 of 7 runs still going on in other jobs: the last of them writes the contributions\n"
    assert not (tmp_path / "run-contributions" / "contributions.html").exists()
    other.end(held.name, number, "stopped")
    done = CliRunner().invoke(command, ["run", "--quiet"], catch_exceptions=False)
    assert "site-2" in done.output
    assert (tmp_path / "run-contributions" / "contributions.html").exists()


def check_files(found: CoalitionValues, folder: Path) -> None:
    """The tables have the values, and the page the table."""
    page = write_contributions(found)
    assert page == folder / "contributions.html"
    text = page.read_text(encoding="utf-8")
    head, rows = table(found)
    assert "Shapley value in test loss, a gain where positive" in text
    assert all(f">{cell}<" in text for cell in (*head, *(cell for row in rows for cell in row)))
    with (folder / "contributions.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(row["shapley"]) for row in written] == [one.shapley.mean for one in found.clients]
    with (folder / "values.csv").open(newline="") as file:
        values = {row["subset"]: float(row["test_loss"]) for row in csv.DictReader(file)}
    assert len(values) == len(found.values[0])
    assert values["none"] == found.values[0][frozenset()]
    assert (folder / "figures" / "contributions.png").stat().st_size > 1000


def test_whiskers_are_of_the_bars():
    """Bars lie on their side, and so do their intervals: mean ± half width, each in its row."""
    given = [("a", MeanEstimate(2.0, 0.5, 5)), ("b", MeanEstimate(1.0, 3.0, 5))]
    clients = [Contribution(k, name, 9, NONE, value, *[math.nan] * 4) for k, (name, value) in enumerate(given)]
    bars = figure_of(clients, "test_auroc", "5 seeds", has_shapley=True).axes[0].collections
    (whiskers,) = [bar for bar in bars if isinstance(bar, LineCollection)]
    assert [line.tolist() for line in whiskers.get_segments()] == [[[1.5, 0], [2.5, 0]], [[-2, 1], [4, 1]]]


def test_long_names_leave_room_for_bars_and_a_value_that_is_missing_is_a_dash():
    given = [("hospital " * 30, MeanEstimate(2.0, 0.5, 5)), ("b", MeanEstimate(math.nan, math.nan, 5))]
    clients = [Contribution(k, name, 9, NONE, value, *[math.nan] * 4) for k, (name, value) in enumerate(given)]
    (axes,) = figure_of(clients, "test_auroc", "5 seeds", has_shapley=True).axes
    axes.figure.canvas.draw()
    assert axes.get_position().width > 0.5
    assert [text.get_text().strip() for text in axes.texts] == ["–"]


def test_a_larger_score_is_a_gain_and_seeds_are_averaged(tmp_path, monkeypatch):
    """R² of two seeds, whose minibatches differ; sampled orders are of the mean over seeds."""
    monkeypatch.chdir(tmp_path)
    hpcfed.run(prepare(tmp_path, 2), ["rounds=1", "evaluate.metrics=[r2]", "local.batch_size=2"], quiet=True)
    found = compute(metric="test_r2", permutations=1, seeds=[0, 1])
    every, orders = frozenset({0, 1}), random_orders(2, 1)
    mean = {subset: np.mean([own[subset] for own in found.values]) for subset in all_subsets(2)}
    for k, one in enumerate(found.clients):
        apart = [own[every] - own[every - {k}] for own in found.values]
        assert apart[0] != apart[1]
        assert one.left_out.mean == pytest.approx(np.mean(apart), rel=1e-9)
        assert one.left_out.half_width == pytest.approx(12.7062 * abs(apart[0] - apart[1]) / 2, rel=1e-4)
        assert one.shapley.mean == pytest.approx(added_in(orders, mean)[0, k], rel=1e-9)
        assert one.takes.mean == pytest.approx(one.with_all - one.without, rel=1e-9)


@pytest.mark.soak
def test_sampled_orders_share_runs_and_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hpcfed.run(prepare(tmp_path, 3), ["cohort=2", "checkpoint.every=1", "checkpoint.keep=9"], quiet=True)
    left_out = compute(permutations=0)
    assert {len(subset) for subset in left_out.values[0]} == {0, 2, 3}
    assert all(np.isnan(one.shapley.mean) for one in left_out.clients)
    ended = {path: path.stat().st_mtime_ns for path in Path("run-contributions/runs").glob("*/model.safetensors")}
    assert len(ended) == 4
    found = compute(permutations=2)
    assert all(path.stat().st_mtime_ns == time for path, time in ended.items())
    added = -added_in(random_orders(3, 2), found.values[0])
    assert [one.shapley.mean for one in found.clients] == pytest.approx(added.mean(axis=0))
    assert any("2 random orders" in note for note in found.notes)
    first = {order[0] for order in random_orders(3, 2)}
    others = ", ".join(one.name for k, one in enumerate(found.clients) if k not in first)
    assert f"own: alone was not computed for {others}: no random order begins with them" in found.notes
    page = write_contributions(found).read_text(encoding="utf-8")
    assert "whiskers: 95 % interval over 2 random orders" in page
    every = frozenset(range(3))
    run = found.coalitions.unit_of[every, "0"].recipe.output
    assert (run / "model.safetensors").read_bytes() == Path("run/model.safetensors").read_bytes()
    note = next(note for note in found.notes if "rounds computed" in note)
    runs = len(found.values[0]) - 1
    computed = int(note.split("computed: ")[1].split(" ")[0])
    assert computed < runs * ROUNDS  # the recorded run has some of them


def test_rounding_is_no_contribution(tmp_path, monkeypatch):
    """The same AUROC, added up in another order, differs by its last bit."""
    samples = np.array([[0.0, 0.25, 0.0], [1.1e-16, 0.25 + 1.1e-16, 1e-9]])
    none, same, small = estimates(samples, [0.35, np.nan, 0.73125])
    assert (none.mean, same.mean) == (0.0, pytest.approx(0.25))
    assert (none.half_width, same.half_width) == (None, None)
    assert (small.mean, small.half_width) == pytest.approx((5e-10, 12.7062 * 5e-10), rel=1e-4)
    monkeypatch.chdir(tmp_path)
    hpcfed.run(prepare(tmp_path, 3), ["rounds=1", "local.lr=1.0e-30"], quiet=True)
    _, rows = table(compute(permutations=0))
    assert [(row[2], row[5]) for row in rows] == [("0", "0")] * 3


def test_values_of_a_game_with_gloves():
    """Two clients have a left glove, one a right one; a pair is worth 1."""
    values = {subset: float(2 in subset and len(subset) > 1) for subset in all_subsets(3)}
    assert shapley(values, 3) == pytest.approx([1 / 6, 1 / 6, 2 / 3])
    orders = [list(order) for order in itertools.permutations(range(3))]
    assert added_in(orders, values).mean(axis=0) == pytest.approx([1 / 6, 1 / 6, 2 / 3])


@pytest.mark.parametrize(
    ("num_clients", "changes", "options", "expected"),
    [
        (7, [], {}, r"7 clients have 2\^7 subsets: expected at most 6 .* --permutations 0"),
        (2, [], {"metric": "train_loss"}, "--metric train_loss: train_loss is not recorded"),
        (2, ["evaluate.train.every=1"], {"metric": "train_loss"}, "--metric: expected a score on the test set"),
        (2, [], {"metric": "test_auroc"}, "--metric test_auroc: no column 'test_auroc'"),
        (2, ["cohort.without=site-0"], {}, "a run without some clients"),
        (2, ["cohort=2"], {"cohorts": "redrawn"}, "--grid cohort.without, value 1: .*cohort.size"),
        (1, [], {}, "contributions: expected two clients or more, got one"),
    ],
    ids=str,
)
def test_what_cannot_be_valued_is_refused(num_clients, changes, options, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hpcfed.run(prepare(tmp_path, num_clients), ["rounds=1", *changes], quiet=True)
    with pytest.raises(InputError, match=expected):
        plan_coalitions(Contributions(Path("run"), **options))


@pytest.mark.parametrize("permutations", [0, 1, None])
def test_more_subsets_than_memory_holds_are_refused(permutations):
    with pytest.raises(InputError, match="contributions of 100,000 clients: expected at most 20,000,000 members"):
        _chosen(100_000, permutations)


@pytest.mark.soak
def test_skipped_updates_and_untrained_private_parts_are_reported(tmp_path, monkeypatch):
    """A client whose updates were all left out brings nothing, whatever its data."""
    monkeypatch.chdir(tmp_path)
    recipe = {**prepare(tmp_path, 3), "rounds": 1, "on_bad_client": "skip", "parameters": {"private": ["*bias"]}}
    recipe["model"] = {"name": "linear"}
    with h5py.File(tmp_path / "sites.h5", "a") as file:
        file["train/x"][-8:] = 1e200
    hpcfed.run(recipe, quiet=True)
    found = compute()
    assert found.clients[2].left_out.mean == 0
    assert found.notes[-3:] == [
        "1 run diverged: values that depend on it are empty",
        "updates were left out (on_bad_client: skip): site-2 in 3 runs",
        "clients outside S are measured with the private part of the initial model",
    ]


def test_a_diverged_run_has_no_score_on_a_clients_own_test_set(tmp_path, monkeypatch):
    """Without site-0 nobody is left in round 2; its own test set was measured after round 1."""
    monkeypatch.chdir(tmp_path)
    recipe = {**prepare(tmp_path, 3), "rounds": 2, "on_bad_client": "skip", "cohort": {"schedule": [[0, 1], [0, 2]]}}
    recipe["evaluate"] = {"clients": {"every": 1}}
    with h5py.File(tmp_path / "sites.h5", "a") as file:
        file["train/x"][-8:] = 1e200
    hpcfed.run(recipe, quiet=True)
    first, second, _ = compute(permutations=0).clients
    assert np.isnan([first.left_out.mean, first.without, first.takes.mean]).all()
    assert np.isfinite([first.with_all, second.without, second.takes.mean]).all()
