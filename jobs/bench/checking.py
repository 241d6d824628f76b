"""Runs of every method, made on some ranks and verified on others; replays of recorded updates, batched and sequential.

    mpirun -n 4 python jobs/bench/checking.py FOLDER

Each method's run is made on 1 to 4 ranks, spot-checked on another number and verified, all rounds, on a third; two runs
a method, one of each engine, and some with cohorts, numbers and budgets of other kinds. Then a client of each run is
replayed in one process. Prints a line a run, and the numbers that agree.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

import hpcfed
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World, world_over
from tests.mpi.recipes import METHODS, small, write_small

ROUNDS = 8
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "drawn": ("fedexp", {"cohort": {"fraction": 0.5, "sampling": "bernoulli"}}),
    "float64": ("scaffold", {"dtype": "float64"}),
    "unequal": ("feddyn", {"budget": {"low": 1, "high": 7}}),
}
"""Name → method, and further changes of the recipe."""


def world_of(ranks: int) -> World | None:
    """Return the world of the first `ranks` ranks; None on the others."""
    comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < ranks else 1, MPI.COMM_WORLD.rank)
    return world_over(comm) if MPI.COMM_WORLD.rank < ranks else None


def recipes(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the runs by their folders: 8 rounds each, with spaced checkpoints and hashes of updates."""
    local = {"steps": 4, "batch_size": 10, "lr": 0.1}
    chosen = {
        f"{method}-{engine}": (method, {"local": {**local, "engine": engine}})
        for method in METHODS
        for engine in ("batched", "sequential")
    }
    trail = {"checkpoint": {"every": 1, "keep": "spaced"}, "update_hashes": True}
    usual = {"rounds": ROUNDS, "cohort": {"size": 3}, "local": local, **trail}
    found = {}
    for name, (method, changes) in {**chosen, **OTHERS}.items():
        algorithm = {"name": method, **METHODS[method]}
        found[folder / name] = small(folder / name, **{**usual, "algorithm": algorithm, **changes})
    return found


def checked(run: Path, world: World | None, rounds: int | None) -> tuple[int, str]:
    """Return the exit code and last line of a verification on some ranks, on every rank."""
    said: list[str] = []
    code = verify(Verification(run, rounds, 0), world, said.append) if world is not None else 0
    return MPI.COMM_WORLD.bcast((code, said[-1] if said else ""))


def main() -> None:
    folder, comm = Path(sys.argv[1]).resolve(), MPI.COMM_WORLD
    if comm.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_small(folder)
    comm.Barrier()
    os.chdir(folder)
    worlds = {ranks: world_of(ranks) for ranks in range(1, comm.size + 1)}
    runs, agreed, spent = recipes(folder), 0, {"run": 0.0, "spot": 0.0, "all": 0.0}
    for number, (run, recipe) in enumerate(runs.items()):
        made, spot, whole = (1 + (number + shift) % comm.size for shift in (0, 1, 2))
        times = [time.perf_counter()]
        if worlds[made] is not None:
            hpcfed.run(recipe, world=worlds[made], quiet=True)
        comm.Barrier()
        times.append(time.perf_counter())
        codes = []
        for ranks, rounds in ((spot, 2), (whole, None)):
            codes.append(checked(run, worlds[ranks], rounds))
            times.append(time.perf_counter())
        for name, first, last in zip(spent, times, times[1:], strict=False):
            spent[name] += last - first
        agreed += all(code == 0 for code, _ in codes)
        if comm.rank == 0:
            print(f"{run.name}: made on {made}; {codes[0][1]}; {codes[1][1]}", flush=True)
    if comm.rank == 0:
        seconds = {name: round(total, 1) for name, total in spent.items()}
        print(f"{agreed} of {len(runs)} runs agree; seconds {seconds}", flush=True)
        found = [
            hpcfed.replay(run, 1 + place % ROUNDS, _first(run, 1 + place % ROUNDS)) for place, run in enumerate(runs)
        ]
        same = sum(one.recorded_hash == one.reported.hash for one in found)
        print(f"{same} of {len(found)} replayed updates have the recorded hash")


def _first(run: Path, round: int) -> int:
    return int(hpcfed.load(run).metrics.loc[round, "cohort"][0])


if __name__ == "__main__":
    main()
