"""Modules that give their parameters other memory are trained as if they wrote in place, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hpcfed
from hpcfed.errors import InputError
from hpcfed.lab.export import export
from hpcfed.ranks.world import World
from tests.devices import KIND
from tests.mpi.rebinding import ADOPTED, REFUSED
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]
HERE = str(Path(__file__).parent)
ROUNDED = [name for name in ADOPTED if name in ("transposed", "scripted", "descending") or name.startswith("adapter")]
"""Modules whose twin computes the same in another order."""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(output: str, name: str, **changes: Any) -> dict[str, Any]:
    twin = changes.pop("twin", False)
    measured = {"train": {"every": 1}, "batch_size": 16}
    model = {"factory": "rebinding:make", "args": {"name": name, "twin": twin}}
    local = {"steps": 5, "batch_size": 10, "lr": 0.2, "weight_decay": 0.01}
    return small(output, model=model, python_path=[HERE], evaluate=measured, local=local, **changes)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ADOPTED)
def test_it_trains_as_its_twin_that_writes_in_place(name, world, folder):
    """Bit for bit, on all ranks as alone; a merge into other parameters rounds, but leaves nothing behind."""
    if KIND == "stub" and name in ("transposed", "set"):
        pytest.skip("a tensor of the strict device takes no other strides or memory")
    one = {"local": {"steps": 5, "batch_size": 10, "lr": 0.2, "weight_decay": 0.01, "engine": "sequential"}}
    run = hpcfed.run(recipe("run", name) | one, world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run(recipe("alone", name) | one, world=World(), quiet=True)
        assert left_by(run) == left_by(alone)
        twin = hpcfed.run(recipe("twin", name, twin=True) | one, world=World(), quiet=True)
        trained, expected = (load_file(each.folder / "model.safetensors") for each in (run, twin))
        rounds = name in ROUNDED
        for key in expected:
            other_kernels = name in ("transposed", "scripted", "descending")
            torch.testing.assert_close(
                trained[key], expected[key], atol=1e-6 * other_kernels, rtol=1e-4 * other_kernels
            )
        for row, other in zip(run.metrics, twin.metrics, strict=True):
            for column in ("test_loss", "train_loss"):
                assert row[column] == pytest.approx(other[column], rel=1e-5 if rounds else 0)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", REFUSED)
def test_another_parameter_is_refused_by_name(name, world, folder):
    threads = torch.get_num_threads()
    try:
        with pytest.raises(InputError, match=REFUSED[name][1]):
            hpcfed.run(recipe("run", name), world=world, quiet=True)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["assigned", "adapter", "sometimes"])
def test_a_replay_has_the_recorded_bits(name, world, folder):
    """So has the loss of each of its steps, those of a client's own evaluation, and of a method that asks for f(w)."""
    changes = {"update_hashes": True, "algorithm": {"factory": "qffl:method", "q": 1.0}, "weights": "uniform"}
    path = [HERE, str(Path(HERE).parent / "contract")]
    run = hpcfed.run(recipe("run", name, **changes) | {"python_path": path}, world=world, quiet=True)
    if world.rank == 0:
        client = run.metrics[-1]["cohort"][0]
        again = hpcfed.replay(run.folder, 3, client)
        assert again.agrees
        assert torch.isfinite(again.module(5)(again.samples[0])).all()


def test_it_is_not_stacked(world, folder):
    """`torch.func` would drop what is assigned, and hooks on gradients."""
    local = {"steps": 5, "batch_size": 10, "lr": 0.2, "engine": "batched"}
    for name, why in (("assigned", "other memory"), ("hook", "other memory"), ("own-gradients", "hooks")):
        with pytest.raises(InputError, match=f"batched cannot take this model: it .*{why}"):
            hpcfed.run({**recipe("run", name), "local": local}, world=world, quiet=True)


def test_a_module_that_is_read_has_the_files_bits(world, folder):
    """Its trial in a forward pass, which constrains it, is undone."""
    run = hpcfed.run(recipe("run", "assigned"), world=world, quiet=True)
    file = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(tensor, file[name]) for name, tensor in run.module.state_dict().items())
    x = torch.ones(1, 12)
    assert not torch.equal(run.module(x), torch.zeros(1, 4))
    assert not torch.equal(run.module.first.weight, file["first.weight"])


def test_parameters_without_a_gradient_are_said(world, folder, capfd):
    hpcfed.run(recipe("run", "backbone", rounds=1), world=world)
    said = "".join(capfd.readouterr())
    if world.rank == 0:
        assert "the model's output does not depend on first.weight, first.bias, which are not trained" in said


def test_metrics_leave_their_arguments_to_each_other(world, folder):
    """A metric that writes is refused; a loss has a copy of its own in evaluations."""
    for metric in ("rebinding:written", {"whole": "rebinding:written_whole"}):
        changed = recipe("run", "plain") | {"evaluate": {"metrics": {"first": metric, "f1": "f1-macro"}}}
        with pytest.raises(InputError, match=r"evaluate\.metrics\.first writes to its arguments"):
            hpcfed.run(changed, world=world, quiet=True)
    runs = [
        hpcfed.run({**recipe(name, "plain"), "loss": {"factory": f"rebinding:{name}"}}, world=world, quiet=True)
        for name in ("writing", "reading")
    ]
    assert runs[0].metrics[-1]["test_accuracy"] == runs[1].metrics[-1]["test_accuracy"]


def test_state_that_is_no_tensor_is_exported_where_it_has_a_place(world, folder):
    run = hpcfed.run(recipe("run", "extra", rounds=1), world=world, quiet=True)
    if world.rank == 0:
        export(run.folder, "state_dict", Path("model.pt"), accept_code=True)
        assert torch.load("model.pt", weights_only=True)["_extra_state"] == {"version": 1}
        with pytest.raises(InputError, match="safetensors has no place for _extra_state, which is no tensor"):
            export(run.folder, output=Path("model.safetensors"), accept_code=True)
