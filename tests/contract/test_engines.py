"""The batched engine: its steps are close to the sequential engine's; tests/contract/test_tiles.py compares tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcfed.client.batched import matmul, steps
from hpcfed.client.batched.gradients import Perceptron
from hpcfed.client.batched.matmul import Blas
from hpcfed.client.batched.networks import network_of
from hpcfed.client.batched.solver import StackedSolver
from hpcfed.client.engine import ClientWork, trained_by
from hpcfed.client.solver import Engine, Task
from hpcfed.config.recipe import Local, LossSection, Model
from hpcfed.errors import InputError
from hpcfed.models import spec
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import loss_for
from hpcfed.models.reading.program import Unreadable
from hpcfed.ranks.platform import onednn
from hpcfed.types import Tilt

MODELS = {
    "logistic": ({"name": "logistic"}, (60,), 5),
    "one output": ({"name": "linear", "bias": False}, (7,), None),
    "images": ({"name": "mlp", "hidden": [30, 13]}, (3, 4), 10),
    "MNIST's": ({"name": "mlp", "hidden": [200, 100]}, (28, 28), 10),
}
"""Model, shape of a sample, classes (None: regression with one target)."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a run: several threads share an operation out by its size, and so by the group's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(
    which: tuple,
    local: dict,
    dtype: torch.dtype,
    *,
    precision: str = "float32",
    elsewhere: bool = False,
    sizes: Sequence[int] = (64,) * 5,
) -> tuple[Engine, FlatModel]:
    """Return an engine and its model; the loss is the task's own, the cohort has all clients, of these sizes."""
    section, features, classes = which
    torch.manual_seed(1)
    found = spec(Model(**section))
    assert found is not None
    model = FlatModel(found.build(features, classes or 1), dtype, CPU)
    task = "classification" if classes else "regression"
    loss = loss_for(LossSection(), task, [])
    like = torch.zeros(1, *features, dtype=dtype), torch.zeros(1, dtype=torch.int64 if classes else dtype)
    work = ClientWork(len(sizes), np.array(sizes), np.ones(len(sizes), np.int64))
    about = {"precision": precision, "draws": False, "elsewhere": elsewhere}
    engine, _ = trained_by(Local(**local), model, loss, 0, like, work, **about)
    return engine, model


def near_zero(model: FlatModel, draws: torch.Generator) -> torch.Tensor:
    """A small random vector (d,), 0 in the gaps as vectors are."""
    vector = torch.zeros_like(model.vector)
    for view in model.views(vector).values():
        view.copy_(0.01 * torch.randn(view.shape, generator=draws, dtype=vector.dtype))
    return vector


def tasks_for(which: tuple, model: FlatModel, sizes: Sequence[int], steps: Sequence[int], mu: float) -> list[Task]:
    """Clients of different sizes, work and tilts, but one μ."""
    _, features, classes = which
    dtype, draws = model.vector.dtype, torch.Generator().manual_seed(2)
    found = []
    for client, (size, count) in enumerate(zip(sizes, steps, strict=True)):
        x = torch.randn(size, *features, generator=draws, dtype=dtype)
        y = (
            torch.randint(classes, (size,), generator=draws)
            if classes
            else torch.randn(size, generator=draws).to(dtype)
        )
        shift, apart = near_zero(model, draws), near_zero(model, draws)
        anchor = model.vector + apart if client % 3 else None
        tilt = Tilt(shift=shift if client % 2 else None, mu=mu, anchor=anchor, from_anchor=client % 3 == 2)
        guessed = [0.0, 3.0, math.inf][client % 3] if count else 0.0
        found.append(Task(client, (x, y), tilt, count, guessed, place=client))
    return found


def solved(engine: Engine, w: torch.Tensor, tasks: Sequence[Task]) -> list[tuple[torch.Tensor, float]]:
    return [(local.delta.clone(), local.loss_sum) for local in engine.solve(w, tasks, 3)]


LOCALS = [
    {"batch_size": 5, "steps": 1},
    {"batch_size": 5, "steps": 1, "weight_decay": 1e-3, "momentum": 0.9},
    {"batch_size": "full", "steps": 1, "optimizer": "adam", "eps": 1e-2},  # so that rounding is not made larger
    {"batch_size": 8, "steps": 1, "clip_norm": 0.5, "weight_decay": 1e-2, "optimizer": "yogi", "eps": 1e-2},
    {"batch_size": 8, "steps": 1, "clip_norm": 0.5, "clip": "linear"},
]


CASES = [
    pytest.param(
        name, local, dtype, marks=[pytest.mark.soak] if name == "MNIST's" and (number or dtype.itemsize > 4) else []
    )
    for name in MODELS
    for number, local in enumerate(LOCALS)
    for dtype in (torch.float32, torch.float64)
]


@pytest.mark.parametrize("most", [1, 2, 24, 64])
@pytest.mark.parametrize("name", ["logistic", "images"])
def test_a_minibatch_larger_than_any_client(name, most):
    which, local = MODELS[name], {"batch_size": 65, "steps": 1}
    engine, model = built(which, local | {"engine": "batched"}, torch.float64, sizes=[most, 1, 0, most])
    sequential, _ = built(which, local | {"engine": "sequential"}, torch.float64)
    tasks = tasks_for(which, model, [most, 1, 0, most], [2, 3, 0, 1], 0.0)
    found, expected = (solved(kind, model.vector.clone(), tasks) for kind in (engine, sequential))
    for (delta, loss), (their_delta, their_loss) in zip(found, expected, strict=True):
        torch.testing.assert_close(delta, their_delta, rtol=1e-10, atol=1e-12)  # rounding of three steps
        assert loss == pytest.approx(their_loss, rel=1e-10)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "local", "dtype"), CASES)
def test_a_client_in_a_tile_and_in_sequence(name, local, dtype):
    which = MODELS[name]
    sizes, steps = [12, 12, 5, 0, 17, 1], [3, 4, 7, 0, 4, 2]
    engine, model = built(which, local | {"engine": "batched"}, dtype, sizes=sizes)
    assert isinstance(engine, StackedSolver)
    assert (engine.tile > 1) == (local["batch_size"] != "full")
    w = model.vector.clone()
    for mu in (0.0, 0.3):
        tasks = tasks_for(which, model, sizes, steps, mu)
        together = solved(engine, w, tasks)
        sequential, other = built(which, local | {"engine": "sequential"}, dtype)
        assert torch.equal(other.vector, w)
        # Rounding of seven steps, which Adam divides by as little as its eps of 1e-2.
        near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
        for (delta, loss), (their_delta, their_loss) in zip(together, solved(sequential, w, tasks), strict=True):
            torch.testing.assert_close(delta, their_delta, **near)
            assert loss == pytest.approx(their_loss, rel=near["rtol"])


@pytest.mark.parametrize("local", LOCALS[1:], ids=["momentum", "adam", "yogi", "linear clip"])
def test_rows_that_are_stepped_one_at_a_time(monkeypatch, local):
    """As those of large models are, so that they stay in a cache: the bits, and Adam's count of steps, are the same."""
    which, found = MODELS["images"], []
    for cached in (steps.CACHED_BYTES, 1):
        monkeypatch.setattr(steps, "CACHED_BYTES", cached)
        engine, model = built(which, local | {"engine": "batched"}, torch.float32)
        tasks = tasks_for(which, model, [12, 12, 5, 0, 17, 1], [3, 4, 7, 0, 4, 2], 0.3)
        found.append(solved(engine, model.vector.clone(), tasks))
    for (delta, loss), (own_delta, own_loss) in zip(*found, strict=True):
        assert torch.equal(delta, own_delta)
        assert loss == own_loss


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "least"), [("images", 0), ("images", 1900), ("MNIST's", 0), ("MNIST's", 10_000)])
@pytest.mark.parametrize("local", LOCALS[:2], ids=["fused", "momentum"])
def test_products_by_onednn(monkeypatch, name, local, least):
    """For all layers and for some: a client's result is independent of its group, and close to BLAS's."""
    monkeypatch.setattr(matmul, "LARGE", least)
    which, local = MODELS[name], local | {"engine": "batched", "weight_decay": 1e-3}
    engine, model = built(which, local | {"matmul": "onednn"}, torch.float32)
    by_blas, _ = built(which, local | {"matmul": "blas"}, torch.float32)
    w = model.vector.clone()
    tasks = tasks_for(which, model, [12, 12, 5, 0, 17, 1], [3, 4, 7, 0, 4, 2], 0.3)
    together = solved(engine, w, tasks)
    for first, last in ((0, 1), (1, 4), (2, 6), (5, 6)):
        for (delta, loss), (own_delta, own_loss) in zip(
            together[first:last], solved(engine, w, tasks[first:last]), strict=True
        ):
            assert torch.equal(delta, own_delta)
            assert loss == own_loss
    for (delta, loss), (their_delta, their_loss) in zip(together, solved(by_blas, w, tasks), strict=True):
        torch.testing.assert_close(delta, their_delta, rtol=2e-4, atol=2e-5)  # rounding of seven float32 steps
        assert loss == pytest.approx(their_loss, rel=1e-5)


def test_onednn_is_used_for_large_products(monkeypatch):
    """With the sizes of a real minibatch: the first layer's products alone, one a client."""
    asked, product = [], onednn.product

    def counted(x, weight, bias=None):
        asked.append((*x.shape, weight.shape[0]))
        return product(x, weight, bias)

    local = {"engine": "batched", "matmul": "onednn", "steps": 1}
    engine, model = built(MODELS["MNIST's"], local, torch.float32, sizes=(50, 50))
    tasks = tasks_for(MODELS["MNIST's"], model, [50, 50], [1, 1], 0.0)
    monkeypatch.setattr(onednn, "product", counted)
    solved(engine, model.vector.clone(), tasks)
    assert sorted(asked) == [(50, 784, 200)] * 2 + [(200, 50, 784)] * 2


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "faster"),
    [
        ("AuthenticAMD", "26", "avx2 avx512f", True),
        ("AuthenticAMD", "25", "avx2 avx512f", False),  # Zen 4: two cycles for 512 bits
        ("AuthenticAMD", "25", "avx2", False),
        ("GenuineIntel", "6", "avx2 avx512f", False),  # where MKL takes its own AVX-512 path
    ],
)
def test_where_auto_takes_onednn(vendor, family, flags, faster):
    assert onednn.is_faster({"vendor_id": vendor, "cpu family": family, "flags": flags}) is faster
    assert not onednn.is_faster({})


@pytest.mark.parametrize(
    ("model", "local", "dtype", "why"),
    [
        ("logistic", {"engine": "batched"}, torch.float64, "cannot be reached in torch"),
        ("resnet18-gn", {"engine": "batched"}, torch.float64, "cannot be reached in torch"),
    ],
)
def test_onednn_is_refused_without_support(model, local, dtype, why):
    which = MODELS.get(model, ({"name": model}, (3, 16, 16), 10))
    with pytest.raises(InputError, match=f"local.matmul: onednn {why}.*use.*blas") as refused:
        built(which, local | {"steps": 1, "matmul": "onednn"}, dtype)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("model", ["cifar-cnn", pytest.param("resnet18-gn", marks=pytest.mark.soak)])
def test_any_module_can_be_stacked(model):
    which = ({"name": model}, (3, 16, 16), 10)
    local = {"batch_size": 4, "steps": 1, "momentum": 0.5}
    engine, flat = built(which, local | {"engine": "batched"}, torch.float64)
    w = flat.vector.clone()
    tasks = tasks_for(which, flat, [6, 4], [2, 1], 0.1)
    sequential, _ = built(which, local | {"engine": "sequential"}, torch.float64)
    for (delta, loss), (their_delta, their_loss) in zip(
        solved(engine, w, tasks), solved(sequential, w, tasks), strict=True
    ):
        torch.testing.assert_close(delta, their_delta, rtol=1e-9, atol=1e-11)
        assert loss == pytest.approx(their_loss, rel=1e-10)


@pytest.mark.parametrize("local", [{"engine": "batched"}, {"noise": {"clip": 1.0, "multiplier": 1.0}}])
@pytest.mark.parametrize("wordless", [False, True])
def test_what_cannot_be_stacked_is_refused_in_one_line(local: dict[str, Any], wordless: bool):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            try:
                return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)
            except RuntimeError:
                if wordless:
                    raise AssertionError from None
                raise

    model = FlatModel(Branches(), torch.float32, CPU)
    like = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
    loss = loss_for(LossSection(), "classification", [])
    work = ClientWork(1, np.array([4]), np.array([1]))
    kind = r"\(AssertionError\)" if wordless else r"\(RuntimeError: .+\)"
    with pytest.raises(InputError, match=rf"local\..* cannot take this model {kind}") as refused:
        trained_by(Local.model_validate(local), model, loss, 0, like, work, draws=False)
    assert "\n" not in str(refused.value)


def test_bfloat16_is_for_products_alone():
    which, local = MODELS["images"], {"batch_size": 8, "steps": 1, "engine": "sequential"}
    mixed, model = built(which, local, torch.float32, precision="bf16-mixed")
    whole, _ = built(which, local, torch.float32)
    w = model.vector.clone()
    tasks = tasks_for(which, model, [12], [3], 0.0)
    ((delta, loss),), ((their_delta, their_loss),) = solved(mixed, w, tasks), solved(whole, w, tasks)
    assert delta.dtype == torch.float32
    assert not torch.equal(delta, their_delta)
    assert loss == pytest.approx(their_loss, rel=2e-2)  # bfloat16 has eight bits
    assert float((delta - their_delta).norm()) < 0.05 * float(their_delta.norm())


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_tf32_needs_a_gpu(engine):
    with pytest.raises(InputError, match="precision: tf32: expected a GPU, got device cpu"):
        built(MODELS["logistic"], {"engine": engine, "steps": 1}, torch.float32, precision="tf32")


@pytest.mark.soak
@pytest.mark.deadline(400)
def test_a_compiled_model_learns_the_same():
    which, local = MODELS["images"], {"batch_size": 8, "steps": 1, "engine": "sequential"}
    compiled, model = built(which, local | {"compile": True}, torch.float64)
    whole, _ = built(which, local, torch.float64)
    tasks = tasks_for(which, model, [12], [3], 0.0)
    w = model.vector.clone()
    ((delta, loss),), ((their_delta, their_loss),) = solved(compiled, w, tasks), solved(whole, w, tasks)
    torch.testing.assert_close(delta, their_delta, rtol=1e-10, atol=1e-12)
    assert loss == pytest.approx(their_loss, rel=1e-12)


@pytest.mark.parametrize(
    ("module", "is_perceptron"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), True),
        (nn.Linear(4, 2, bias=False), True),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), False),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), False),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), False),
    ],
    ids=["perceptron", "linear", "tanh", "no relu", "ends in relu"],
)
def test_perceptrons_are_distinguished_from_other_modules(module, is_perceptron):
    loss, like = loss_for(LossSection(), "classification", []), torch.zeros(1, 4)
    network = network_of(FlatModel(module, torch.float32, CPU), loss, like, 5, Blas())
    assert isinstance(network, Perceptron) == is_perceptron
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(Unreadable, match="hooks"):
        network_of(FlatModel(module, torch.float32, CPU), loss, like, 5, Blas())
