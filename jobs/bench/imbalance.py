"""Load imbalance in CPU seconds of training by rank: 1,000 clients of lognormal sizes, cohorts of 200.

Usage: mpirun -n 4 python jobs/bench/imbalance.py FOLDER [ROUNDS]

Prints, for ``placement: static`` and ``balanced``, the largest rank's CPU seconds of a round over the ranks' mean: the
median, the mean and the worst over ROUNDS rounds (20), after 5 that are not counted. It trains an MLP 64-64-10 for 2
epochs, with SCAFFOLD, whose clients have a state that moves. CPU seconds, so that more ranks than cores do no harm.
"""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.write import write
from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.parts import Parts
from hpcfed.ranks.world import World, connect
from hpcfed.simulation import Simulation

CLIENTS, COHORT, SIGMA, MEAN, FEATURES, CLASSES, WARM_UP = 1000, 200, 1.0, 60, 64, 10, 5


def prepare(path: Path) -> None:
    """Write a federation of noise whose client sizes are lognormal."""
    rng = np.random.Generator(np.random.Philox(1))
    sizes = np.maximum(1, (MEAN * rng.lognormal(-(SIGMA**2) / 2, SIGMA, CLIENTS)).astype(np.int64))
    x = rng.standard_normal((int(sizes.sum()), FEATURES), dtype=np.float32)
    dataset = Dataset(
        name="lognormal", task="classification", x=x, y=rng.integers(CLASSES, size=len(x)), num_classes=CLASSES
    )
    write(path, dataset, np.repeat(np.arange(CLIENTS), sizes), CLIENTS, partition={"scheme": "lognormal"})


def recipe(folder: Path, placement: str, rounds: int) -> dict[str, Any]:
    """Return the recipe of the measured run."""
    return {
        "name": placement,
        "data": str(folder / "federation.h5"),
        "model": {"name": "mlp", "hidden": [64]},
        "rounds": rounds,
        "cohort": {"size": COHORT},
        "local": {"epochs": 2, "batch_size": 10, "lr": 0.01},
        "algorithm": {"name": "scaffold"},
        "placement": placement,
        "device": "cpu",
        "output": str(folder / placement),
    }


class Timed:
    """A rank's share of a round, and the CPU seconds that it took."""

    def __init__(self, training: Callable[[Any], Any]):
        self._training = training
        self.seconds = 0.0

    def __call__(self, given: Any) -> Any:
        started = time.process_time()
        try:
            return self._training(given)
        finally:
            self.seconds = time.process_time() - started


def imbalances(parts: Parts, rounds: int, world: World) -> list[float]:
    """Return the largest over the mean CPU seconds of the ranks, round by round."""
    simulation = Simulation(parts)
    timed = Timed(simulation._training)
    simulation._training = timed  # type: ignore[assignment]
    found = []
    for number in range(1, rounds + 1):
        simulation.round(number)
        seconds = world.gather(timed.seconds)
        found.append(max(seconds) / (sum(seconds) / len(seconds)))
    return found[WARM_UP:]


def main(folder: Path, rounds: int = 20) -> None:
    """Measure both placements, one after the other."""
    world = connect()
    world.on_root(lambda: prepare(folder / "federation.h5"))
    for placement in ("static", "balanced"):
        wanted = recipe(folder, placement, rounds + WARM_UP)
        parts, _ = assemble(world.on_root(lambda: resolve(load_recipe(wanted))), world)  # noqa: B023
        gc.freeze()  # as in a run: no search through all that torch brought along
        with parts.clients:
            found = imbalances(parts, rounds, world)
        if world.is_root:
            ratios = f"median {np.median(found):.3f}, mean {np.mean(found):.3f}, worst {max(found):.3f}"
            print(f"{placement:9} on {world.size} ranks: {ratios}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
