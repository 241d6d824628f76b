"""Recipes and federations at random, one of each for a seed: every method, both engines, clients of awkward sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.errors import InputError
from hpcfed.ranks.world import World
from tests.devices import WANTED
from tests.federations import write_federation
from tests.mpi.recipes import METHODS

OF_SGD = "dsgd", "fednova", "scaffold", "scaffold-exp"
"""Methods that know no other client optimizer."""
WIDTHS = 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 70
NETS = '''
"""A module that is trained in tiles by `torch.func.vmap`."""

from torch import nn


def curved(features: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
'''


def write_drawn(folder: Path, seed: int) -> dict[str, Any]:
    """Write the federation of a seed, and return its recipe, which leaves its run in ``run-SEED``."""
    draws = random.Random(seed)
    features, batch = draws.choice(WIDTHS), draws.choice([1, 2, 5, 7, 8, 10, 16, 20, 33])
    classes = draws.choice([None, 2, 3, 4, 10])
    sizes = [_size(draws, batch) for _ in range(draws.randint(1, 9))]
    sizes[0] = max(1, sizes[0])
    path = folder / f"drawn-{seed}.h5"
    numbers = np.random.default_rng(seed)
    weights = numbers.normal(size=(features, classes or 1))

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = numbers.normal(size=(count, features)).astype(np.float32)
        scores = x @ weights + 0.5 * numbers.normal(size=(count, classes or 1))
        return x, (scores.argmax(1).astype(np.uint8) if classes else scores[:, 0].astype(np.float32))

    clients = [samples(size) for size in sizes]
    write_federation(path, clients, num_classes=classes, test=samples(draws.randint(1, 60)), content=f"drawn-{seed}")
    (folder / "drawn_nets.py").write_text(NETS, encoding="utf-8")
    recipe: dict[str, Any] = {"data": str(path), "device": WANTED, "seed": seed, "output": str(folder / f"run-{seed}")}
    recipe |= _recipe(draws, features, classes or 1, len(sizes), batch, folder)
    on_the_way = random.Random(f"{seed}, on the way")
    changed = {**recipe, **_on_the_way(on_the_way, recipe)}
    if on_the_way.random() < 0.25:
        changed["down"] = [on_the_way.choice([{"quantize": {"bits": 8}}, {"cast": {"to": "float16"}}])]
    return changed if _is_possible(changed) else recipe


def _is_possible(recipe: dict[str, Any]) -> bool:
    """Whether a recipe would run: not all methods go with all that may happen to updates."""
    try:
        assemble(resolve(load_recipe(recipe)), World())
    except InputError:
        return False
    return True


def _size(draws: random.Random, batch: int) -> int:
    """Samples of a client: none, one, fewer than a minibatch, or whole minibatches and a few more."""
    kind = draws.randrange(8)
    if kind < 2:
        return kind
    if kind == 2:
        return draws.randint(1, batch)
    return draws.randint(1, 3) * batch + draws.choice([0, 1, 1, 2, 3, draws.randrange(batch)])


def _recipe(
    draws: random.Random, features: int, outputs: int, num_clients: int, batch: int, folder: Path
) -> dict[str, Any]:
    method = draws.choice(list(METHODS))
    optimizer = "sgd" if method in OF_SGD else draws.choice(["sgd", "sgd", "sgd", "adam", "yogi"])
    local: dict[str, Any] = {"batch_size": draws.choice([batch] * 5 + ["full"]), "lr": 0.01, "optimizer": optimizer}
    local["engine"] = draws.choice(["batched", "batched", "sequential", "auto"])
    module = _model(draws, features, outputs)
    may_tile = local["engine"] == "batched" and method != "dsgd"  # whose batches are full
    if may_tile and local["batch_size"] != "full" and "factory" not in module:
        local["tile"] = draws.choice(["auto", "auto", 1, 2, 3, 5])
    if draws.random() < 0.4:
        local["weight_decay"] = draws.choice([1e-3, 0.1])
    if draws.random() < 0.3 and method != "dsgd":
        local |= {"clip_norm": draws.choice([0.1, 1.0]), "clip": draws.choice(["all", "linear"])}
    if optimizer == "sgd" and method != "dsgd" and draws.random() < 0.5:
        local["momentum"] = draws.choice([0.5, 0.9])
    found: dict[str, Any] = {"rounds": draws.randint(2, 6), "algorithm": {"name": method, **METHODS[method]}}
    work = draws.choice(["epochs", "steps", "budget"])
    local[{"epochs": "epochs"}.get(work, "steps")] = draws.randint(1, 2) if work == "epochs" else draws.randint(1, 9)
    if work == "budget":
        found["budget"] = {"low": 1, "high": local["steps"] + 1}
        if method != "dsgd" and (optimizer != "sgd" or "momentum" in local):
            found["guess"] = draws.choice(["none", 2, "remaining", "limit"])
    found |= {"local": local, "model": module, "dtype": draws.choice(["float32", "float64"])}
    if "factory" in module:
        found["python_path"] = [str(folder)]
    cohort: dict[str, Any] = draws.choice(
        [{}, {"size": draws.randint(1, num_clients)}, {"fraction": 0.5, "sampling": "bernoulli"}]
    )
    averages = ["last", "last-two", "step-average", "client-average"]
    averages += [] if method == "fednova" else ["cohort-average"]
    evaluate = {"model": draws.choice(averages), "batch_size": draws.choice([1, 7, 1000])}
    if draws.random() < 0.3:
        evaluate["train"] = {"every": 1}
    return found | {
        "cohort": cohort,
        "evaluate": evaluate,
        "loss": {"reduction": draws.choice(["mean", "mean", "sum"])},
        "client_state": draws.choice(["device", "host", "disk"]),
        "placement": draws.choice(["static", "balanced"]),
        "on_bad_client": draws.choice(["stop", "skip"]),
        "weights": draws.choice([None, "uniform"]),
    }


def _on_the_way(draws: random.Random, recipe: dict[str, Any]) -> dict[str, Any]:
    """Draw what happens to updates on their way: parts of the lists, masks, noise, private parameters, or nothing."""
    clip: dict[str, Any] = {"clip": {"norm": draws.choice([0.1, 1.0]), "scales": {}}}
    feedback = {"feedback": draws.random() < 0.7}
    chosen = draws.choice([{"topk": {"fraction": 0.3, **feedback}}, {"randk": {"fraction": 0.3, **feedback}}])
    bits = {"bits": draws.choice([2, 4, 8]), "block": draws.choice(["tensor", 3])}
    coded = draws.choice([{"quantize": bits}, {"sign": feedback}, {"cast": {"to": "bfloat16"}}])
    what = draws.choice(["own", "own", "mean", "labels"])
    attack = {"attack": {"fraction": 0.3, "factor": -2.0, "what": what}}
    robust = ["median", {"trimmed-mean": {"fraction": 0.2}}, {"krum": {"attackers": 1}}, "geometric-median"]
    kind = draws.choice(
        ["nothing"] * 4 + ["coded", "coded", "bounded", "robust", "masked", "noised", "steps", "private"]
    )
    noise, quiet = {"multiplier": 0.5}, {"evaluate": {"batch_size": 7}, "weights": "uniform", "on_bad_client": "stop"}
    of_sums = {"evaluate": {**recipe["evaluate"], "model": draws.choice(["last", "last-two"])}}
    match kind:
        case "coded":
            return of_sums | {"updates": draws.choice([[chosen], [coded], [chosen, coded]])}
        case "bounded":
            return of_sums | {"updates": [attack, draws.choice([clip, {"centred-clip": {"norm": 0.5}}])]}
        case "robust":
            return of_sums | {"updates": draws.choice([[], [attack], [coded]]), "means": [draws.choice(robust)]}
        case "masked":
            masks = {"secure_aggregation": {"dropout": draws.choice([0.0, 0.3]), "survivors": 2}}
            return of_sums | masks | {"updates": [clip], "on_bad_client": "stop"}
        case "noised":
            at_clients = {"updates": [clip, {"noise": noise}]}
            return quiet | draws.choice([at_clients, {"updates": [clip], "means": [{"noise": noise}]}])
        case "steps":
            local = {key: value for key, value in recipe["local"].items() if key != "tile"}
            return quiet | {"local": {**local, "engine": "auto", "noise": {**noise, "clip": 1.0}}}
        case "private":
            first = draws.choice([0, 1])
            roles = {"private": ["*bias"], **({"private_first": first} if first else {})}
            apart = ("tile", "engine") if first or "factory" in recipe["model"] else ()
            engine = {"local": {key: value for key, value in recipe["local"].items() if key not in apart}}
            return engine | {"parameters": roles, "evaluate": {"every": 0, "clients": {"every": 1}}}
    return {}


def _model(draws: random.Random, features: int, outputs: int) -> dict[str, Any]:
    kind = draws.choice(["linear", "mlp", "mlp", "mlp", "curved"])
    if kind == "linear":
        return {"name": "linear", "bias": draws.random() < 0.7}
    if kind == "mlp":
        return {"name": "mlp", "hidden": [draws.choice(WIDTHS) for _ in range(draws.randint(1, 2))]}
    return {
        "factory": "drawn_nets:curved",
        "args": {"features": features, "hidden": draws.choice(WIDTHS), "outputs": outputs},
    }
