"""Agreement with trajectories computed independently from the papers' equations, through the ordinary recipe path.

The cases lie outside the repository (see `reference_folder`). Tolerance 1e-10: both sides compute in float64, the sums
here are exact to 2^-64, and ten rounds of up to five steps amplify the rounding of a matrix product by less than 1e4.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hpcfed
from tests.federations import write_federation
from tests.shared_files import shared_folder

TOLERANCE = 1e-10
CONVERGED = 120  # full-batch steps of size 0.3 after which (1 − 0.3·α)^K, α = 1, is far below rounding
ALGORITHMS = {"fedavg": "fedavg", "fedavg_avg2": "fedavg", "fedexp": "fedexp", "feddyn": "feddyn"}


@cache
def expected() -> dict:
    folder = shared_folder("reference")
    return json.loads((folder / "expected.json").read_text()) if folder else {"cases": [], "rounds": []}


def cases() -> list:
    """The cases of the methods there are, by name; one that says so where the folder is absent."""
    chosen = [case for case in expected()["cases"] if case["fn"] in ALGORITHMS and "guess" not in case["params"]]
    return [pytest.param(case, id=case["id"]) for case in chosen] or [pytest.param(None, id="reference-absent")]


@pytest.fixture
def softmax(world, shared_tmp) -> Path:
    """A folder with the five clients of the softmax problem, their initial weights and the ten partial cohorts."""
    folder = shared_folder("reference")
    if folder is None:
        pytest.skip("the reference trajectories are not on this machine (set HPCFED_SHARED)")

    def write() -> None:
        inputs = np.load(folder / "inputs.npz")
        clients = [(inputs[f"softmax_X{k}"], inputs[f"softmax_y{k}"]) for k in range(5)]
        write_federation(shared_tmp / "softmax.h5", clients, num_classes=4)
        w = inputs["softmax_w0"]
        save_file({"weight": w[:16].reshape(4, 4).copy(), "bias": w[16:].copy()}, shared_tmp / "w0.safetensors")
        (shared_tmp / "partial.json").write_text(json.dumps(expected()["partial"]))

    world.on_root(write)
    return shared_tmp


def recipe_of(case: dict, folder: Path, output: Path, rounds: int) -> dict:
    """The recipe of one reference case."""
    params = case["params"]
    tau = CONVERGED if params.get("exact") else params["tau"]
    cohorts = expected()["partial"] if case["participation"] == "partial" else [list(range(5))] * 10
    local = {"batch_size": "full", "lr": params.get("eta", 0.3), "momentum": params.get("rho", 0.0)}
    recipe = {
        "data": folder / "softmax.h5",
        "model": {"name": "logistic", "init": folder / "w0.safetensors"},
        "dtype": "float64",
        "rounds": rounds,
        "weights": "samples" if params.get("weights") == "nk" else "uniform",
        "cohort": {"schedule": folder / "partial.json"} if case["participation"] == "partial" else {},
        "local": local,
        "algorithm": algorithm_of(case),
        "evaluate": {"train": {"every": 1}, "model": evaluated(case)},
        "output": output,
    }
    if isinstance(tau, list):
        schedule = output.with_suffix(".json")
        schedule.write_text(json.dumps([[tau[k] for k in cohort] for cohort in cohorts]))
        recipe["budget"] = {"schedule": schedule}
    else:
        local["steps"] = tau
    return recipe


def algorithm_of(case: dict) -> dict:
    params = case["params"]
    names = {"eta_g": "server_lr", "mu": "mu", "eps": "eps", "alpha": "alpha"}
    algorithm = {ours: params[theirs] for theirs, ours in names.items() if theirs in params}
    algorithm["name"] = "fedprox" if "mu" in params else ALGORITHMS[case["fn"]]
    if params.get("eps_times_S"):
        algorithm["eps_scale"] = "cohort"
    if params.get("adaptive"):
        algorithm["alpha_scale"] = "samples"
    return algorithm


def evaluated(case: dict) -> str:
    return "last-two" if "w_report" in case else "last"


def flat(path: Path) -> np.ndarray:
    tensors = load_file(path)
    return np.concatenate([tensors["weight"].ravel(), tensors["bias"]])


@pytest.mark.parametrize("case", cases())
def test_agrees_with_the_reference(case, softmax, world, shared_tmp):
    for rounds in expected()["rounds"] if world.size == 1 else [10]:
        output = shared_tmp / f"run-{rounds}"
        recipe = world.on_root(lambda: recipe_of(case, softmax, output, rounds))  # noqa: B023 (called at once)
        result = hpcfed.run(recipe, world=world, quiet=True)
        key = str(rounds)
        np.testing.assert_allclose(flat(output / "model.safetensors"), case["w"][key], rtol=0, atol=TOLERANCE)
        if "w_report" in case:
            report = flat(output / "model-evaluated.safetensors")
            np.testing.assert_allclose(report, case["w_report"][key], rtol=0, atol=TOLERANCE)
        else:
            assert result.metrics[-1]["train_loss"] == pytest.approx(case["loss_mean_clients"][key], abs=TOLERANCE)
        if "eta_g" in case:
            found = [row["server_lr"] for row in result.metrics]
            np.testing.assert_allclose(found, case["eta_g"][:rounds], rtol=TOLERANCE)


@pytest.mark.parametrize(("which", "key"), [("cohort-average", "w_sel"), ("client-average", "w_all")])
@pytest.mark.parametrize("case", [param for param in cases() if param.values[0] is None or "w_all" in param.values[0]])
def test_feddyn_averages_agree_with_the_reference(case, which, key, softmax, world, shared_tmp):
    recipe = world.on_root(lambda: recipe_of(case, softmax, shared_tmp / "run", 10))
    recipe["evaluate"] = {"train": {"every": 1}, "model": which}
    hpcfed.run(recipe, world=world, quiet=True)
    found = flat(shared_tmp / "run" / "model-evaluated.safetensors")
    np.testing.assert_allclose(found, case[key]["10"], rtol=0, atol=TOLERANCE)
