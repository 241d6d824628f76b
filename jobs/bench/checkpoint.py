"""Cost of checkpoints, and memory over the rounds: SCAFFOLD over 300 clients, all with a state by round 20.

Usage: checkpoint.py (cost | memory) FOLDER [RANKS]

``cost``: d = 1e6; runs the same rounds without and with checkpoints of all 300 states, and prints the seconds of a
round in both, and how much longer the run takes per checkpoint. ``memory``: d = 3e4; prints the resident memory of the
largest rank after round 20 and after round 200, in MB, and their ratio, without checkpoints and with one every 20
rounds. FOLDER must be empty, on the disk to be measured.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median

import numpy as np
import psutil

from data_prep.dataset import Dataset
from data_prep.write import write
from hpcfed.config.load import dump_yaml

NUM_CLIENTS, SAMPLES, COHORT, TOUCHED_BY = 300, 20, 15, 20


def prepare(folder: Path, features: int, hidden: int, rounds: int) -> Path:
    """Write a federation, cohorts of clients in turn, and a recipe; return the recipe."""
    rng = np.random.Generator(np.random.Philox(0))
    count = NUM_CLIENTS * SAMPLES
    x = rng.standard_normal((count, features)).astype(np.float32)
    dataset = Dataset(name="bench", task="classification", x=x, y=rng.integers(10, size=count), num_classes=10)
    owner = np.repeat(np.arange(NUM_CLIENTS), SAMPLES)
    write(folder / "federation.h5", dataset, owner, NUM_CLIENTS, partition={"scheme": "equal"})
    in_turn = np.arange(rounds * COHORT).reshape(rounds, COHORT) % NUM_CLIENTS
    (folder / "cohorts.json").write_text(json.dumps(in_turn.tolist()))
    recipe = {
        "name": "bench",
        "data": "federation.h5",
        "model": {"name": "mlp", "hidden": [hidden]},
        "rounds": rounds,
        "cohort": {"schedule": "cohorts.json"},
        "local": {"steps": 2, "batch_size": 10, "lr": 0.01},
        "algorithm": {"name": "scaffold"},
        "evaluate": {"every": 0},
        "device": "cpu",
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder / "recipe.yaml"


def start(recipe: Path, ranks: int, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a run of the recipe, which leaves its record in ``run/`` beside it."""
    output = recipe.parent / "run"
    shutil.rmtree(output, ignore_errors=True)
    launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-m", "hpcfed", "run", str(recipe), "-q", f"output={output}", *overrides]
    return subprocess.Popen([*launcher, *command])


def seconds_of_rounds(recipe: Path, ranks: int, every: int) -> list[float]:
    """Return the seconds of the rounds after all clients have a state."""
    if start(recipe, ranks, f"checkpoint={{every: {every}, keep: 1}}").wait() != 0:
        raise SystemExit("the run failed")
    record = (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"]["total"] for line in record][TOUCHED_BY:]


def cost(folder: Path, ranks: int) -> None:
    """Print what a checkpoint adds to the rounds that it is written beside."""
    recipe = prepare(folder, features=784, hidden=1250, rounds=60)
    without, with_them = (seconds_of_rounds(recipe, ranks, every) for every in (0, 20))
    size = sum(path.stat().st_size for path in (folder / "run" / "checkpoints").iterdir())
    count = len(with_them) // 20
    print(f"a checkpoint: {size / 1e6:.0f} MB; {count} in {len(with_them)} rounds on {ranks} ranks")
    print(f"a round: {median(without):.3f} s without (mean {mean(without):.3f}), {median(with_them):.3f} s with")
    print(f"a checkpoint delays the run by {(sum(with_them) - sum(without)) / count:.2f} s of training")


def memory(folder: Path, ranks: int) -> None:
    recipe = prepare(folder, features=60, hidden=430, rounds=202)
    for every in (0, 20):
        found = _watched(start(recipe, ranks, f"checkpoint={{every: {every}}}"), folder / "run" / "metrics.jsonl")
        sizes = ", ".join(f"round {round} {size:.1f} MB" for round, size in found.items())
        print(f"checkpoint every {every}: {sizes}; round 200 over round 20: {found[200] / found[20]:.4f}")


def _watched(job: subprocess.Popen[bytes], record: Path) -> dict[int, float]:
    """Return the resident memory in MB, by round."""
    found: dict[int, float] = {}
    while job.poll() is None:
        done = len(record.read_bytes().splitlines()) if record.exists() else 0
        for round in (20, 40, 100, 200):
            if done >= round and round not in found:
                found[round] = _resident(job.pid)
        time.sleep(0.002)
    return found


def _resident(pid: int) -> float:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return max(process.memory_info().rss for process in processes) / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "memory"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int, nargs="?", default=1)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if any(asked.folder.iterdir()):
        parser.error(f"{asked.folder} is not empty")
    {"cost": cost, "memory": memory}[asked.what](asked.folder.resolve(), asked.ranks)
