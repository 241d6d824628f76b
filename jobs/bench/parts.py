"""What each part of ``updates``, ``means`` and ``down``, noise and masks cost: a round's CPU time over the plain one's.

    python jobs/bench/parts.py [--rounds 12] [--workload mlp] [PART ...]
    python jobs/bench/parts.py --rounds 300 --workload logistic --as-written

``--as-written``: in place of parts the workload's network by factory, as people write it, beside the built-in one.

All simulations are in one process, and take their rounds in turn, so that a machine whose speed wanders slows all
alike; a ratio is the median over rounds of a part's CPU time by that of the plain round before it. Evaluation and
record are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.errors import ends_in_a_line
from hpcfed.lab.bench.workloads import workload, write_workload
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation

SECRET = "HPCFED_BENCH_SECRET"
CLIP: Mapping[str, Any] = {"clip": {"norm": 1.0}}
NOISE: Mapping[str, Any] = {"noise": {"multiplier": 1.0}}
HIDDEN: Mapping[str, Any] = {"weights": "uniform", "secret_seed": {"env": SECRET}}
PARTS: Mapping[str, Mapping[str, Any]] = {
    "topk, 1 %": {"updates": [{"topk": {"fraction": 0.01}}]},
    "randk, 1 %": {"updates": [{"randk": {"fraction": 0.01}}]},
    "sign": {"updates": ["sign"]},
    "quantize, 8 bits": {"updates": [{"quantize": {"bits": 8}}]},
    "cast, float16": {"updates": [{"cast": {"to": "float16"}}]},
    "clip": {"updates": [CLIP]},
    "centred-clip": {"updates": [{"centred-clip": {"norm": 1.0}}]},
    "attack": {"updates": [{"attack": {"clients": [0], "what": "mean"}}]},
    "geometric-median": {"means": ["geometric-median"]},
    "median": {"means": ["median"]},
    "trimmed-mean, 0.2": {"means": [{"trimmed-mean": {"fraction": 0.2}}]},
    "krum": {"means": [{"krum": {"attackers": 2}}]},
    "down: quantize, 8 bits": {"down": [{"quantize": {"bits": 8}}]},
    "noise of the server": {"updates": [CLIP], "means": [NOISE], **HIDDEN},
    "noise of clients": {"updates": [CLIP, NOISE], **HIDDEN},
    "secure_aggregation, one rank": {"updates": [CLIP], "secure_aggregation": {"dropout": 0.1}},
    "private biases": {"parameters": {"private": ["*bias"]}},
    "private biases, one after another": {"parameters": {"private": ["*bias"]}, "local": {"engine": "sequential"}},
    "local.noise": {"local": {"noise": {"clip": 1.0, "multiplier": 1.0}}, **HIDDEN},
}


def simulation_of(recipe: Path, changes: Mapping[str, Any]) -> Simulation:
    """Return the simulation of a recipe with other sections."""
    read = load_recipe(recipe)
    sections = read.model_dump(mode="json", exclude_unset=True)
    of_workload = {key: value for key, value in sections["local"].items() if key != "engine" or "local" not in changes}
    local = {**of_workload, **changes.get("local", {})}
    cohort = {"size": len(json.loads((recipe.parent / "cohorts.json").read_text())[0])}  # noise takes no schedule
    whole = {**sections, **changes, "local": local, "cohort": cohort, "sentinel": "off", "device": "cpu"}
    parts, _ = assemble(resolve(load_recipe(whole)), World())
    return Simulation(parts)


def cpu_of(simulation: Simulation, round: int) -> float:
    """Return the CPU seconds of a round."""
    started = time.process_time()
    simulation.round(round)
    return time.process_time() - started


@ends_in_a_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--as-written", action="store_true")
    asked = parser.parse_args()
    written = {how: {"model": {"factory": factory}} for how, factory in workload(asked.workload).written}
    if asked.as_written and not written:
        parser.error(f"{asked.workload} has no network by factory")
    known = written if asked.as_written else PARTS
    if unknown := [name for name in asked.parts if name not in known]:
        parser.error(f"no part {unknown[0]!r}; parts: {', '.join(known)}")
    os.environ[SECRET] = "3f1c6a0be35d97421b6e0c9d4a7f5328"
    with tempfile.TemporaryDirectory() as folder:
        write_workload(asked.workload, Path(folder))
        recipe = Path(folder) / "recipe.yaml"
        chosen = asked.parts or [*known]
        plain = simulation_of(recipe, {})
        others = {name: simulation_of(recipe, known[name]) for name in chosen}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
        for round in range(1, asked.rounds + 3):
            base = cpu_of(plain, round)
            for name, simulation in others.items():
                times[name].append((cpu_of(simulation, round), base))
        print("| part | CPU ms a round | over the plain round |\n|---|---|---|")
        print(f"| none | {1e3 * median(base for _, base in times[chosen[0]][2:]):.1f} | 1 |")
        for name, pairs in times.items():
            ratio = median(own / base for own, base in pairs[2:])
            print(f"| {name} | {1e3 * median(own for own, _ in pairs[2:]):.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
