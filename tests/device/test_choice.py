"""Which device `device: auto` takes: a rule of sizes, and the record of a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from torch import Tensor

import hpcfed
from hpcfed.assembly import auto_device, resolve
from hpcfed.assembly.auto_device import LEAST_ON_GPU, chosen, step_work
from hpcfed.config.load import load_recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.bench.workloads import WORKLOADS, write_files
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from tests.cli.test_readme import blocks
from tests.device import strict
from tests.federations import blobs, write_federation
from tests.mpi.recipes import small, write_small
from tests.soak import often

pytestmark = pytest.mark.one_mpi
OURS, IN_PART = LEAST_ON_GPU, 5
"""The rule, before the tests' device takes every model; verify's exit code of another machine."""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def kinds(result: hpcfed.Result) -> set[str]:
    facts = json.loads((result.folder / "environment.json").read_text())
    return {rank["kind"] for rank in facts["per_rank"]}


@pytest.mark.every(2)
@pytest.mark.parametrize(("more", "kind"), [(0, "stub"), (1, "cpu")])
def test_the_rule_holds_at_its_boundary(more, kind, stub, world, folder, monkeypatch) -> None:
    """12·8 + 8 + 8·4 + 4 parameters, minibatches of 10, 5 clients."""
    monkeypatch.setattr(auto_device, "LEAST_ON_GPU", 5 * 10 * 140 + more)
    result = hpcfed.run(small("run", device="auto", rounds=1), world=world, quiet=True)
    assert kinds(result) == {kind}
    assert json.loads((result.folder / "environment.json").read_text())["device_by_step_work"] == 7000
    assert YAML(typ="safe").load(result.folder / "recipe.yaml")["device"] == "auto"


@pytest.mark.parametrize(
    ("name", "device"),
    often(
        [("cnn", "auto"), ("logistic", "cpu")],
        [("mlp", "auto"), ("cnn", "auto"), ("lstm", "auto"), ("resnet18", "auto"), ("logistic", "cpu")],
    ),
)
def test_the_workloads_of_the_bench_take_the_device_that_is_faster(name, device, stub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(auto_device, "LEAST_ON_GPU", OURS)
    write_files(name, WORKLOADS[name], tmp_path)
    recipe = resolve(load_recipe(tmp_path / "recipe.yaml", ["device=auto"]))
    with Federation.open(recipe.data, "mmap") as federation:
        found, work = chosen(recipe, federation, World())
        assert (found, work) == (device, step_work(recipe, federation))
        stub.visible = 0
        assert chosen(recipe, federation, World()) == ("auto", None)  # nothing to choose from


def test_the_readmes_example_takes_the_cpu(stub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(auto_device, "LEAST_ON_GPU", OURS)
    write_federation(tmp_path / "digits.h5", **blobs(20, samples=1440, features=64, classes=10), content="digits")
    (tmp_path / "recipe.yaml").write_text(blocks("yaml")[0])
    recipe = resolve(load_recipe(tmp_path / "recipe.yaml"))
    with Federation.open(recipe.data, "mmap") as federation:
        assert recipe.device == "auto"
        assert chosen(recipe, federation, World())[0] == "cpu"


@pytest.mark.every(2)
@pytest.mark.parametrize("began_on", ["cpu", "stub"])
def test_a_run_goes_on_with_the_device_that_it_began_with(began_on, stub, world, folder, monkeypatch) -> None:
    """The record wins over the rule, and over GPUs that have come since."""

    def run(output: str, rounds: int) -> hpcfed.Result:
        recipe = small(output, device="auto", rounds=rounds, checkpoint={"every": 2})
        return hpcfed.run(recipe, world=world, quiet=True)

    monkeypatch.setattr(auto_device, "LEAST_ON_GPU", 0 if began_on == "stub" else 1 << 60)
    run("run", 2)
    monkeypatch.setattr(auto_device, "LEAST_ON_GPU", 1 << 60 if began_on == "stub" else 0)
    assert kinds(run("run", 4)) == {began_on}
    assert kinds(run("other", 1)) == {"cpu" if began_on == "stub" else "stub"}


def test_a_run_that_began_on_a_gpu_is_refused_without_one(stub, world, folder) -> None:
    recipe = small("run", device="auto", rounds=2, checkpoint={"every": 2})
    hpcfed.run(recipe, world=world, quiet=True)
    stub.visible = 0
    with pytest.raises(InputError, match="began on a GPU: expected a GPU, got none that torch sees") as error:
        hpcfed.run({**recipe, "rounds": 4}, world=world, quiet=True)
    assert "\n" not in str(error.value)
    assert kinds(hpcfed.run({**recipe, "rounds": 3}, world=world, quiet=True, fresh=True)) == {"cpu"}


def test_verify_of_a_gpus_run_on_a_cpu_says_that_its_bits_are_others(stub, world, folder, monkeypatch) -> None:
    """On the GPU, whose products round otherwise here, every bit is the same."""

    def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return (bias.double() + x.double() @ weight.double()).to(x.dtype)

    monkeypatch.setitem(strict.FUSED, torch.ops.aten.addmm.default, addmm)
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
    run = hpcfed.run(small("run", device="auto", rounds=2, local=local), world=world, quiet=True).folder
    said: list[str] = []
    request = Verification(run, rounds=None, seed=0)
    assert verify(request, world, said.append) == 0
    stub.visible = 0
    assert verify(request, world, said.append) == IN_PART
    if world.is_root:
        (line,) = [line for line in said if "this machine computes other bits" in line]
        assert "a stub" in line
