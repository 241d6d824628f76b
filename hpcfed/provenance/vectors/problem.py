"""The problem of the conformance vectors: four clients of 3 to 6 samples, 3 classes, 3 features in multiples of 1/8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.provenance.vectors.cases import PROTOCOLS, Case

SIZES, FEATURES, CLASSES = (3, 4, 5, 6), 3, 3
ROUNDS = 4


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each client's n samples: features x, (n, 3) float64, and classes y, (n,)."""
    found = []
    for client, size in enumerate(SIZES):
        sample, feature = np.arange(size)[:, None], np.arange(FEATURES)[None, :]
        x = ((7 * sample + 5 * feature + 3 * client + sample * feature) % 17 - 8) / 8
        found.append((x, (np.arange(size) ** 2 + client) % CLASSES))
    return found


def write_problem(path: Path) -> None:
    """Write the problem as a federation file."""
    both = clients()
    with h5py.File(path, "w") as file:
        named = {"format": "hpcfed-federation", "version": 1, "name": path.stem, "task": "classification"}
        file.attrs.update({**named, "num_classes": CLASSES})
        file["train/x"] = np.concatenate([x for x, _ in both])
        file["train/y"] = np.concatenate([y for _, y in both])
        file["train/offsets"] = np.cumsum([0, *SIZES], dtype=np.int64)


def recipe_of(algorithm: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """Return a method's recipe: softmax regression on the file `data`, 3 of 4 clients a round, 3 steps of 2 samples."""
    return {
        "data": str(data),
        "model": {"name": "linear"},
        "dtype": "float64",
        "device": "cpu",
        "rounds": ROUNDS,
        "cohort": {"size": 3},
        "local": {"steps": 3, "batch_size": 2, "lr": 0.25, "lr_decay": 0.5, "engine": "sequential"},
        "algorithm": dict(algorithm),
        "evaluate": {"every": 0},
        "output": str(data.parent / "run"),
    }


def recipe_of_case(case: Case, data: Path) -> dict[str, Any]:
    """Return the recipe of a case: cohort and local steps of its protocol, its method, and its further changes."""
    protocol, changes = PROTOCOLS[case.protocol], case.changes
    local = {**protocol["local"], **changes.get("local", {}), "engine": "sequential"}
    return {**recipe_of(case.algorithm, data), **changes, "cohort": protocol["cohort"], "local": local}
