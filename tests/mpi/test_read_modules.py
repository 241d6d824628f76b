"""Modules of a user's that are read: the same bits on any number of ranks, resumed, replayed; with frozen parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hpcfed
from hpcfed.config.load import load_recipe
from hpcfed.ranks.world import World
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by

HERE = str(Path(__file__).parent)


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp, 6))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(output: str, name: str, **changes: Any) -> dict[str, Any]:
    local = {"steps": 5, "batch_size": 7, "lr": 0.1, "weight_decay": 0.01, **changes.pop("local", {})}
    model = {"factory": f"nets:{name}"}
    return small(output, model=model, python_path=[HERE], local=local, update_hashes=True, **changes)


@pytest.mark.every(4)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
@pytest.mark.parametrize("name", ["residual", "convolutional", "perceptron"])
def test_ranks_have_the_bits_of_one(name, method, world, folder):
    changes = {"algorithm": {"name": method, **({"alpha": 0.1} if method == "feddyn" else {})}}
    run = hpcfed.run(recipe("run", name, **changes), world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run(recipe("alone", name, **changes), world=World(), quiet=True)
        assert left_by(run) == left_by(alone)
        found = load_recipe(run.folder / "recipe.yaml").local
        assert (found.engine, found.tile) == ("batched", 6)
        account = json.loads((run.folder / "environment.json").read_text())["training"]
        assert account == f"6 clients a tile, read as {'a perceptron' if name == 'perceptron' else 'operators'}"


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize("local", [{}, {"momentum": 0.5, "clip_norm": 1.0}, {"optimizer": "adam", "lr": 0.01}])
def test_a_run_goes_on_and_a_replay_has_its_bits(local, world, folder):
    whole = hpcfed.run(recipe("whole", "residual", rounds=4, local=local), world=world, quiet=True)
    changes = {"local": local, "checkpoint": {"every": 2}}
    hpcfed.run(recipe("parts", "residual", rounds=2, **changes), world=world, quiet=True)
    parts = hpcfed.run(recipe("parts", "residual", rounds=4, **changes), world=world, quiet=True)
    assert left_by(parts) == left_by(whole)
    if world.rank == 0:
        assert hpcfed.replay(whole.folder, 3, whole.metrics[2]["cohort"][0]).agrees


@pytest.mark.thinned
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_frozen_parts_stay(engine, world, folder):
    changes = {"parameters": {"frozen": ["1.*", "2.norm.*"]}, "local": {"engine": engine}}
    run = hpcfed.run(recipe("run", "residual", **changes), world=world, quiet=True)
    if world.rank == 0:
        assert load_recipe(run.folder / "recipe.yaml").local.engine == {"auto": "batched"}.get(engine, engine)
        trained = load_file(run.folder / "model.safetensors")
        assert torch.equal(trained["2.norm.weight"], torch.ones(8))
        assert not torch.equal(trained["3.norm.weight"], torch.ones(8))


@pytest.mark.thinned
def test_private_parts_that_go_first_are_trained_one_after_another(world, folder, capsys):
    first = {"private": ["4.*"], "private_first": 2}
    run = hpcfed.run(recipe("run", "residual", parameters=first, evaluate={"every": 0}), world=world)
    assert load_recipe(run.folder / "recipe.yaml").local.engine == "sequential"
    if world.rank == 0:
        assert "your model: one after another: parameters.private_first" in capsys.readouterr().out


@pytest.mark.thinned
def test_a_setting_that_takes_the_module_itself_is_named(world, folder, capsys):
    run = hpcfed.run(recipe("run", "residual", precision="bf16-mixed", rounds=1), world=world)
    assert load_recipe(run.folder / "recipe.yaml").local.engine == "sequential"
    if world.rank == 0:
        said = " ".join(capsys.readouterr().out.split())
        assert "your model: one after another: precision: bf16-mixed is of the module's own calls" in said
