"""``on_bad_client: skip``: a round goes on without the clients whose training failed, on every rank alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

import hpcfed
from hpcfed.errors import Diverged, InputError
from hpcfed.local_round import _apart_from
from hpcfed.ranks.world import World
from hpcfed.types import State
from tests.federations import write_federation
from tests.mpi.recipes import METHODS, ORDERED, small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi

NUM_CLIENTS, ROUNDS, BAD_ROUND = 5, 5, 3
MOODY = '''
from collections import Counter

import torch


class Linear(torch.nn.Linear):
    """Does `deed` when it trains a client of `whose` for the 3rd time; the first feature says whose samples they are.

    Sees each client once a round, with a full batch and one step."""

    def __init__(self, deed, whose):
        super().__init__(12, 4)
        self.deed, self.whose, self.visits = deed, whose, Counter()

    def forward(self, x):
        client = int(x[0, 0]) if self.training and len(x) > 1 else -1
        self.visits[client] += 1
        if client not in self.whose or self.visits[client] != 3:
            return super().forward(x)
        if self.deed == "raise":
            raise RuntimeError("broken sensor")
        return super().forward(x) * {"nan": float("nan"), "overflow": 1e300}[self.deed]


class Normed(Linear):
    """With buffers that follow the samples."""

    def __init__(self, deed, whose):
        super().__init__(deed, whose)
        self.norm = torch.nn.BatchNorm1d(12)
        self.norm.num_batches_tracked -= 1_000  # below the 0 in the place of a client that is left out

    def forward(self, x):
        return super().forward(x) + self.norm(x)[:, :4]
'''

SEEING = """
import numpy as np

from hpcfed import ClientRule, ServerRule
from hpcfed.types import Method, ServerUpdate, Update


class Numbered(ClientRule):
    scalars = ("number",)
    weights = "uniform"

    def report(self, local, w, shared, client, context):
        return Update(local.delta, scalars={"number": float(context.client.client)})


class Seeing(ServerRule):
    client_scalars = True

    def step(self, w, state, means, context):
        out = np.isnan(means.client_scalars["number"])
        seen = {"size": means.cohort_size, "share": means.fraction, "mean": means.scalars["number"], "out": out.sum()}
        return ServerUpdate(w - means.delta, state, metrics={name: float(value) for name, value in seen.items()})


class Far(ServerRule):
    def step(self, w, state, means, context):
        return ServerUpdate(w + 1e30 ** context.round, state)  # beyond float32 in round 2


def method():
    return Method("seeing", Numbered(), Seeing())


def far():
    return Method("far", ClientRule(), Far())
"""
"""A server step that records what it sees of the cohort, and one that goes too far."""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation whose samples say whose they are, and the model that misbehaves for some of them."""

    def write() -> None:
        rng = np.random.default_rng(0)

        def marked(mark: int, count: int) -> tuple[np.ndarray, np.ndarray]:
            x = rng.normal(size=(count, 12)).astype(np.float32)
            x[:, 0] = mark
            return x, rng.integers(4, size=count).astype(np.uint8)

        clients = [marked(client, 20 + 7 * client) for client in range(NUM_CLIENTS)]
        write_federation(shared_tmp / "marked.h5", clients, num_classes=4, test=marked(0, 30))
        clients.append(marked(NUM_CLIENTS, 0))
        write_federation(shared_tmp / "one-empty.h5", clients, num_classes=4, test=marked(0, 30))
        (shared_tmp / "moody.py").write_text(MOODY)

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


@pytest.mark.thinned
def test_numbers_of_x_that_are_not_finite_are_named(folder, world):
    """Where an update is not finite, the client's samples may be the reason, not the step size."""

    def spoil() -> None:
        with h5py.File(folder / "marked.h5", "r+") as file:
            start = int(file["train/offsets"][2])
            file["train/x"][start : start + 3, 5] = [np.nan, np.inf, 1]

    world.on_root(spoil)
    local = {"steps": 9, "batch_size": "full", "lr": 0.1}
    recipe = {"data": "marked.h5", "model": {"name": "logistic"}, "rounds": 1, "local": local}
    says = r"round 1, client 2.*, rank \d: .* not finite after 9 steps; its x has .*: got 2 of 408; mend"
    with pytest.raises(Diverged, match=says):
        hpcfed.run({**recipe, "algorithm": {"name": "fedavg"}, "output": "spoilt"}, world=world, quiet=True)


def moody(deed: str, whose: list[int], **changes: Any) -> dict[str, Any]:
    """A recipe in which clients misbehave in `BAD_ROUND`."""
    base = {
        "data": "marked.h5",
        "rounds": ROUNDS,
        "model": {"factory": "moody:Linear", "args": {"deed": deed, "whose": whose}},
        "local": {"steps": 1, "batch_size": "full", "lr": 0.01},
        "on_bad_client": "skip",
        "sentinel": "off",  # the model counts how often it sees a client
        "placement": "static",
        "checkpoint": {"every": 1},
        "output": "run",
    }
    return small(**{**base, **changes})


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize(
    ("algorithm", "deed", "whose", "steps"),
    [
        ("fedavg", "raise", [1], 1),
        ("scaffold", "nan", [0, 3], 1),
        ("feddyn", "raise", [2, 4], 1),
        ("fedexp-m", "overflow", [1], 1),
        ("fednova", "nan", [4], 6),
        ({"local": "scaffold", "normalize": "steps", "tau_eff": "steps", "server": "fedexp"}, "nan", [1], 3),
    ],
)
def test_the_others_count_as_if_the_bad_ones_had_not_been_drawn(algorithm, deed, whose, steps, world, folder):
    """The means are over the others: the round of a cohort without the bad ones, but for how p_i is rounded.

    And the same on any number of ranks, to the bit. The bad ones take one step, the others `steps`."""
    if isinstance(algorithm, str):
        algorithm = {"name": algorithm, **METHODS[algorithm]}
    everyone = list(range(NUM_CLIENTS))
    cohorts = [everyone] * ROUNDS
    cohorts[BAD_ROUND - 1] = [client for client in everyone if client not in whose]

    def write() -> None:
        (folder / "cohorts.json").write_text(json.dumps(cohorts))
        for name, drawn in (("all", [everyone] * ROUNDS), ("others", cohorts)):
            budgets = [[1 if client in whose else steps for client in row] for row in drawn]
            (folder / f"{name}.json").write_text(json.dumps(budgets))

    world.on_root(write)
    given = {"algorithm": algorithm, "budget": {"schedule": "all.json"}}
    skipping = hpcfed.run(moody(deed, whose, **given), world=world, quiet=True)
    own = {"output": f"alone-{world.rank}"}
    alone = hpcfed.run(moody(deed, whose, **given, **own), world=World(), quiet=True)
    assert left_by(skipping) == left_by(alone)
    schedule = {"cohort": {"schedule": "cohorts.json"}, "output": "without", "on_bad_client": "stop"}
    given["budget"] = {"schedule": "others.json"}
    without = hpcfed.run(moody(deed, [], **given, **schedule), world=world, quiet=True)
    assert [row["skipped"] for row in skipping.metrics] == [whose if t == BAD_ROUND else [] for t in range(1, 6)]
    found, expected = (load_file(result.folder / "model.safetensors") for result in (skipping, without))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)
    for row, other in zip(skipping.metrics, without.metrics, strict=True):
        for key in ("local_loss", "test_loss", "delta_sq", "mean_delta_sq"):
            assert row[key] == pytest.approx(other[key], rel=1e-5)
        assert row["gradients"] == other["gradients"]


def test_a_server_step_sees_the_others(world, folder):
    world.on_root(lambda: (folder / "seeing.py").write_text(SEEING))
    found = hpcfed.run(moody("nan", [0, 3], algorithm={"factory": "seeing:method"}), world=world, quiet=True)
    seen = [row["method"] for row in found.metrics]
    assert seen[BAD_ROUND - 1] == pytest.approx({"size": 3, "share": 0.6, "mean": 7 / 3, "out": 2})
    assert seen[BAD_ROUND] == pytest.approx({"size": 5, "share": 1.0, "mean": 2.0, "out": 0})


def test_a_model_that_is_not_finite_ends_the_run_in_its_last_round_too(world, folder):
    world.on_root(lambda: (folder / "seeing.py").write_text(SEEING))
    local = {"steps": 1, "batch_size": 10, "lr": 1e-30}
    recipe = moody("nan", [], algorithm={"factory": "seeing:far"}, local=local, rounds=2, evaluate={"every": 0})
    with pytest.raises(Diverged, match="round 2: the server's model is not finite; lower"):
        hpcfed.run(recipe, world=world, quiet=True)
    assert not (folder / "run" / "model.safetensors").exists()


def test_averaged_buffers_are_those_of_the_others(world, folder):
    cohorts = [list(range(NUM_CLIENTS))] * ROUNDS

    def run(output: str, whose: list[int], rows: list[list[int]], where: World = world) -> hpcfed.Result:
        changes = {"model": {"factory": "moody:Normed", "args": {"deed": "nan", "whose": whose}}, "output": output}
        recipe = moody("nan", whose, parameters={"buffers": "averaged"}, cohort={"schedule": rows}, **changes)
        return hpcfed.run(recipe, world=where, quiet=True)

    skipping, alone = run("run", [1], cohorts), run(f"alone-{world.rank}", [1], cohorts, World())
    assert [row["skipped"] for row in skipping.metrics] == [[1] if t == BAD_ROUND else [] for t in range(1, 6)]
    assert left_by(skipping) == left_by(alone)
    cohorts[BAD_ROUND - 1] = [0, 2, 3, 4]
    found, expected = (load_file(one.folder / "model.safetensors") for one in (skipping, run("others", [], cohorts)))
    assert {"norm.running_mean", "norm.num_batches_tracked"} < expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)


def test_a_client_that_was_skipped_has_no_private_part_yet(world, folder):
    changes = {"local": {"steps": 3, "batch_size": "full", "lr": 0.01}, "rounds": 2, "evaluate": {"every": 0}}
    model = {"factory": "moody:Normed", "args": {"deed": "nan", "whose": [4]}}
    recipe = moody("nan", [4], model=model, parameters={"private": ["norm.*"]}, **changes)
    found = hpcfed.run(recipe, world=world, quiet=True).metrics
    assert [(row["skipped"], row["never_drawn"]) for row in found] == [([4], 1), ([], 0)]


def test_factors_that_a_skip_would_change_one_by_one_end_the_run(world, folder, capsys):
    world.on_root(lambda: (folder / "ordered.py").write_text(ORDERED))
    algorithm = {"algorithm": {"factory": "ordered:method"}}
    with pytest.raises(Diverged, match=f"round {BAD_ROUND}: without client 1 the others' updates would have other fac"):
        hpcfed.run(moody("raise", [1], **algorithm), world=world, quiet=True)
    kept = hpcfed.run(moody("raise", [4], **algorithm, output="last"), world=world)
    assert [row["skipped"] for row in kept.metrics] == [[], [], [4], [], []]
    said = "updates were left out (on_bad_client: skip), of 5 rounds: client 4 in 1\n"
    assert capsys.readouterr().out.count(said) == world.is_root


def test_what_happened_is_in_the_log_of_its_rank(world, folder):
    hpcfed.run(moody("raise", [1]), world=world, quiet=True)
    hpcfed.run(moody("nan", [1], output="other"), world=world, quiet=True)
    logs = {run: [path.read_text() for path in (folder / run / "logs").iterdir()] for run in ("run", "other")}
    assert [len(texts) for texts in logs.values()] == [1, 1]
    assert f"round {BAD_ROUND}, client 1 " in logs["run"][0]
    assert "RuntimeError: broken sensor" in logs["run"][0]
    assert f"round {BAD_ROUND}, client 1 " in logs["other"][0]
    assert "its update is not finite" in logs["other"][0]


@pytest.mark.parametrize(("deed", "data"), [("raise", "marked.h5"), ("nan", "marked.h5"), ("nan", "one-empty.h5")])
def test_a_round_in_which_all_fail_ends_the_run(deed, data, world, folder):
    """Also where a client without samples, and so without weight, is left."""
    with pytest.raises(Diverged, match=f"round {BAD_ROUND}: training failed for every client of the cohort"):
        hpcfed.run(moody(deed, list(range(NUM_CLIENTS)), data=data), world=world, quiet=True)
    ending = json.loads((folder / "run" / "result.json").read_text())
    assert (ending["status"], ending["rounds"]) == ("diverged", BAD_ROUND - 1)


REFUSING = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method


class Refusing(ClientRule):
    def tilt(self, w, shared, client, context):
        if context.client.client == 2:
            raise ValueError("not this one")
        return super().tilt(w, shared, client, context)


def method():
    return Method("refusing", Refusing(), ServerStep())
"""


def test_a_skip_in_a_cohort_without_samples_moves_nothing(world, folder):
    """Clients 1 and 2 have none, and client 2 fails."""

    def write() -> None:
        some, none = (np.zeros((count, 12), np.float32) for count in (20, 0))
        clients = [(x, np.zeros(len(x), np.uint8)) for x in (some, none, none)]
        write_federation(folder / "few.h5", clients, num_classes=4)
        (folder / "refusing.py").write_text(REFUSING)

    world.on_root(write)
    cohort = {"schedule": [[0], [1, 2], [0]]}
    recipe = small("run", data="few.h5", algorithm={"factory": "refusing:method"}, cohort=cohort, on_bad_client="skip")
    rows = hpcfed.run(recipe, world=world, quiet=True).metrics
    assert [row["skipped"] for row in rows] == [[], [2], []]
    assert [row["delta_sq"] > 0 for row in rows] == [True, False, True]


@pytest.mark.parametrize("skipping", ["stop", "skip"])
def test_a_state_that_cannot_be_kept_is_trained_again_with_its_update(skipping, world, folder, monkeypatch):
    """On each rank memory is short once, for the copy of the first client's next state."""
    world.on_root(lambda: write_small(folder, 32))  # at least two on each rank, which are trained together
    feddyn = {"name": "feddyn", "alpha": 0.1}
    recipe = small(None, model={"name": "logistic"}, algorithm=feddyn, on_bad_client=skipping, placement="static")
    undisturbed = hpcfed.run({**recipe, "output": "undisturbed"}, world=world, quiet=True)
    calls: list[int] = []

    def short(before: State, after: State) -> State:
        calls.append(len(calls))
        if calls == [0]:
            raise MemoryError
        return _apart_from(before, after)

    monkeypatch.setattr("hpcfed.local_round._apart_from", short)
    disturbed = hpcfed.run({**recipe, "output": "disturbed"}, world=world, quiet=True)
    assert len(calls) > 1
    assert left_by(disturbed) == left_by(undisturbed)


@pytest.mark.parametrize(("deed", "kind"), [("raise", InputError), ("nan", Diverged)])
def test_by_default_the_run_ends(deed, kind, world, folder):
    with pytest.raises(kind, match=f"round {BAD_ROUND}, client 1 "):
        hpcfed.run(moody(deed, [1], on_bad_client="stop"), world=world, quiet=True)
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == BAD_ROUND - 1


def test_the_checkpoint_before_is_left_and_the_same_recipe_goes_on(world, folder):
    """Each start sees the client afresh, so that it raises in that start's third round."""
    recipe = moody("raise", [1], on_bad_client="stop")
    hpcfed.run({**recipe, "rounds": 2}, world=world, quiet=True)
    with pytest.raises(InputError, match=f"round {BAD_ROUND + 2}, client 1 "):
        hpcfed.run(recipe, world=world, quiet=True)
    kept = sorted(int(path.stem[6:]) for path in (folder / "run" / "checkpoints").glob("*.json"))
    assert kept[-1] in (2, 3, 4)
    hpcfed.run({**recipe, "rounds": kept[-1] + 2}, world=world, quiet=True)
    result = hpcfed.run({**recipe, "rounds": kept[-1] + 2}, world=world, quiet=True)
    assert [row["round"] for row in result.metrics] == list(range(1, kept[-1] + 3))
