"""Agreement with trajectories computed independently from the papers' equations, through the ordinary recipe path.

The cases lie outside the repository (see `reference_folder`). Tolerance 1e-10: both sides compute in float64, the sums
here are exact to 2^-64, and ten rounds of up to five steps amplify the rounding of a matrix product by less than 1e4.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hpcfed
from hpcfed.ranks.world import World
from tests.federations import write_federation
from tests.shared_files import shared_folder

TOLERANCE = 1e-10
CONVERGED = 120  # full-batch steps of size 0.3 after which (1 − 0.3·α)^K, α = 1, is far below rounding
GUESS = {"rest": "remaining", "inf": "limit"}
KEYS = {
    "eta_g": "server_lr",
    "mu": "mu",
    "eps": "eps",
    "alpha": "alpha",
    "beta": "beta",
    "gmf": "beta",
    "v0": "v0",
    "second": "second",
    "s": "s",
    "mode": "variant",
}
"""What the reference calls our parameters."""


@cache
def expected() -> dict:
    folder = shared_folder("reference")
    return json.loads((folder / "expected.json").read_text()) if folder else {"cases": [], "rounds": []}


def cases() -> list:
    """All cases by name; one that says so where the folder is absent.

    One of each method runs each time, of all clients and of some of them by turns, the others in the soak.
    """
    found, known, wanted = [], set(), "full"
    for case in expected()["cases"]:
        method, clients = re.split(r"[_/|+]", case["id"])[0], case["id"].rpartition("|")[2]
        chosen = method not in known and clients == wanted
        found.append(pytest.param(case, id=case["id"], marks=[] if chosen else pytest.mark.soak))
        if chosen:
            known.add(method)
            wanted = {"full": "partial", "partial": "full"}[wanted]
    return found or [pytest.param(None, id="reference-absent")]


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
        "guess": GUESS.get(params.get("guess"), "none"),
        "evaluate": {"train": {"every": 1}, "model": evaluated(case)},
        "output": output,
    }
    if isinstance(tau, list):
        schedule = output.with_suffix(".json")
        schedule.write_text(json.dumps([[tau[k] for k in cohort] for cohort in cohorts]))
        recipe["budget"] = {"schedule": schedule}
        local["steps"] = params.get("tau_req", max(tau))
    else:
        local["steps"] = tau
    return recipe


def name_of(case: dict) -> str:
    """The method's name in a recipe."""
    function, params = case["fn"], case["params"]
    if function == "fedopt":
        return f"fed{params['kind']}"
    if function == "scaffold":
        return "scaffold-exp" if params.get("exp") else "scaffold"
    if function in ("fedavg", "fedavg_avg2"):
        return "fedprox" if "mu" in params else "fedavg"
    return function.replace("_", "-")


def algorithm_of(case: dict) -> dict:
    """The recipe's ``algorithm``."""
    params, name = case["params"], name_of(case)
    algorithm = {"name": name} | {ours: params[theirs] for theirs, ours in KEYS.items() if theirs in params}
    if case["fn"] == "fedopt":
        algorithm["tau"] = algorithm.pop("eps")  # the reference calls all small constants eps
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


def check(case: dict, folder: Path, world: World, rounds: int) -> None:
    """Run a case for some of its rounds, and compare all that the reference knows of them."""
    output = folder / f"run-{rounds}"
    recipe = world.on_root(lambda: recipe_of(case, folder, output, rounds))
    result = hpcfed.run(recipe, world=world, quiet=True)
    np.testing.assert_allclose(flat(output / "model.safetensors"), case["w"][str(rounds)], rtol=0, atol=TOLERANCE)
    if "w_report" in case:
        report = flat(output / "model-evaluated.safetensors")
        np.testing.assert_allclose(report, case["w_report"][str(rounds)], rtol=0, atol=TOLERANCE)
    else:  # theirs is of w, which is then what we evaluate
        losses = {row["round"]: row["train_loss"] for row in result.metrics}
        for told in (number for number in expected()["rounds"] if number <= rounds):
            assert losses[told] == pytest.approx(case["loss_mean_clients"][str(told)], abs=TOLERANCE)
    if "eta_g" in case and case["eta_g"][0] is not None:
        found = [row["server_lr"] for row in result.metrics]
        np.testing.assert_allclose(found, case["eta_g"][:rounds], rtol=TOLERANCE)


@pytest.mark.parametrize("case", cases())
def test_agrees_with_the_reference(case, softmax, world):
    check(case, softmax, world, 10)


@pytest.mark.soak
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("case", cases())
def test_agrees_with_the_reference_after_fewer_rounds(case, rounds, softmax, world):
    check(case, softmax, world, rounds)


@pytest.mark.every(3)
@pytest.mark.parametrize(("which", "key"), [("cohort-average", "w_sel"), ("client-average", "w_all")])
@pytest.mark.parametrize("case", [param for param in cases() if param.values[0] is None or "w_all" in param.values[0]])
def test_feddyn_averages_agree_with_the_reference(case, which, key, softmax, world, shared_tmp):
    recipe = world.on_root(lambda: recipe_of(case, softmax, shared_tmp / "run", 10))
    recipe["evaluate"] = {"train": {"every": 1}, "model": which}
    hpcfed.run(recipe, world=world, quiet=True)
    found = flat(shared_tmp / "run" / "model-evaluated.safetensors")
    np.testing.assert_allclose(found, case[key]["10"], rtol=0, atol=TOLERANCE)
