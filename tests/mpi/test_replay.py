"""`hpcfed.replay` trains one client of a recorded run again, alone, to the recorded bits, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hpcfed
from hpcfed.errors import InputError
from hpcfed.provenance.replay.show import lines, table
from tests.mpi.recipes import METHODS, ORDERED, small, write_small

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]

PRIVATE = {"steps": 6, "batch_size": 2, "lr": 0.1, "noise": {"multiplier": 0.5, "clip": 1.0}}
"""DP-SGD, with minibatches some of which are empty."""

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "batched": ("scaffold", {"local": {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "batched"}}),
    "sequential": ("scaffold", {"local": {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}}),
    "states-and-epochs": ("feddyn", {"local": {"epochs": 2, "batch_size": 16, "lr": 0.05}, "client_state": "disk"}),
    "start-elsewhere": ("fedsplit", {"dtype": "float64", "placement": "balanced"}),
    "normalised": ("fednova", {"budget": {"low": 1, "high": 7}}),
    "guess-batched": (
        "fedexp",
        {
            "local": {"steps": 5, "batch_size": 10, "lr": 0.1, "momentum": 0.6},
            "guess": 3,
            "budget": {"low": 1, "high": 5},
        },
    ),
    "guess-sequential": (
        "fedexp",
        {"local": {"steps": 5, "batch_size": 10, "lr": 0.1, "momentum": 0.6, "engine": "sequential"}, "guess": "limit"},
    ),
    "groups": (
        "fedavg",
        {
            "model": {"name": "mlp", "hidden": [7]},
            "local": {"steps": 3, "batch_size": 10, "lr": 0.1, "clip_norm": 1.0, "engine": "batched"},
        },
    ),
    "last-models": ("fedavgm", {"evaluate": {"model": "client-average", "batch_size": 64}}),
    "full-gradient": ("dsgd", {}),
    "class-weights": ("fedprox", {"loss": {"weights": [0.5, 2.0, 1.0, 4.0]}}),
    "personal": ("ditto", {}),
    "private-first": (
        "fedavg",
        {"parameters": {"private": ["2.*"], "private_first": 2}, "evaluate": {"every": 0}},
    ),
    "flipped-labels": ("fedavg", {"updates": [{"attack": {"clients": [0, 1, 2, 3, 4], "what": "labels"}}]}),
    "private-samples": ("fedavg", {"local": PRIVATE, "update_hashes": False, "evaluate": None}),
    "secret-samples": ("fedavg", {"local": PRIVATE, "update_hashes": False, "evaluate": None, "secret_seed": "secret"}),
}


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients; the working folder of all ranks."""
    world.on_root(
        lambda: write_small(shared_tmp) and (shared_tmp / "secret").write_text(bytes(range(32)).hex()) and None
    )
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def of(method: str, **changes: Any) -> dict[str, Any]:
    changes = {"algorithm": {"name": method, **METHODS[method]}, **changes}
    base = {"rounds": 6, "cohort": {"size": 3}, "checkpoint": {"every": 2, "keep": 9}, "output": "run"}
    return small(**{**base, "update_hashes": True, **changes})


SELDOM = ("normalised", "guess-sequential", "last-models", "full-gradient")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.soak] if v in SELDOM else []) for v in VARIANTS]
)
def test_a_replayed_update_is_the_recorded_one(variant, world, folder):
    """Of all clients of a round after a checkpoint on the last rank, and of one in the first round on the others."""
    method, changes = VARIANTS[variant]
    run = hpcfed.run(of(method, **changes), world=world, quiet=True)
    world.gather(None)
    round = 6 if world.rank == world.size - 1 else 1
    for client in run.metrics[round - 1]["cohort"][: 3 if round == 6 else 1]:
        found = hpcfed.replay("run", round, client)
        assert found.recorded_hash in (None, found.reported.hash)
        assert found.agrees
        assert found.start < round  # of the checkpoints that were written: a fast run outpaces them
        check_steps(found)


def check_steps(found: hpcfed.Replay) -> None:
    """The steps end where the update says, and their losses are the client's."""
    assert [step.number for step in found.steps] == list(range(1, found.reported.steps + 1))
    assert sum(step.loss for step in found.steps) == pytest.approx(found.reported.loss_sum, rel=1e-4)
    last = found.steps[-1]
    assert last.iterate is not None
    moved = torch.linalg.vector_norm(last.iterate - found.w, dtype=torch.float64)
    assert last.drift == pytest.approx(float(moved), rel=1e-12)
    if "delta" in found.reported.vectors:
        assert torch.equal(found.w - last.iterate, found.reported.vectors["delta"])
    assert all(step.gradient > 0 or not len(step.y) for step in found.steps)
    assert len(table(found).rows) == len(found.steps)


def test_a_client_that_fails_in_a_replay_is_named(world, folder, monkeypatch):
    model = {"model": {"factory": "nets:Fragile"}, "python_path": [str(Path(__file__).parent)]}
    one = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
    run = hpcfed.run(of("fedavg", local=one, **model), world=world, quiet=True)
    world.gather(None)
    monkeypatch.setenv("HPCFED_TEST_FAILS", "1")
    client = run.metrics[0]["cohort"][0]
    with pytest.raises(InputError, match=f"round 1, client {client} .*no such pass"):
        hpcfed.replay("run", 1, client)


def test_steps_of_plain_gradient_descent_follow_from_the_gradients_at_the_iterates(world, folder):
    """y_k = y_{k−1} − η ∇f(y_{k−1}), the gradient by autograd at the iterate before."""
    plain = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "batched"}
    run = hpcfed.run(of("fedavg", local=plain), world=world, quiet=True)
    world.gather(None)
    found = hpcfed.replay("run", 2, run.metrics[1]["cohort"][0])
    before = found.w
    for step in found.steps:
        assert step.iterate is not None
        module = found.module(step.number - 1)
        loss = torch.nn.functional.cross_entropy(module(step.x), step.y)
        assert float(loss) == pytest.approx(step.loss, rel=1e-6)
        assert float(torch.linalg.vector_norm(before - step.iterate)) == pytest.approx(0.1 * step.gradient, rel=1e-4)
        before = step.iterate
    with pytest.raises(InputError, match=r"step: expected 0 to 4, got 5"):
        found.module(5)


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_without_recorded_hashes_the_hash_of_the_round_tells(engine, world, folder):
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": engine}
    run = hpcfed.run(of("scaffold", local=local, update_hashes=False), world=world, quiet=True)
    world.gather(None)
    found = hpcfed.replay("run", 4, run.metrics[3]["cohort"][1])
    assert (found.recorded_hash, found.start, found.agrees) == (None, 2, True)
    assert lines(found)[-1] == "no hash of updates was recorded (update_hashes: true); the round's hash is as recorded"


def test_dropout_is_drawn_as_it_was(world, folder):
    """With a model of one's own that draws: the losses of the steps are the client's."""
    world.on_root(
        lambda: (
            (folder / "dropping.py").write_text(
                "from torch import nn\n\ndef net():\n"
                "    return nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.Linear(16, 4))\n"
            )
            and None
        )
    )
    run = hpcfed.run(of("fedavg", model={"factory": "dropping:net"}), world=world, quiet=True)
    world.gather(None)
    found = hpcfed.replay("run", 3, run.metrics[2]["cohort"][0])
    assert found.agrees
    check_steps(found)


SICK = """
import torch
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, Tilt


class Sick(ClientRule):
    def tilt(self, w, shared, client, context):
        sick = context.client.client == 1 and context.round == 2
        return Tilt(shift=torch.full_like(w, float("nan"))) if sick else Tilt()


def method():
    return Method("sick", Sick(), ServerStep())
"""


def test_norms_of_a_run_that_diverges_are_those_of_its_record(world, folder):
    """Of numbers whose squares float32 does not hold."""
    local = {"steps": 2, "batch_size": 10, "lr": 1e13, "weight_decay": 1.0}
    run = of("fedavg", cohort={"schedule": [[1]]}, rounds=1, local=local, evaluate={"every": 0})
    result = hpcfed.run(run, world=world, quiet=True)
    found, expected = hpcfed.replay(result.folder, 1, 1), result.metrics[0]["mean_delta_sq"] ** 0.5
    assert expected > 1e20
    assert found.steps[-1].drift == pytest.approx(expected, rel=1e-6)
    assert f"‖delta‖ {expected:.6g};" in lines(found)[0]


def test_a_skipped_client_is_reported_as_such(world, folder):
    world.on_root(lambda: (folder / "sick.py").write_text(SICK) and None)
    run = of("fedavg", algorithm={"factory": "sick:method"}, cohort=None, on_bad_client="skip", rounds=3)
    result = hpcfed.run(run, world=world, quiet=True)
    assert [row["skipped"] for row in result.metrics] == [[], [1], []]
    found = hpcfed.replay(result.folder, 2, 1)
    assert (found.skipped, found.agrees) == (True, True)
    assert "left this client out of the round (on_bad_client: skip): its update is not finite here" in lines(found)[-1]
    assert not hpcfed.replay(result.folder, 2, 0).skipped


def test_a_client_that_dropped_out_is_reported_as_such(world, folder):
    masks = {"updates": [{"clip": {"norm": 1.0, "scales": {}}}], "secure_aggregation": {"dropout": 0.4, "survivors": 2}}
    result = hpcfed.run(of("fedavg", cohort=None, update_hashes=False, **masks), world=world, quiet=True)
    round, out = next((row["round"], row["skipped"][0]) for row in result.metrics if row["skipped"])
    found = hpcfed.replay(result.folder, round, out)
    assert (found.dropped, found.agrees, found.dependence) == (True, True, None)
    assert lines(found)[-1].startswith("this client dropped out before it sent (secure_aggregation)")


def test_a_round_of_too_few_is_reported_as_such(world, folder, capsys):
    """Its only client did not drop out."""
    masks = {"updates": [{"clip": {"norm": 1.0}}], "secure_aggregation": {"dropout": 0.0}, "update_hashes": False}
    run = of("fedavg", cohort={"schedule": [[1], [0, 2]]}, rounds=2, **masks)
    result = hpcfed.run(run, world=world)
    assert [row["skipped"] for row in result.metrics] == [[1], []]
    said = "too few were left to open the sum (secure_aggregation), of 2 rounds: client 1 in 1\n"
    assert capsys.readouterr().out.count(said) == world.is_root
    (line,) = lines(hpcfed.replay(result.folder, 1, 1))[1:]
    assert line == "too few clients were left to open the sum (secure_aggregation); the round's hash is as recorded"


def test_another_update_differs(world, folder):
    run = hpcfed.run(of("fedavg"), world=world, quiet=True)
    world.gather(None)

    def flip() -> None:
        data = bytearray((run.folder / "update-hashes.bin").read_bytes())
        data[8 * 3] ^= 1  # the first client of round 2
        (run.folder / "update-hashes.bin").write_bytes(data)

    world.on_root(flip)
    first, second = run.metrics[1]["cohort"][:2]
    found = hpcfed.replay("run", 2, first)
    assert not found.agrees
    assert lines(found)[-1] == f"differs: hash {found.recorded_hash:016x} was recorded"
    assert hpcfed.replay("run", 2, second).agrees


def test_what_cannot_be_replayed_is_named(world, folder):
    run = hpcfed.run(of("fedavg"), world=world, quiet=True)
    world.gather(None)
    absent = next(client for client in range(5) if client not in run.metrics[0]["cohort"])
    for round, client, told in (
        (7, 0, r"round: expected 1 to 6, which are recorded, got 7"),
        (1, absent, rf"client {absent} .* took no part in round 1: got a cohort of"),
        (1, "nobody", r"no client 'nobody': expected a name of the federation, or a number below 5"),
    ):
        with pytest.raises(InputError, match=told):
            hpcfed.replay("run", round, client)
    absent = next(client for client in range(5) if client not in run.metrics[5]["cohort"])
    with pytest.raises(InputError, match=rf"client {absent} .* took no part in round 6: .*; its nearest round is"):
        hpcfed.replay("run", 6, absent, say=lambda text: pytest.fail(f"the record knows: {text}"))


def test_a_client_whose_own_factor_is_one_is_replayed_as_the_cohort_was_trained(world, folder):
    world.on_root(lambda: (folder / "ordered.py").write_text(ORDERED))
    run = hpcfed.run(of("fedavg", algorithm={"factory": "ordered:method"}), world=world, quiet=True)
    world.gather(None)
    for client in run.metrics[1]["cohort"]:
        found = hpcfed.replay(run.folder, 2, client)
        assert found.recorded_hash == found.reported.hash
