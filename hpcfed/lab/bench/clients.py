"""Benchmark of large federations: rounds with cohorts of 100 clients, drawn from a thousand and from a million."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.write import write
from hpcfed.config.load import dump_yaml
from hpcfed.io.atomic import write_whole
from hpcfed.lab.bench.timing import Contender, ours

SAMPLES, FEATURES, CLASSES, COHORT = 4, 20, 5, 100


def contenders(folder: Path, counts: tuple[int, ...], rounds: int, warm_up: int) -> list[Contender]:
    """Write a federation and a recipe for each number of clients in `counts`; return one contender for each.

    A contender is a run on one rank of `warm_up` rounds and then `rounds` timed ones.
    """
    return [_of_many(folder / str(count), count, rounds, warm_up) for count in counts]


def _of_many(folder: Path, num_clients: int, rounds: int, warm_up: int) -> Contender:
    folder.mkdir()
    rng = np.random.Generator(np.random.Philox(1234))
    count = num_clients * SAMPLES
    x = rng.standard_normal((count, FEATURES), dtype=np.float32)
    y = rng.integers(CLASSES, size=count, dtype=np.uint8)
    owner = np.repeat(np.arange(num_clients), SAMPLES)
    dataset = Dataset(name="clients", task="classification", x=x, y=y, num_classes=CLASSES)
    write(folder / "federation.h5", dataset, owner, num_clients, partition={"scheme": "equal"})
    recipe = {
        "name": "clients",
        "data": "federation.h5",
        "model": {"name": "logistic"},
        "rounds": 1,
        "cohort": {"size": COHORT},
        "local": {"steps": 5, "batch_size": SAMPLES, "lr": 0.1},
        "algorithm": {"name": "fedavg"},
        "evaluate": {"every": 0},
    }
    write_whole(folder / "recipe.yaml", dump_yaml(recipe))
    return replace(ours(folder, rounds, warm_up, ranks=1), name=f"{num_clients:,} clients")
