"""What every method must keep to; methods are discovered, so a new one is held to it from its first day."""

from __future__ import annotations

import ast
import inspect
import math
from importlib import import_module

import pytest
import torch

import hpcfed
from hpcfed.algorithms import build, names
from hpcfed.config.recipe import Algorithm
from hpcfed.types import Local, Means, Method, State, Stepped, Who
from tests.mpi.recipes import METHODS, small, write_small

D = 37
WHO = Who(client=3, num_samples=20, mean_samples=16.0)


def method(name: str) -> Method:
    return build(Algorithm(name=name, **METHODS[name]))


def module_of(name: str):
    return import_module(f"hpcfed.algorithms.{name.replace('-', '_')}")


def draw(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def means(vectors: tuple[str, ...], round: int) -> Means:
    drawn = {name: draw(round * 10 + place, torch.float64) for place, name in enumerate(vectors)}
    return Means(drawn, mean_delta_sq=3.5 * D, delta_sq=D, fraction=0.4, cohort_size=2, round=round)


def copied(state: State) -> State:
    return {key: tensor.clone() for key, tensor in state.items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def is_plain(state: State, dtype: torch.dtype) -> bool:
    return all(
        type(tensor) is torch.Tensor and (tensor.dtype, tensor.shape) == (dtype, (D,)) for tensor in state.values()
    )


def test_every_method_is_listed_with_parameters():
    assert sorted(METHODS) == names()


@pytest.mark.parametrize("name", names())
def test_the_server_step_is_pure_and_keeps_dtype_and_shape(name):
    chosen = method(name)
    w = draw(1, torch.float64)
    state = chosen.server.begin(w)
    assert is_plain(state, torch.float64)
    for round in (1, 2, 3):
        told = means(chosen.local.vectors, round)
        before = w.clone(), copied(state), copied(told.vectors)
        stepped, again = chosen.server.step(w, state, told), chosen.server.step(w, state, told)
        assert isinstance(stepped, Stepped)
        assert torch.equal(w, before[0])
        assert same(state, before[1])
        assert same(told.vectors, before[2])
        assert torch.equal(stepped.w, again.w)
        assert same(stepped.state, again.state)
        assert stepped.server_lr == again.server_lr
        assert is_plain({"w": stepped.w, **stepped.state}, torch.float64)
        assert stepped.state.keys() == state.keys()
        assert stepped.server_lr is None or math.isfinite(stepped.server_lr)
        assert not torch.equal(stepped.w, w)
        w, state = stepped.w, stepped.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", names())
def test_the_client_changes_nothing_it_was_given(name, dtype):
    chosen = method(name)
    w, local = draw(1, dtype), Local(draw(2, dtype), steps=4, loss_sum=1.0)
    server, client = chosen.server.begin(w.double()), chosen.local.begin(w)
    assert bool(client) == chosen.local.stateful
    for _ in range(2):
        given = {"w": w, "delta": local.delta, **{f"server {key}": value for key, value in server.items()}, **client}
        before = copied(given)
        tilt = chosen.local.tilt(w, server, client, WHO)
        report = chosen.local.report(local, w, server, client, WHO)
        assert same(given, before)
        assert is_plain({key: v for key, v in vars(tilt).items() if isinstance(v, torch.Tensor)}, dtype)
        assert tilt.mu >= 0
        assert tuple(report.vectors) == chosen.local.vectors
        assert is_plain(report.vectors, dtype)
        client = report.state or {}
        assert is_plain(client, dtype)
        # The solver writes its next Δ over this one.
        assert all(tensor.data_ptr() != local.delta.data_ptr() for tensor in client.values())


@pytest.mark.parametrize("name", names())
def test_the_first_reported_vector_is_delta(name):
    assert method(name).local.vectors[0] == "delta"


@pytest.mark.parametrize("name", names())
def test_the_docstring_reads_like_the_paper(name):
    text = inspect.getdoc(module_of(name)) or ""
    for heading in ("client i:", "server:", "Reduced:", "State:", "Reference:"):
        assert heading in text
    assert "w ← w" in text
    undocumented = [key for key in method(name).parameters() if f"``{key}" not in text and key != "server_lr"]
    assert not undocumented


@pytest.mark.parametrize("name", names())
def test_the_file_is_a_small_table(name):
    """No loop over clients, no collective, no torch at run time (the latter: see test_layers)."""
    tree = ast.parse(inspect.getsource(module_of(name)))
    loops = (ast.For, ast.While, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, loops)] == []


DEGENERATE = {
    "fedprox-mu-0-is-fedavg": ({"name": "fedprox", "mu": 0.0}, {"name": "fedavg"}, 3),
    "fedexp-large-eps-is-fedavg": ({"name": "fedexp", "eps": 1e30}, {"name": "fedavg"}, 3),
    "feddyn-first-trains-as-fedprox": ({"name": "feddyn", "alpha": 0.2}, {"name": "fedprox", "mu": 0.2}, 1),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_a_degenerate_case_is_the_other_method_bit_for_bit(case, world, shared_tmp):
    left, right, rounds = DEGENERATE[case]
    world.on_root(lambda: write_small(shared_tmp))
    data = str(shared_tmp / "small.h5")
    runs = [
        hpcfed.run(
            small(shared_tmp / algorithm["name"], data=data, algorithm=algorithm, rounds=rounds, weights="uniform"),
            world=world,
            quiet=True,
        )
        for algorithm in (left, right)
    ]
    for key in ("local_loss", "delta_sq", "mean_delta_sq"):
        assert [row[key] for row in runs[0].metrics] == [row[key] for row in runs[1].metrics]
    if rounds > 1:  # FedDyn's server step is another one
        models = [(run.folder / "model.safetensors").read_bytes() for run in runs]
        assert models[0] == models[1]
