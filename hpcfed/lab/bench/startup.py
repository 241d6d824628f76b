"""Benchmark of start-up against the unavoidable imports of torch and MPI alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hpcfed.lab.bench.timing import Contender, FinishedProcess, Turn, mpirun, run_command
from hpcfed.ranks.code import python_options

IMPORTS = "import torch; from mpi4py import MPI"


def contenders(folder: Path, ranks: int) -> list[Contender]:
    """Return two contenders on `ranks` ranks: the imports, and a run of one round of the workload in `folder`.

    Whole processes are timed: the round and the shutdown count as start-up, so hpcfed's is slightly overestimated.
    """
    output = folder / f"start-{ranks}"
    launch = [mpirun(), "-n", str(ranks)] if ranks > 1 else []

    def after_run(done: FinishedProcess) -> Turn:
        shutil.rmtree(output)
        return _whole(done)

    run = run_command(folder / "recipe.yaml", ranks, "rounds=1", f"output={output}")
    where = f", {ranks} rank{'s' if ranks > 1 else ''}"
    return [
        Contender(f"imports{where}", [*launch, sys.executable, *python_options(), "-c", IMPORTS], _whole),
        Contender(f"hpcfed{where}", run, after_run),
    ]


def _whole(done: FinishedProcess) -> Turn:
    return Turn(wall=1e3 * done.seconds)
