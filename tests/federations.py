"""Small federation files for tests, written from the format's specification without hpcfed's writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]


def write_federation(
    path: Path,
    clients: Sequence[Arrays],
    *,
    num_classes: int | None = None,
    test: Arrays | None = None,
    content: str | None = None,
    task: str | None = None,
) -> Path:
    """Write clients, (x, y) pairs; without a task a regression where there are no classes, else a classification."""
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "hpcfed-federation", "version": 1, "name": path.stem})
        file.attrs["task"] = task or ("regression" if num_classes is None else "classification")
        if num_classes is not None:
            file.attrs["num_classes"] = num_classes
        if content is not None:
            file.attrs["content"] = content
        file["train/x"] = np.concatenate([x for x, _ in clients])
        file["train/y"] = np.concatenate([y for _, y in clients])
        file["train/offsets"] = np.cumsum([0, *(len(y) for _, y in clients)], dtype=np.int64)
        if test is not None:
            file["test/x"], file["test/y"] = test
    return path


def blobs(num_clients: int, *, samples: int = 40, features: int = 12, classes: int = 4, seed: int = 0) -> dict:
    """Clients of different sizes and class mixtures, and a test set, as arguments of `write_federation`."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, features))

    def draw(count: int, mixture: np.ndarray) -> Arrays:
        y = rng.choice(classes, size=count, p=mixture).astype(np.uint8)
        return (centres[y] + 0.7 * rng.normal(size=(count, features))).astype(np.float32), y

    sizes = rng.integers(samples // 2, 2 * samples, size=num_clients)
    clients = [draw(int(size), rng.dirichlet(np.full(classes, 0.5))) for size in sizes]
    return {"clients": clients, "num_classes": classes, "test": draw(150, np.full(classes, 1 / classes))}
