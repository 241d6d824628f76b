"""Rounds by this checkout beside those by another, in turn: what a change costs.

    git worktree add ../before COMMIT;  python jobs/bench/versions.py ../before [--pairs 12] [WORKLOAD ...]

For each workload of `hpcfed bench` (mlp, cnn, logistic by default): the median milliseconds of a round by each, wall
and CPU, and the median, least and largest ratio over the pairs. The other checkout runs in this environment.
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

from hpcfed.tools.bench.workloads import write_workload

HERE = Path(__file__).resolve().parents[2]
ROUNDS = {"mlp": (40, 30), "cnn": (12, 3), "logistic": (150, 60), "logistic-200": (60, 30)}
"""Workload → counted rounds of a turn, and rounds before them."""


def turn(checkout: Path, folder: Path, rounds: int, warm_up: int) -> tuple[float, float]:
    """Run a workload's recipe with a checkout's package; return wall and CPU milliseconds of a round, medians."""
    output = folder / "run"
    command = [sys.executable, "-m", "hpcfed", "run", "--quiet", str(folder / "recipe.yaml")]
    command += [f"rounds={rounds + warm_up}", f"output={output}"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True, cwd=folder)
    rows = [json.loads(line)["seconds"] for line in (output / "metrics.jsonl").read_text().splitlines()][warm_up:]
    shutil.rmtree(output)
    return 1e3 * median(row["total"] for row in rows), 1e3 * median(row["cpu"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds by this checkout beside those by another.")
    parser.add_argument("other", type=Path)
    parser.add_argument("workloads", nargs="*", default=["mlp", "cnn", "logistic"])
    parser.add_argument("--pairs", type=int, default=12)
    arguments = parser.parse_args()
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_workload(workload, folder)
            pairs = [
                [turn(checkout, folder, *ROUNDS[workload]) for checkout in (HERE, arguments.other.resolve())]
                for _ in range(arguments.pairs)
            ]
        for kind, what in enumerate(("wall", "CPU")):
            ours, theirs = (median(pair[side][kind] for pair in pairs) for side in (0, 1))
            ratios = sorted(pair[0][kind] / pair[1][kind] for pair in pairs)
            print(
                f"{workload:13} {what:4} {ours:8.2f} ms  other {theirs:8.2f} ms  "
                f"ratio {median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
