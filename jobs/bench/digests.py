"""SHA-256 of the models and records of small runs, a line each: equal before and after a change that keeps all bits.

    python jobs/bench/digests.py > before.txt;  …;  python jobs/bench/digests.py | diff before.txt -

Every method with each engine; guesses, budgets, clients' states, both reductions, float32 and float64, evaluated
averages. A digest is of the models' bytes and of the record's columns in `COLUMNS`. It depends on the processor and the
torch build, as bits do.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hpcfed
from hpcfed.ranks.world import World

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.mpi.recipes import METHODS, small, write_small

COLUMNS = (
    *("round", "cohort", "local_loss", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "clients"),
    *("skipped", "server_lr", "delta_sq", "mean_delta_sq", "params_up", "params_down", "gradients"),
)
MOMENTUM = {"steps": 9, "batch_size": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.6}
UNEQUAL = {"low": 1, "high": 7}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "gel-remaining": {"budget": UNEQUAL, "local": MOMENTUM, "guess": "remaining"},
    "gel-limit": {"budget": UNEQUAL, "local": MOMENTUM, "guess": "limit"},
    "gel-adam": {"budget": UNEQUAL, "guess": "remaining", "local": {"steps": 8, "lr": 0.01, "optimizer": "adam"}},
    "yogi": {"local": {"epochs": 1, "batch_size": 16, "lr": 0.01, "optimizer": "yogi", "clip_norm": 0.5}},
    "clip-linear": {"local": {"steps": 3, "batch_size": "full", "lr": 0.1, "clip_norm": 0.3, "clip": "linear"}},
    "fast": {"reduction": "fast"},
    "fast-scaffold-budget": {"reduction": "fast", "algorithm": {"name": "scaffold"}, "budget": UNEQUAL},
    "scaffold-budget": {"algorithm": {"name": "scaffold"}, "budget": UNEQUAL, "client_state": "disk"},
    "fednova-budget": {"algorithm": {"name": "fednova"}, "budget": UNEQUAL},
    "product": {"algorithm": {"local": "prox", "normalize": "steps", "server": "yogi", "mu": 0.1}, "budget": UNEQUAL},
    "fedsplit-act": {"algorithm": {"name": "fedsplit", "variant": "act"}},
    "client-average": {"evaluate": {"model": "client-average", "clients": {"every": 1, "models": ["global", "last"]}}},
    "last-two": {"algorithm": {"name": "fedexp"}, "evaluate": {"model": "last-two", "train": {"every": 1}}},
    "bernoulli": {"cohort": {"fraction": 0.4, "sampling": "bernoulli"}, "weights": "uniform"},
    "logistic": {"model": {"name": "logistic"}},
    "fine-tuned": {
        "evaluate": {"clients": {"every": 2, "models": ["global", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}}}
    },
}


def recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the changes of each recipe."""
    for engine in ("batched", "sequential"):
        for method, keys in METHODS.items():
            local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": engine}
            dtype = "float64" if engine == "sequential" else "float32"
            yield f"{method} {engine} {dtype}", {"algorithm": {"name": method, **keys}, "local": local, "dtype": dtype}
    yield from ((name, dict(changes)) for name, changes in OTHERS.items())


def digest(run: hpcfed.Result) -> str:
    """Return the SHA-256 of a run's models and record."""
    found = hashlib.sha256()
    for name in ("model.safetensors", "model-evaluated.safetensors"):
        path = run.folder / name
        found.update(path.read_bytes() if path.exists() else b"none")
    for row in run.metrics:
        found.update(json.dumps({name: row[name] for name in COLUMNS}, sort_keys=True).encode())
    return found.hexdigest()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = str(write_small(folder, 8))
        for number, (label, changes) in enumerate(recipes()):
            recipe = small(folder / str(number), **{"data": data, "cohort": {"size": 5}, "rounds": 4, **changes})
            print(f"{digest(hpcfed.run(recipe, world=World(), quiet=True))}  {label}", flush=True)


if __name__ == "__main__":
    main()
