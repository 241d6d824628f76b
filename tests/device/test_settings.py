"""`deterministic: false` and `evaluate.precision`: what they change, and what their record says."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.errors import InputError
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def facts_of(result: hpcfed.Result) -> dict[str, object]:
    return json.loads((result.folder / "environment.json").read_text())


def test_kernels_of_any_order_are_recorded_and_not_watched(stub, world, folder) -> None:
    result = hpcfed.run(small("run", device="auto", deterministic=False), world=world, quiet=True)
    facts = facts_of(result)
    assert not stub.is_deterministic
    assert (facts["bitwise"], facts["bitwise_why_not"]) == (
        False,
        "deterministic: false, kernels of GPUs add in any order",
    )
    again = resolve(load_recipe(small("other", device="auto")))
    parts, _ = assemble(again.model_copy(update={"deterministic": False}), world)
    with parts.clients, parts.federation:
        assert (parts.sentinel, parts.repeats_bits) == ("off", False)
    parts, _ = assemble(again, world)
    with parts.clients, parts.federation:
        assert stub.is_deterministic
        assert (parts.sentinel, parts.repeats_bits) == ("on", True)


class Running(nn.Sequential):
    """A module whose running sums CUDA adds up in any order."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cumsum(1))


def test_a_module_with_kernels_of_any_order_is_recorded_so(stub, world, folder, capfd) -> None:
    stub.warns_of_order = True
    model, local = {"factory": f"{__name__}:Running"}, {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
    facts = facts_of(hpcfed.run(small("run", device="auto", model=model, local=local), world=world))
    why = "kernels of GPUs add in any order: aten.cumsum.default"
    assert (facts["bitwise"], facts["bitwise_why_not"]) == (False, why)
    if world.is_root:
        assert "adds up in any order (aten.cumsum.default)" in " ".join("".join(capfd.readouterr()).split())


def test_a_cpu_adds_in_one_order_whatever_is_set(world, folder, capfd) -> None:
    plain = left_by(hpcfed.run(small("plain"), world=world, quiet=True))
    result = hpcfed.run(small("run", deterministic=False), world=world)
    assert left_by(result) == plain
    assert facts_of(result)["bitwise"]
    if world.is_root:
        assert "deterministic: false has no effect on a CPU" in " ".join("".join(capfd.readouterr()).split())


def test_a_strict_sentinel_is_refused_beside_kernels_of_any_order(world, folder) -> None:
    with pytest.raises(InputError, match="expected 'sentinel: off' beside 'deterministic: false'") as error:
        hpcfed.run(small("run", deterministic=False, sentinel="strict"), world=world, quiet=True)
    assert "\n" not in str(error.value)


def test_evaluations_are_computed_in_the_runs_precision_where_it_is_asked_for(stub, world, folder, monkeypatch) -> None:
    entered = []

    @contextmanager
    def in_tf32():
        entered.append(torch.is_grad_enabled())
        yield

    monkeypatch.setattr(stub, "has_tf32", True, raising=False)
    monkeypatch.setattr(stub, "in_tf32", in_tf32)
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
    results = {}
    for precision in ("float32", "run"):
        entered.clear()
        evaluate = {"precision": precision, "batch_size": 64, "train": {"every": 1}}
        recipe = small(precision, device="auto", precision="tf32", local=local, evaluate=evaluate)
        results[precision] = hpcfed.run(recipe, world=world, quiet=True)
        assert True in entered  # of training
        assert (False in entered) == (precision == "run")
        assert load_recipe(results[precision].folder / "recipe.yaml").evaluate.precision == precision
    one, other = (results[name].metrics for name in ("float32", "run"))
    assert [row["hash"] for row in one] == [row["hash"] for row in other]


def test_tiles_are_trained_in_the_runs_precision(stub, world, folder, monkeypatch) -> None:
    entered = []

    @contextmanager
    def in_tf32():
        entered.append(True)
        yield

    monkeypatch.setattr(stub, "has_tf32", True, raising=False)
    monkeypatch.setattr(stub, "in_tf32", in_tf32)
    local = {"steps": 4, "batch_size": 10, "lr": 0.1}
    result = hpcfed.run(small("run", device="auto", precision="tf32", local=local), world=world, quiet=True)
    assert load_recipe(result.folder / "recipe.yaml").local.engine == "batched"
    assert entered


def test_scores_in_bfloat16_are_others_of_the_same_model(world, folder) -> None:
    """Outputs are float32 again where losses are added up."""
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
    scores = []
    for precision in ("float32", "run"):
        evaluate = {"precision": precision, "batch_size": 64}
        recipe = small(precision, precision="bf16-mixed", local=local, evaluate=evaluate)
        scores.append(hpcfed.run(recipe, world=world, quiet=True).metrics[-1])
    one, other = scores
    assert one["hash"] == other["hash"]
    assert one["test_loss"] != other["test_loss"]
    assert one["test_loss"] == pytest.approx(other["test_loss"], rel=0.02)


@pytest.mark.parametrize("is_used", [False, True], ids=["not used before", "used before"])
def test_a_devices_generator_draws_on_where_it_was(stub, world, folder, is_used) -> None:
    """Before, in and after a loop, and where torch has been seeded before the device was used."""
    own = stub[world.rank % stub.visible].generator
    if is_used:
        stub.take(0)
    own.manual_seed(7)
    draw = partial(torch.randint, 1 << 30, (1,), generator=own)
    expected = [draw() for _ in range(4)]
    own.manual_seed(7)
    drawn = [draw() for _ in hpcfed.rounds(small("run", device="auto"), world=world)]
    assert [*drawn, draw()] == expected


@pytest.mark.serial
def test_an_evaluation_waits_once_and_the_hash_is_taken_before(stub, world, folder, monkeypatch) -> None:
    """However many chunks and clients it has: once for the tests and training sets that are no tiles."""
    monkeypatch.setattr("hpcfed.assembly.parts.LARGEST_ON_HOST", 0)
    monkeypatch.setattr("hpcfed.evaluation.evaluate.tiles_for", lambda *about: None)
    recipe = resolve(load_recipe(small("run", device="auto", evaluate={"batch_size": 8, "train": {"every": 1}})))
    parts, evaluator = assemble(recipe, world)
    with parts.clients, parts.federation:
        w, taken = parts.initial_w, []
        for _ in range(2):
            before = stub[0].counts.waits
            evaluator(w, test=True, train=True, meanwhile=lambda: taken.append(stub[0].counts.waits - before))  # noqa: B023
            assert (stub[0].counts.waits - before, taken.pop()) == (1, 0)
