"""Runs on a GPU beside the same on the CPU: `make test-gpu`; on the strict device with HPCFED_TEST_DEVICE=stub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import hpcfed
from hpcfed.config.recipe import Local
from hpcfed.errors import EnvironmentFailure, InputError
from tests.devices import KIND, WANTED
from tests.launch import launch
from tests.mpi.recipes import METHODS, small, write_small
from tests.mpi.test_models import CASES, LOCAL, write_all
from tests.mpi.test_same_result import left_by

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    **{method: {"algorithm": {"name": method, **METHODS[method]}} for method in METHODS},
    "momentum, clipping, a budget and a guess": {
        "local": {"steps": 6, "batch_size": 10, "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5, "weight_decay": 1e-3},
        "budget": {"low": 2, "high": 5},
        "guess": "remaining",
    },
    "adam": {"local": {"steps": 4, "batch_size": 10, "lr": 0.01, "optimizer": "adam"}},
}
MODELS = [name for name in CASES if name != "dropout"]
"""Those that do not draw: a GPU draws other numbers than a CPU."""
MODEL_TOLERANCE = {"float32": 1e-3, "float64": 1e-8}
"""Relative, of the model after a few rounds: cuDNN rounds otherwise, and Adam's first steps are signs."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with federations of numbers, images, tokens and label sets."""
    write_small(tmp_path)
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def difference(**changes: Any) -> float:
    """Return ‖w_device − w_cpu‖ / ‖w_cpu‖ after a recipe's last round."""
    found = []
    for device in ("cpu", WANTED):
        run = hpcfed.run(small(f"run-{device}", **{**changes, "device": device}), quiet=True)
        parts = load_file(run.folder / "model.safetensors")
        found.append(np.concatenate([part.astype(float).ravel() for part in parts.values()]))
    cpu, gpu = found
    return float(np.linalg.norm(gpu - cpu) / np.linalg.norm(cpu))


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_methods_give_the_cpus_model(variant: str, engine: str, folder: Path) -> None:
    changes = VARIANTS[variant]
    local = {**changes.get("local", {"steps": 4, "batch_size": 10, "lr": 0.1}), "engine": engine}
    assert difference(dtype="float64", **{**changes, "local": local}) < 1e-12


@pytest.mark.parametrize("dtype", MODEL_TOLERANCE)
@pytest.mark.parametrize("case", MODELS)
def test_models_are_the_cpus(case: str, dtype: str, folder: Path) -> None:
    changes = {"rounds": 2, "local": LOCAL, "evaluate": {"batch_size": 4}, **CASES[case], "dtype": dtype}
    assert difference(**changes) < MODEL_TOLERANCE[dtype]


RECORDED: Mapping[str, Mapping[str, Any]] = {
    "batched": {"local": {"steps": 7, "batch_size": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.5}},
    "one by one": {"local": {"epochs": 1, "batch_size": 10, "lr": 0.1, "clip_norm": 0.5, "engine": "sequential"}},
    "states": {"algorithm": {"name": "feddyn", "alpha": 0.1}},
    **{name: {**CASES[name], "local": LOCAL | dict(CASES[name].get("local", {}))} for name in CASES},
}


@pytest.mark.skipif("graphs" not in Local.model_fields, reason="nothing is recorded as graphs")
@pytest.mark.parametrize("case", RECORDED)
def test_recorded_steps_have_the_bits_of_eager_ones(case: str, folder: Path) -> None:
    found = []
    for graphs in ("auto", "off"):
        local = {"steps": 4, "batch_size": 10, "lr": 0.1, **RECORDED[case].get("local", {}), "graphs": graphs}
        changes = {"rounds": 4, **RECORDED[case], "local": {**local, "steps": None} if "epochs" in local else local}
        found.append(left_by(hpcfed.run(small(graphs, **changes), quiet=True)))
    assert found[0] == found[1]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A quarter of a GB of the GPU, for this process."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((1 << 28) / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.skipif(KIND != "cuda", reason="tests/device fills the strict device's memory")
def test_a_full_memory_ends_the_run_in_one_line(folder: Path, little_memory: None) -> None:
    large = {"model": {"name": "mlp", "hidden": [4000, 4000]}, "evaluate": {"every": 0}}
    with pytest.raises(EnvironmentFailure, match="memory is full") as error:
        hpcfed.run(small("full", **large), quiet=True)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 4
    hpcfed.run(small("fits"), quiet=True)


def test_verify_without_the_gpu_says_that_bits_are_others(folder: Path) -> None:
    hpcfed.run(small("run", checkpoint={"every": 1}), quiet=True)
    done = launch(0, ["verify", "run"], cwd=folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if KIND == "cpu":
        assert done.returncode == 0, done.stdout + done.stderr
        return
    assert done.returncode == 5, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "this machine computes other bits: device: " in said
    assert "agrees within" in said


FLATTENS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(16, 30)
        self.lstm = torch.nn.LSTM(8, 16, 2, batch_first=True)

    def forward(self, x):
        self.lstm.flatten_parameters()
        return self.head(self.lstm(self.embedding(x))[0][:, -1])
"""


def test_a_module_that_flattens_its_weights_is_trained_or_refused(folder: Path) -> None:
    """cuDNN's weights in one piece of memory, made anew in each forward pass, are other memory than the flat vector."""
    (folder / "flattens.py").write_text(FLATTENS)
    changes = {"model": {"factory": "flattens:Net"}, "data": "tokens.h5", "local": LOCAL, "dtype": "float64"}
    changes |= {"python_path": [str(folder)], "rounds": 2, "evaluate": {"batch_size": 4}}
    found, refusal = 0.0, ""
    try:
        found = difference(**changes)
    except InputError as error:
        refusal = str(error)
    assert found < MODEL_TOLERANCE["float64"]
    assert not refusal or "lstm" in refusal
