"""Runs of ``bits: portable`` in one process: all methods, what else enters a linear model's result, and a native one.

python -m tests.cli.portable_runs FOLDER NAME ...    # prints each run's digests as JSON; without names, all
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hpcfed
from tests.federations import write_federation
from tests.mpi.recipes import METHODS, small, write_small

STEPS = {"steps": 5, "batch_size": 7, "lr": 0.1, "lr_decay": 0.93}
UNEQUAL = {"low": 1, "high": 7}
RUNS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"algorithm": {"name": name, **keys}, "budget": UNEQUAL} for name, keys in METHODS.items()},
    "native": {"bits": "native"},
    "float64": {"dtype": "float64"},
    "debiased": {"algorithm": {"name": "fedadam", "debias": "adam", "tau": 0.1}},
    "eps-decay": {"algorithm": {"name": "fedexp", "eps_decay": 0.9}},
    "act": {"algorithm": {"name": "fedsplit", "variant": "act"}},
    "product": {"algorithm": {"local": "prox", "normalize": "steps", "server": "yogi", "mu": 0.1}, "budget": UNEQUAL},
    "momentum": {"local": {**STEPS, "momentum": 0.6, "weight_decay": 0.01}, "guess": "remaining", "budget": UNEQUAL},
    "limit": {"local": {**STEPS, "momentum": 0.6}, "guess": "limit", "budget": UNEQUAL},
    "clip": {"local": {"epochs": 2, "batch_size": 6, "clip_norm": 0.3}, "algorithm": {"name": "fedprox", "mu": 0.2}},
    "clip-linear": {"local": {"steps": 3, "batch_size": "full", "clip_norm": 0.3, "clip": "linear"}},
    "averages": {"evaluate": {"model": "client-average", "clients": {"every": 1, "models": ["global", "last"]}}},
    "steps": {"evaluate": {"model": "step-average", "train": {"every": 1}}, "algorithm": {"name": "fedexp"}},
    "without": {"cohort": {"without": [1]}, "algorithm": {"name": "scaffold"}},
    "least-squares": {"model": {"name": "linear"}},
    "quadratic": {"model": {"name": "quadratic"}, "algorithm": {"name": "fedexp"}, "dtype": "float64"},
    "sum": {"loss": {"reduction": "sum"}, "local": {"steps": 3, "lr": 0.01}},
    "hashes": {
        "update_hashes": True,
        "cohort": {"fraction": 0.5, "sampling": "bernoulli"},
        "model": {"name": "linear", "bias": False},
    },
}
"""Name → changes of `small`."""


OF_NUMBERS = ("least-squares", "quadratic")
"""Runs on a regression."""


def write_numbers(folder: Path) -> None:
    """Write ``numbers.h5``: three clients of a regression with two targets."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(size, 9)).astype(np.float32) for size in (20, 33, 41, 15)]
    clients = [(part, part[:, :2] + 0.3 * rng.normal(size=(len(part), 2)).astype(np.float32)) for part in x]
    write_federation(folder / "numbers.h5", clients[:3], test=clients[3], content="numbers")


def digests(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the SHA-256 of each run's model and the last link of its chain of rounds."""
    data = str(write_small(folder))
    write_numbers(folder)
    found = {}
    for name in names:
        changes = {"model": {"name": "logistic"}, "local": STEPS, "bits": "portable", "data": data, **RUNS[name]}
        if name in OF_NUMBERS:
            changes["data"] = str(folder / "numbers.h5")
        run = folder / name
        hpcfed.run(small(run, **changes), quiet=True)
        chain = json.loads((run / "certificate.json").read_text(encoding="utf-8"))["chain"]
        found[name] = [hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest(), chain]
    return found


if __name__ == "__main__":
    place, *chosen = sys.argv[1:]
    print(json.dumps(digests(Path(place), chosen or list(RUNS))))
