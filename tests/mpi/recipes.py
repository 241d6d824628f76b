"""Small recipes on a small federation, for tests that run them in this process or start a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcfed.algorithms import examples
from hpcfed.config.load import dump_yaml
from tests.devices import WANTED
from tests.federations import blobs, write_federation

METHODS: Mapping[str, Mapping[str, Any]] = examples()
"""Parameters of each method, away from those at which it is another method."""


ORDERED = """
import numpy as np

from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.algorithms.scaffold import ControlVariates
from hpcfed.types import Method


class Ordered:
    def factors(self, effective_steps, steps, shares, prox_mu):
        return np.arange(1.0, 1 + len(steps))


def method():
    return Method("ordered", ControlVariates(), ServerStep(), Ordered())
"""
"""A module of the user's: SCAFFOLD with factors 1, 2, … by place in the cohort."""


def write_small(folder: Path, num_clients: int = 5, **sizes: int) -> Path:
    """Write ``small.h5`` into a folder: clients of different sizes, 12 features, 4 classes, a test set."""
    return write_federation(folder / "small.h5", **blobs(num_clients, **sizes), content=f"small-{num_clients}")


def small(output: Path | str | None, **changes: Any) -> dict[str, Any]:
    """Return a recipe for ``small.h5`` that leaves its run in `output`; a keyword replaces a section, None drops it."""
    recipe: dict[str, Any] = {
        "data": "small.h5",
        "model": {"name": "mlp", "hidden": [8]},
        "rounds": 3,
        "local": {"steps": 4, "batch_size": 10, "lr": 0.1},
        "algorithm": {"name": "fedavg"},
        "evaluate": {"batch_size": 64},
        "device": WANTED,
        "output": output and str(output),
    }
    recipe |= changes
    return {key: value for key, value in recipe.items() if value is not None}


def write_recipe(folder: Path, name: str = "recipe.yaml", **changes: Any) -> Path:
    """Write `small` as a YAML file beside ``small.h5``; the run goes to ``run/`` where it is started."""
    path = folder / name
    path.write_text(dump_yaml(small(changes.pop("output", "run"), **changes)), encoding="utf-8")
    return path
