"""Rounds by this checkout beside those by another: what a change costs.

    git worktree add ../before COMMIT;  python jobs/bench/versions.py ../before [--pairs 12] [WORKLOAD ...]
    python jobs/bench/versions.py ../before mlp --set local.clip_norm=10 --set local.momentum=0.9
    python jobs/bench/versions.py . mlp --theirs sentinel=off        what a setting costs
    python jobs/bench/versions.py ../before runs/digits/recipe.yaml  a recipe of one's own

For each workload of `hpcfed bench` (mlp, cnn, logistic by default): the median CPU milliseconds of a round by each, and
the median, least and largest ratio over the pairs. The other checkout runs in this environment.

The two runs of a pair share one core: the scheduler switches between them every few milliseconds, so a machine whose
speed wanders slows both alike. In turn, a pair's ratio came out anywhere from 0.67 to 1.67 on a virtual machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from hpcfed.errors import ends_in_a_line
from hpcfed.lab.bench.workloads import write_workload

HERE = Path(__file__).resolve().parents[2]
ROUNDS = {
    "mlp": (60, 40),
    "logistic": (320, 80),
    "logistic-200": (100, 30),
    "mlp-class": (60, 40),
    "cnn-class": (15, 5),
    "logistic-class": (320, 80),
}
FEW_ROUNDS = (15, 5)
"""Workload → counted rounds of a turn, and rounds before them; others have `FEW_ROUNDS`."""


def pair(checkouts: list[tuple[Path, list[str]]], folder: Path, recipe: Path, rounds: int, warm_up: int) -> list[float]:
    """Run a recipe with each checkout's package and settings at once on one core; return CPU ms of a round, medians."""
    core = max(os.sched_getaffinity(0))
    runs = []
    for number, (checkout, settings) in enumerate(checkouts):
        command = [sys.executable, "-m", "hpcfed", "run", "--quiet", str(recipe)]
        command += [f"rounds={rounds + warm_up}", f"output={folder / str(number)}", *settings]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        runs.append(subprocess.Popen(["taskset", "-c", str(core), *command], env=environment, cwd=folder))
    if any(run.wait() for run in runs):
        sys.exit("a run failed")
    return [cpu_of_a_round(folder / str(number), warm_up) for number in range(len(checkouts))]


def cpu_of_a_round(output: Path, warm_up: int) -> float:
    """Return the median CPU milliseconds of a round after the first ones, and remove the run's folder."""
    rows = (output / "metrics.jsonl").read_text().splitlines()[warm_up:]
    shutil.rmtree(output)
    return 1e3 * median(json.loads(row)["seconds"]["cpu"] for row in rows)


@ends_in_a_line()
def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds by this checkout beside those by another.")
    parser.add_argument("other", type=Path)
    parser.add_argument("workloads", nargs="*", default=["mlp", "cnn", "logistic"])
    parser.add_argument("--pairs", type=int, default=12)
    setting = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    parser.add_argument("--set", help="of the recipes of both, other than what they say", **setting)
    parser.add_argument("--theirs", help="of the other checkout's recipes", **setting)
    arguments = parser.parse_intermixed_args()
    if not (arguments.other / "hpcfed").is_dir():
        parser.error(f"{arguments.other} is no checkout: it has no folder hpcfed")
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recipe = Path(workload).resolve()
            if not recipe.is_file():
                write_workload(workload, folder)
                recipe = folder / "recipe.yaml"
            checkouts = [(HERE, arguments.set), (arguments.other.resolve(), arguments.set + arguments.theirs)]
            rounds = ROUNDS.get(workload, FEW_ROUNDS)
            pairs = [
                pair(checkouts[:: 1 - 2 * (turn % 2)], folder, recipe, *rounds)[:: 1 - 2 * (turn % 2)]
                for turn in range(arguments.pairs)
            ]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        ours, theirs = (median(times) for times in zip(*pairs, strict=True))
        print(
            f"{workload:13} {ours:8.2f} ms  other {theirs:8.2f} ms  "
            f"ratio {median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
