"""Accuracy and bytes sent by parts of ``updates``, accuracy under attack, and what privacy costs.

    python jobs/bench/updates.py runs/mnist/mnist-dir0.3-100.h5 [--table sent --table held] [--rounds 40] [--seeds 1]
    python jobs/bench/updates.py --table clients runs/mnist/mnist-dir0.3-1000.h5
    python jobs/bench/updates.py --table sites runs/mnist/mnist-dir0.3-10.h5

The recipe is jobs/recipes/mnist/fedavg.yaml with one epoch a round, on the federation of jobs/workstation/mnist.sh, or
one prepared likewise with other ``--clients``; accuracy is the mean of the last five rounds', and of the seeds with
their range. Runs that diverge are counted, and in no mean.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hpcfed
from hpcfed.errors import ends_in_a_line

RECIPE, EPOCHS = Path(__file__).parents[1] / "recipes" / "mnist" / "fedavg.yaml", ["local.epochs=1"]
SENT: Mapping[str, list[Any]] = {
    "plain": [],
    "quantize, 8 bits": [{"quantize": {"bits": 8}}],
    "quantize, 4 bits": [{"quantize": {"bits": 4}}],
    "topk, 1 %": [{"topk": {"fraction": 0.01}}],
    "sign": ["sign"],
}
NORM = 1.0
"""A bound of the size of an honest client's update."""
HELD: Mapping[str, tuple[list[Any], list[Any]]] = {
    "mean": ([], []),
    "clip": ([{"clip": {"norm": NORM}}], []),
    "centred-clip": ([{"centred-clip": {"norm": NORM}}], []),
    "geometric-median": ([], ["geometric-median"]),
    "median": ([], ["median"]),
    "trimmed-mean, 0.2": ([], [{"trimmed-mean": {"fraction": 0.2}}]),
    "krum, 2 attackers, 5 selected": ([], [{"krum": {"attackers": 2, "selected": 5}}]),
}
CLIENTS = [3, 23, 43, 63, 83]
ATTACKS: Mapping[str, list[Any]] = {
    "none": [],
    "sends −10 Δ": [{"attack": {"clients": CLIENTS, "factor": -10.0}}],
    "flips labels": [{"attack": {"clients": CLIENTS, "what": "labels"}}],
}
SECRET = "HPCFED_BENCH_SECRET"
HIDDEN = {"cohort": {"fraction": 0.1, "sampling": "bernoulli"}, "weights": "uniform"}
"""Cohorts of 100 of 1,000 clients, at client level."""
SITES = {"cohort": {}, "weights": "uniform"}
STEPS = {"epochs": None, "steps": 20, "batch_size": 200, "lr": 0.25}
"""At sample level: minibatches large enough for their noise."""
MODELS: Mapping[str, dict[str, Any]] = {
    "mlp, 178,110 parameters": {"name": "mlp", "hidden": [200, 100]},
    "logistic, 7,850 parameters": {"name": "logistic"},
}


class Measured(NamedTuple):
    """What runs of some seeds come to.

    Attributes:
        accuracies: of each seed that did not diverge, the mean of the last five rounds.
        diverged: how many did.
        sent: bytes sent up.
        norm: the median norm of a client's update.
        epsilon: of the last run; NaN where nothing is noised.
    """

    accuracies: list[float]
    diverged: int
    sent: int
    norm: float
    epsilon: float

    def __str__(self) -> str:
        if not self.accuracies:
            return "diverges"
        percents = [100 * accuracy for accuracy in self.accuracies]
        mean = f"{np.mean(percents):.1f} %"
        spread = f" ({min(percents):.1f}–{max(percents):.1f})" if len(percents) > 1 else ""
        return (
            mean + spread + (f"; {self.diverged} of {len(percents) + self.diverged} diverge" if self.diverged else "")
        )


def measured(data: Path, rounds: int, seeds: int, changes: list[str] = EPOCHS, **keys: Any) -> Measured:
    """Return what runs of some seeds come to."""
    accuracies, diverged, sent, norms, epsilon = list[float](), 0, 0, list[float](), float("nan")
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            about = {"data": str(data.resolve()), "rounds": rounds, "seed": seed, "output": f"{folder}/run"}
            try:
                rows = hpcfed.run(str(RECIPE), changes, **about, **keys, quiet=True).metrics
            except hpcfed.Diverged:
                diverged += 1
                continue
        accuracies.append(float(np.mean([row["test_accuracy"] for row in rows[-5:]])))
        sent, epsilon = rows[-1]["bytes_up"], rows[-1].get("epsilon", epsilon)
        norms += [row["mean_delta_sq"] ** 0.5 for row in rows if row["mean_delta_sq"] is not None]
    return Measured(accuracies, diverged, sent, float(np.median(norms or [np.nan])), epsilon)


def sent(data: Path, rounds: int, seeds: int, only: list[str]) -> Iterator[str]:
    """Yield the lines of the table of what is sent."""
    yield from ("| updates | accuracy | MB up | √(mean ‖Δ_i‖²) |", "|---|---|---|---|")
    for name, parts in SENT.items():
        if not only or name in only:
            found = measured(data, rounds, seeds, updates=parts)
            yield f"| {name} | {found} | {found.sent / 1e6:.1f} | {found.norm:.2f} |"


def held(data: Path, rounds: int, seeds: int, only: list[str]) -> Iterator[str]:
    """Yield the lines of the table of attackers."""
    yield from (f"| five attackers of 100 | {' | '.join(ATTACKS)} |", "|---" * (1 + len(ATTACKS)) + "|")
    for name, (updates, means) in HELD.items():
        if not only or name in only:
            found = (
                measured(data, rounds, seeds, updates=[*attack, *updates], means=means) for attack in ATTACKS.values()
            )
            yield f"| {name} | {' | '.join(map(str, found))} |"


def clients(data: Path, rounds: int, seeds: int, only: list[str]) -> Iterator[str]:
    """Yield the lines of the table of client-level privacy."""
    noise = {"means": [{"noise": {"epsilon": 8.0}}], "secret_seed": {"env": SECRET}}
    lists: Mapping[str, dict[str, Any]] = {"none": {}, "ε = 8": noise}
    yield from _private(data, rounds, seeds, only, lists, {**HIDDEN, "updates": [{"clip": {"norm": NORM}}]})


def sites(data: Path, rounds: int, seeds: int, only: list[str]) -> Iterator[str]:
    """Yield the lines of the table of sample-level privacy."""
    noise = {"local": {**STEPS, "noise": {"clip": 1.0, "epsilon": 8.0}}, "secret_seed": {"env": SECRET}}
    yield from _private(data, rounds, seeds, only, {"none": {"local": STEPS}, "ε = 8": noise}, SITES)


def _private(
    data: Path, rounds: int, seeds: int, only: list[str], lists: Mapping[str, dict[str, Any]], common: dict[str, Any]
) -> Iterator[str]:
    os.environ[SECRET] = "3f1c6a0be35d97421b6e0c9d4a7f5328"
    yield from (f"| model | {' | '.join(lists)} |", "|---" * (1 + len(lists)) + "|")
    for name, model in MODELS.items():
        if not only or name.partition(",")[0] in only:
            changes = [] if "local" in lists["none"] else EPOCHS
            found = [measured(data, rounds, seeds, changes, model=model, **common, **keys) for keys in lists.values()]
            yield f"| {name} | {' | '.join(map(str, found))} |"


TABLES: Mapping[str, Callable[[Path, int, int, list[str]], Iterator[str]]] = {
    "sent": sent,
    "held": held,
    "clients": clients,
    "sites": sites,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--table", action="append", choices=TABLES, help="default: sent and held")
    parser.add_argument("--only", action="append", default=[], help="a row, by its name")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    rows = [*SENT, *HELD, *(name.partition(",")[0] for name in MODELS)]
    if unknown := [name for name in asked.only if name not in rows]:
        parser.error(f"no row {unknown[0]!r}; rows: {'; '.join(rows)}")
    with ends_in_a_line():
        for table in asked.table or ["sent", "held"]:
            for line in TABLES[table](asked.data, asked.rounds, asked.seeds, asked.only):
                print(line, flush=True)
            print()
