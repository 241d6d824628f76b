"""A run on all ranks leaves, bit for bit, what a run in a world of one leaves: ranks without a client included."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import hpcfed
from hpcfed.cli.prepare import command as prepare
from hpcfed.errors import EnvironmentFailure
from hpcfed.ranks.world import World
from tests.devices import WANTED
from tests.federations import blobs, write_federation
from tests.mpi import shrinking
from tests.mpi.recipes import METHODS, small, write_small

MODELS = ("model.safetensors", "model-evaluated.safetensors")
MEASURED = ("seconds", "imbalance")

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "two-clients": {"data": "two/small.h5"},
    "client-average": {"evaluate": {"model": "client-average", "train": {"every": 1}, "batch_size": 16}},
    "cohort-average": {"evaluate": {"model": "cohort-average", "batch_size": 7}, "cohort": {"size": 3}},
    "budget-and-guess": {
        "budget": {"low": 1, "high": 7},
        "local": {"steps": 9, "batch_size": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.6},
        "guess": "remaining",
    },
    "momentum-and-clipping": {
        "local": {"epochs": 1, "batch_size": 16, "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5, "weight_decay": 1e-3}
    },
    "bernoulli": {"cohort": {"fraction": 0.3, "sampling": "bernoulli"}, "rounds": 5, "weights": "uniform"},
    "float64": {"dtype": "float64", "local": {"steps": 3, "batch_size": "full", "lr": 0.1, "clip": "linear"}},
}
SHARED = (71, 71, 72, 72)
"""Samples of clients whose last minibatches of ten are short."""
README: Mapping[str, Any] = {
    "model": {"name": "mlp", "hidden": [64]},
    "rounds": 60,
    "cohort": {"size": 5},
    "local": {"epochs": 2, "batch_size": 10, "lr": 0.05},
    "algorithm": {"name": "fedexp", "eps": 1.0e-3},
    "evaluate": {"every": 1, "model": "last-two"},
}
"""The recipe that README.md begins with."""
OF_EVERY_MPI = ("plain", "two-clients", "client-average", "float64")
"""Variants that call MPI differently: the usual, ranks without a client, another sum, longer words."""


def left_by(result: hpcfed.Result) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The models' bytes, and the record without what was measured."""
    models = {name: (result.folder / name).read_bytes() for name in MODELS if (result.folder / name).exists()}
    return models, [{key: row[key] for key in row if key not in MEASURED} for row in result.metrics]


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients, and one of two under ``two/``; the working folder of all ranks."""

    def write() -> None:
        (shared_tmp / "two").mkdir()
        write_small(shared_tmp)
        write_small(shared_tmp / "two", 2)

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def check_same_as_alone(world: World, folder: Path, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run a recipe on all ranks, then on the last of them alone, and compare there; return the record."""
    together = left_by(hpcfed.run({**recipe, "output": str(folder / "together")}, world=world, quiet=True))
    assert together[1][0]["gradients"] > 0
    if world.rank == world.size - 1:
        alone = left_by(hpcfed.run({**recipe, "output": str(folder / "alone")}, world=World(), quiet=True))
        assert together[0] == alone[0]
        assert together[1] == alone[1]
    return together[1]


OFTEN = "scaffold"
"""A method with client states that reduces two vectors, run with every variant; test_drawn.py mixes the rest."""
METHODS_OF_EVERY_MPI = ("fedavg", "feddyn", OFTEN)


def marks(variant: str, method: str) -> list[pytest.MarkDecorator]:
    usual = variant == "plain" or method == OFTEN
    of_every_mpi = variant in OF_EVERY_MPI and method in METHODS_OF_EVERY_MPI
    return ([] if usual else [pytest.mark.soak]) + ([] if of_every_mpi else [pytest.mark.one_mpi])


@pytest.mark.parametrize(
    ("variant", "method"),
    [pytest.param(variant, method, marks=marks(variant, method)) for variant in VARIANTS for method in METHODS],
)
def test_a_run_is_the_same_as_alone(method, variant, world, folder):
    changes = dict(VARIANTS[variant])
    if method == "dsgd":  # has no moment to guess from
        changes.pop("guess", None)
    if method == "fednova" and variant == "cohort-average":  # which it does not reduce
        changes["evaluate"] = {"model": "last-two", "batch_size": 7}
    recipe = small("run", algorithm={"name": method, **METHODS[method]}, **changes)
    check_same_as_alone(world, folder, recipe)


def test_short_minibatches_that_two_clients_share(world, shared_tmp):
    """Clients of 71, 71, 72 and 72 samples: their last minibatches of one and two are computed in pairs, or alone."""

    def write() -> None:
        federation = blobs(4, samples=150, features=30, classes=2)
        federation["clients"] = [(x[:n], y[:n]) for (x, y), n in zip(federation["clients"], SHARED, strict=True)]
        write_federation(shared_tmp / "pairs.h5", **federation, content="pairs")

    world.on_root(write)
    local = {"epochs": 2, "batch_size": 10, "lr": 0.05}
    recipe = small("run", data=str(shared_tmp / "pairs.h5"), model={"name": "mlp", "hidden": [32]}, local=local)
    check_same_as_alone(world, shared_tmp, {**recipe, "rounds": 10, "placement": "static"})


@pytest.mark.deadline(120)
def test_the_readmes_recipe_is_the_same_as_alone(world, shared_tmp):
    """Its 36th round is the only one that draws both clients of 71 samples."""
    digits = ["digits", "--clients", "20", "--partition", "dirichlet-client", "--alpha", "0.3"]
    world.on_root(lambda: prepare.main([*digits, "-o", str(shared_tmp / "digits.h5")], standalone_mode=False))
    for placement in ("static", "balanced"):
        recipe = {**README, "data": str(shared_tmp / "digits.h5"), "placement": placement, "device": WANTED}
        folder = shared_tmp / placement
        assert len(check_same_as_alone(world, folder, recipe)) == README["rounds"]


def test_where_a_client_is_trained_changes_nothing(world, folder):
    runs = [
        hpcfed.run(small(folder / placement, placement=placement, cohort={"size": 3}), world=world, quiet=True)
        for placement in ("static", "balanced")
    ]
    assert left_by(runs[0]) == left_by(runs[1])


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedsplit"])
def test_states_that_move_to_where_their_clients_are_trained_change_nothing(name, world, folder, monkeypatch):
    """Also where the run stops in between, and goes on with every state at home again."""
    moved = []
    exchange = world.exchange
    monkeypatch.setattr(world, "exchange", lambda *both: moved.append(both) or exchange(*both))
    algorithm = {"name": name, **METHODS[name]}
    base = {"algorithm": algorithm, "cohort": {"size": 3}, "rounds": 8, "client_state": "host"}
    at_home = hpcfed.run(small(folder / "static", placement="static", **base), world=world, quiet=True)
    assert not moved
    spread = hpcfed.run(small(folder / "balanced", placement="balanced", **base), world=world, quiet=True)
    assert any(world.gather(bool(moved))) == (world.size > 1)
    halves = {**base, "placement": "balanced", "checkpoint": {"every": 1}}
    for rounds in (4, 8):
        twice = hpcfed.run(small(folder / "twice", **{**halves, "rounds": rounds}), world=world, quiet=True)
    assert left_by(at_home) == left_by(spread)
    assert left_by(at_home)[0] == left_by(twice)[0]


def test_a_round_that_is_run_twice_is_the_same_as_alone(world, folder):
    """Its clients' states have moved already when it is run once more."""
    world.on_root(lambda: shutil.copy(shrinking.__file__, folder))
    changes = {"dtype": "float64", "algorithm": {"factory": "shrinking:method"}, "cohort": {"size": 3}, "rounds": 6}
    recipe = small(folder / "run", data=str(folder / "small.h5"), python_path=[str(folder)], **changes)
    recipe["placement"] = "balanced"
    found = check_same_as_alone(world, folder, recipe)
    assert [row["attempts"] for row in found] == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("way", "hashes"), [("length", False), ("order", True)])
def test_a_client_that_reports_another_update_when_its_round_is_run_twice_ends_the_run(way, hashes, world, folder):
    """Updates of the same length are told apart by their hashes, where the recipe asks for them."""
    world.on_root(lambda: shutil.copy(shrinking.__file__, folder))
    algorithm = {"factory": "shrinking:restless", "way": way}
    about = {"dtype": "float64", "algorithm": algorithm, "update_hashes": hashes, "sentinel": "off"}
    recipe = small(folder / "run", data=str(folder / "small.h5"), python_path=[str(folder)], **about)
    with pytest.raises(EnvironmentFailure, match=r"round 2, client 2 .*: trained twice, it reported two different upd"):
        hpcfed.run(recipe, world=world, quiet=True)


def test_the_average_of_all_clients_is_what_it_says(world, folder):
    """One client after another: the average over both of the last models, the initial one where not yet trained."""
    world.on_root(lambda: (folder / "each.json").write_text("[[0], [1]]"))
    base = small("run", data="two/small.h5", weights="uniform", cohort={"schedule": "each.json"}, dtype="float64")
    evaluates = {"model": "client-average", "batch_size": 64}
    both = hpcfed.run({**base, "rounds": 2, "output": "both", "evaluate": evaluates}, world=world, quiet=True)
    first = hpcfed.run({**base, "rounds": 1, "output": "first"}, world=world, quiet=True)
    # With one client a round and η_g = 1 the server's model is that client's: y_0, then y_1 started from it.
    y_0, y_1 = (load_file(result.folder / "model.safetensors") for result in (first, both))
    found = load_file(both.folder / "model-evaluated.safetensors")
    for name in found:
        np.testing.assert_allclose(found[name], (y_0[name] + y_1[name]) / 2, rtol=0, atol=1e-14)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["fedavgm", "scaffold", "fedadam", "feddyn"])
def test_a_large_model_is_reduced_and_stepped_in_parts_to_the_same_bits(name, world, folder, monkeypatch):
    """With the sizes from which sums have memory of their own and server steps go in blocks set to almost nothing."""
    recipe = small("whole", algorithm={"name": name, **METHODS[name]}, rounds=4, evaluate={"model": "last-two"})
    whole = left_by(hpcfed.run(recipe, world=world, quiet=True))
    for place, value in (
        ("hpcfed.reduce.memory.LARGE_BYTES", 0),
        ("hpcfed.reduce.memory.LARGE_PIECE_BYTES", 256),
        ("hpcfed.algorithms._blocks.BLOCK", 32),
    ):
        monkeypatch.setattr(place, value)
    assert left_by(hpcfed.run({**recipe, "output": "parts"}, world=world, quiet=True)) == whole


OWN_MU = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, Tilt


class OwnMu(ClientRule):
    def tilt(self, w, shared, client, context):
        return Tilt(mu=0.1 * (context.client.client % 3))


def method():
    return Method("own-mu", OwnMu(), ServerStep())
"""


def test_clients_with_a_mu_of_their_own_are_the_same_in_any_tile(world, folder):
    """They share no tile, so that no update may wait for the others of its rank."""
    world.on_root(lambda: (folder / "ownmu.py").write_text(OWN_MU) and None)
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "batched"}
    runs = []
    for tile in ("auto", 1):
        algorithm = {"factory": "ownmu:method"}
        recipe = small(f"tile-{tile}", algorithm=algorithm, local={**local, "tile": tile}, python_path=[str(folder)])
        runs.append(load_file(hpcfed.run(recipe, world=world, quiet=True).folder / "model.safetensors"))
    for name in runs[0]:
        np.testing.assert_allclose(runs[0][name], runs[1][name], rtol=1e-4, atol=1e-6)  # rounding of twelve steps
