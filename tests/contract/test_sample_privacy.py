"""DP-SGD at the clients: a step by hand, what it costs the site that pays most, and the models that it cannot take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting import rdp

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.client.sample_noise import _by_layers
from hpcfed.config.load import load_recipe
from hpcfed.lab.whatif.coalitions import Contributions, plan_coalitions
from hpcfed.lab.whatif.without import WithoutRequest, run_without
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from hpcfed.rng import Purpose, normals, stream
from hpcfed.simulation import Simulation
from hpcfed.updates._layout import layout_of
from hpcfed.updates._samples import SampleMechanism, sample_accountant, sample_multiplier_for
from tests.contract.test_privacy import OWN_TESTS, filled, secret
from tests.federations import write_federation
from tests.mpi.recipes import small

NOISE: Mapping[str, Any] = {"clip": 0.5, "multiplier": 1.0}
WORK: Mapping[str, Any] = {"steps": 4, "batch_size": 10, "lr": 0.1}
NETS = """
from torch import nn


def net(kind):
    layers = {
        "batch-norm": [nn.Linear(12, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4)],
        "dropout": [nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)],
        "layer-norm": [nn.Linear(12, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)],
    }
    return nn.Sequential(*layers[kind])
"""


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with data, networks and a secret seed, one for each rank, which runs alone."""
    folder = shared_tmp / f"rank-{world.rank}"
    folder.mkdir()
    (folder / "private_nets.py").write_text(NETS)
    return filled(folder)


def recipe(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    local = {**WORK, "noise": NOISE, **changes.pop("local", {})}
    data = folder / changes.pop("data", "small.h5")
    return small(folder / output, data=str(data), python_path=[str(folder)], local=local, **changes)


def run(folder: Path, output: str, world: World | None = None, **changes: Any) -> hpcfed.Result:
    return hpcfed.run(recipe(folder, output, **changes), world=world or World(), quiet=True)


@pytest.mark.serial
@pytest.mark.one_mpi
def test_a_client_by_hand(place):
    """y ← y − η v, v ← β v + (Σ clipped gradients of a Poisson minibatch + noise) / B, by a loop over samples."""
    changes = {"dtype": "float64", "cohort": {"schedule": [[2]]}, "local": {"momentum": 0.5}, **secret(place)}
    asked = resolve(load_recipe(recipe(place, "run", **changes)))
    parts, _ = assemble(asked, World())
    with parts.federation:
        simulation = Simulation(parts)
        ((x, labels),) = parts.shards.clients([2])
        y, velocity = parts.initial_w.clone(), torch.zeros_like(parts.initial_w)
        rng, layout = stream(parts.seed, Purpose.BATCHES, 1, 2), layout_of(parts.model)
        for step in range(4):
            joined = np.flatnonzero(rng.random(len(labels)) < 10 / len(labels))
            total = torch.zeros_like(y)
            for sample in joined.tolist():
                total += clipped(parts.model, y, x[sample : sample + 1], labels[sample : sample + 1])
            noise = normals(parts.seed, Purpose.LOCAL_STEP, 1, 2, step, layout.size)
            total += layout.opened(torch.from_numpy(0.5 * noise), y)
            velocity = 0.5 * velocity + total / 10
            y = y - 0.1 * velocity
        simulation.round(1)
        assert torch.allclose(simulation.w, y, rtol=0, atol=1e-5)
        assert not torch.allclose(simulation.w, parts.initial_w, rtol=0, atol=1e-2)


def clipped(model: Any, y: torch.Tensor, x_one: torch.Tensor, y_one: torch.Tensor) -> torch.Tensor:
    """A sample's gradient, of a norm of at most 0.5."""
    model.load(y)
    model.grad.zero_()
    torch.nn.functional.cross_entropy(model.module(x_one), y_one.long()).backward()
    model.adopt()
    return model.grad * min(1.0, 0.5 / float(model.grad.norm()))


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("by_layers", "changes"),
    [
        (True, {"model": {"name": "mlp", "hidden": [8, 5]}, "loss": {"weights": [0.5, 2.0, 1.0, 4.0]}}),
        (True, {"model": {"name": "logistic"}, "loss": {"reduction": "sum"}}),
        (True, {"model": {"name": "linear"}, "data": "numbers.h5"}),
        (False, {"model": {"factory": "private_nets:net", "args": {"kind": "layer-norm"}}}),
    ],
    ids=["mlp", "logistic", "linear", "layer-norm"],
)
def test_the_sum_is_of_clipped_gradients(by_layers, changes, place):
    """Of a norm between the samples', by autograd one by one; and the losses'."""
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(9, 12)).astype(np.float32), draws.normal(size=9).astype(np.float32)
    write_federation(place / "numbers.h5", [(x, y), (2 * x, y)])
    content = recipe(place, "run", dtype="float64", **{key: value for key, value in changes.items() if key != "data"})
    content["data"] = str(place / changes.get("data", "small.h5"))
    parts, _ = assemble(resolve(load_recipe(content)), World())
    with parts.federation:
        ((x, y),) = parts.shards.clients([1])
        model, loss, vectors, losses = parts.model, parts.engine._loss, [], 0.0
        model.load(parts.initial_w + 0.1)
        for sample in range(len(y)):
            model.grad.zero_()
            of_one = loss.batch(model.module(x[sample : sample + 1]), y[sample : sample + 1])
            of_one.backward()
            model.adopt()
            vectors.append(model.grad.clone())
            losses += float(of_one)
        norms = torch.stack(vectors).norm(dim=1)
        clip, total = float(norms.median()), parts.engine._total.zero_()
        expected = sum(vector * min(1.0, clip / float(norm)) for vector, norm in zip(vectors, norms, strict=True))
        assert (parts.engine._sum_of.func is _by_layers) == by_layers
        found = parts.engine._sum_of(x, y, clip)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    assert float(found) == pytest.approx(losses, rel=1e-12)


def mechanism(*rates: float, multiplier: float = 1.1, is_secret: bool = True) -> SampleMechanism:
    return SampleMechanism(1.0, multiplier, 1e-5, 10, rates, is_secret)


@pytest.mark.serial
def test_epsilon_is_of_the_site_that_pays_most():
    """Of three sites one has the largest q, one takes most steps, and one has less of both."""
    steps = np.array([[3, 9, 3], [3, 9, 2]])

    def work(round: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(3), steps[round % 2]

    def library(rate: float, count: int) -> float:
        own = rdp.RdpAccountant()
        own.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.1)), count)
        return own.get_epsilon(1e-5)

    rates = 0.2, 0.1, 0.1
    expected = max(library(0.2, 30), library(0.1, 90))
    assert sample_accountant(mechanism(*rates), work)(10) == pytest.approx(expected, rel=1e-6)
    public = sample_accountant(mechanism(*rates, is_secret=False), work)(10)
    assert public == pytest.approx(library(1.0, 90), rel=1e-6)
    solved = sample_multiplier_for(mechanism(*rates, is_secret=False), 8.0, work)
    asked = (mechanism(*rates, multiplier=z, is_secret=False) for z in (solved, solved - 1e-4))
    spent, more = (sample_accountant(one, work)(10) for one in asked)
    assert spent <= 8.0 < more


@pytest.mark.serial
@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"cohort": {"size": 2}}, 4),
        ({"cohort": {"fraction": 0.4, "sampling": "bernoulli"}}, 4),
        ({"cohort": {"size": 2}, "budget": {"schedule": "budgets.json"}}, 5),
        ({"budget": {"low": 1, "high": 6}}, 6),
    ],
    ids=["size", "bernoulli", "scheduled-budget", "drawn-budget"],
)
def test_a_target_is_kept_whatever_a_secret_seed_draws(changes, most, place):
    """Its noise is that of a site that is in all rounds, with the `most` steps."""
    (place / "budgets.json").write_text(json.dumps([[2, 5]] * 3))
    if "schedule" in changes.get("budget", {}):
        changes = {**changes, "budget": {"schedule": str(place / "budgets.json")}}
    asked = {"clip": 0.5, "epsilon": 3.0, "delta": 1e-4}

    def noise(**changes: Any) -> Any:
        return resolve(load_recipe(recipe(place, "run", **secret(place), **changes))).local.noise

    found = run(place, "run", local={"noise": asked}, **secret(place), **changes)
    assert 0 < found.metrics[-1]["epsilon"] <= 3.0
    assert noise(local={"noise": asked}, **changes) == noise(local={"noise": asked, "steps": most})
    assert resolve(load_recipe(place / "run" / "recipe.yaml")).local.noise == noise(local={"noise": asked}, **changes)


@pytest.mark.every(2)
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_the_bits_are_those_of_any_number_of_ranks_and_of_a_run_that_was_resumed(name, world, shared_tmp):
    """The whole run on one rank; all ranks together, stopped after round 2 and gone on with."""
    if world.rank == 0:
        filled(shared_tmp)
    world.barrier()
    about = {"algorithm": {"name": name}, "cohort": {"size": 3}, "checkpoint": {"every": 1}, **secret(shared_tmp)}
    run(shared_tmp, "together", world, rounds=2, **about)
    found = run(shared_tmp, "together", world, rounds=4, **about).metrics
    whole = run(shared_tmp, f"alone-{world.rank}", rounds=4, **about).metrics
    same = ("hash", "test_loss", "epsilon", "unit", "bytes_up", "delta_sq", "cohort", "mean_delta_sq")
    assert [[row[key] for key in same] for row in found] == [[row[key] for key in same] for row in whole]
    assert {row["local_loss"] for row in found} == {None}


@pytest.mark.serial
@pytest.mark.one_mpi
def test_the_folder_says_what_is_hidden_and_the_seed_verifies(place):
    layer_norm = {"factory": "private_nets:net", "args": {"kind": "layer-norm"}}
    found = run(place, "run", model=layer_norm, rounds=2, **secret(place))
    promised = json.loads((found.folder / "certificate.json").read_text())["privacy"]
    assert promised["level"] == "sample"
    assert promised["neighbours"] == "add or remove one sample"
    assert promised["epsilon"] == found.metrics[-1]["epsilon"] > found.metrics[0]["epsilon"] > 0
    said: list[str] = []
    assert verify(Verification(found.folder, None, 0), World(), said.append) == 0
    assert len(hpcfed.replay(found.folder, 2, 1).steps) == 4
    (place / "secret.txt").unlink()
    with pytest.raises(hpcfed.InputError, match="by the holder of its secret seed alone"):
        verify(Verification(found.folder, None, 0), World(), said.append)


@pytest.mark.serial
@pytest.mark.one_mpi
def test_runs_of_other_clients_or_files_have_noise_of_their_own(place):
    """Else what sites send from other models, noised alike, would tell their gradients apart; and none is a what-if."""
    found = run(place, "run", rounds=1, **secret(place))
    for number, cohorts in enumerate(("[[0, 1]]", "[[1, 0]]")):
        (place / f"{number}.json").write_text(cohorts)
    changes: list[list[str]] = [
        [],
        ["cohort.without=[4]"],
        *([f"cohort.schedule={place}/{number}.json"] for number in range(2)),
        [f"model.init={found.folder}/model.safetensors"],
        ["budget={schedule: missing.json}"],
    ]
    base = load_recipe(found.folder / "recipe.yaml").model_dump(mode="json", exclude={"secret_commitment"})
    assert len({load_recipe(base, change).secret for change in changes}) == len(changes)
    for whatif in (
        lambda: run_without(WithoutRequest(found.folder, ["4"]), World(), [].append),
        lambda: plan_coalitions(Contributions(found.folder)),
    ):
        with pytest.raises(hpcfed.InputError, match="a private run without a client would have noise of its own"):
            whatif()


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "BatchNorm": ({"model": {"factory": "private_nets:net", "args": {"kind": "batch-norm"}}}, "GroupNorm or LayerNorm"),
    "dropout": ({"model": {"factory": "private_nets:net", "args": {"kind": "dropout"}}}, "and no dropout"),
    "tiles": ({"local": {"engine": "batched"}}, "local.engine: batched with local.noise"),
    "compiled": ({"local": {"compile": True}}, "local.noise with local.compile"),
    "clients' scores": ({"evaluate": {"clients": {"every": 1}}}, "local.noise with evaluate.clients"),
    "statistics": ({"evaluate": {"statistics": "training"}}, "local.noise with evaluate.statistics"),
    "own test sets": ({"data": OWN_TESTS}, "local.noise with evaluate.every: 1"),
    "averaged": ({"parameters": {"buffers": "averaged"}}, "local.noise with parameters"),
    "private parts": (
        {"parameters": {"private": ["0.*"]}, "evaluate": {"every": 0}},
        "local.noise with parameters",
    ),
    "skip": ({"on_bad_client": "skip"}, "local.noise with on_bad_client"),
    "numbers": ({"algorithm": {"factory": "tells:numbers"}}, "its clients report numbers: loss"),
    "losses": ({"algorithm": {"factory": "tells:losses"}}, "it reads the loss on all samples"),
    "gradients": ({"algorithm": {"factory": "tells:gradients"}}, "it takes gradients twice a step"),
    "training sets": ({"evaluate": {"train": {"every": 1}}}, "local.noise with evaluate.train"),
    "labels": ({"loss": {"weights": "balanced-by-site"}}, "local.noise with loss.weights"),
    "norms": ({"algorithm": {"name": "fedexp"}}, "which noise of clients makes up to"),
    "own models": ({"algorithm": {"name": "ditto", "mu": 0.1}}, "ε does not count the steps of clients' own models"),
    "both levels": (
        {"updates": [{"clip": {"norm": 1.0}}], "means": [{"noise": {"multiplier": 1.0}}]},
        "'noise' in one",
    ),
    "no amount": ({"local": {"noise": {"clip": 1.0}}}, "'multiplier' or 'epsilon'"),
}


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("case", REFUSED)
def test_what_hides_no_sample_is_refused(case, place):
    changes, words = REFUSED[case]
    with pytest.raises(hpcfed.InputError, match=words):
        run(place, "run", **changes)
