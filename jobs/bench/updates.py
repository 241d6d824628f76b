"""Accuracy and bytes sent by parts of ``updates``, and accuracy of robust means against five attackers of 100 clients.

    python jobs/bench/updates.py runs/mnist/mnist-dir0.3-100.h5 [--rounds 40] [--seeds 1]

The recipe is jobs/recipes/mnist/fedavg.yaml with one epoch a round, on the federation of jobs/workstation/mnist.sh;
accuracy is the mean of the last five rounds' and of the seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import hpcfed

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


def measured(data: Path, rounds: int, seeds: int, **lists: list[Any]) -> tuple[float, int, float]:
    """Return accuracy, bytes sent up, and the median norm of a client's update."""
    accuracy, sent, norms = [], 0, list[float]()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            about = {"data": str(data.resolve()), "rounds": rounds, "seed": seed, "output": f"{folder}/run"}
            rows = hpcfed.run(str(RECIPE), EPOCHS, **about, **lists, quiet=True).metrics
        accuracy += [row["test_accuracy"] for row in rows[-5:]]
        sent, norms = rows[-1]["bytes_up"], norms + [row["mean_delta_sq"] ** 0.5 for row in rows]
    return float(np.mean(accuracy)), sent, float(np.median(norms))


def tables(data: Path, rounds: int, seeds: int) -> Iterator[str]:
    """Yield the lines of both tables."""
    yield from ("| updates | accuracy | MB up | √(mean ‖Δ_i‖²) |", "|---|---|---|---|")
    for name, parts in SENT.items():
        accuracy, sent, norm = measured(data, rounds, seeds, updates=parts)
        yield f"| {name} | {100 * accuracy:.1f} % | {sent / 1e6:.1f} | {norm:.2f} |"
    yield from ("", f"| five attackers of 100 | {' | '.join(ATTACKS)} |", "|---" * (1 + len(ATTACKS)) + "|")
    for name, (updates, means) in HELD.items():
        found = (measured(data, rounds, seeds, updates=[*attack, *updates], means=means) for attack in ATTACKS.values())
        yield f"| {name} | {' | '.join(f'{100 * accuracy:.1f} %' for accuracy, _, _ in found)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    for line in tables(asked.data, asked.rounds, asked.seeds):
        print(line, flush=True)
