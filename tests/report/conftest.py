"""Run folders as a run leaves them, with made-up but plausible numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from hpcfed.lab.report.comparison import compare, write_comparison
from hpcfed.lab.report.read import Run, find_runs, read_run
from tests.pictures import blank_pictures  # noqa: F401  (a fixture)

RECIPE: dict[str, Any] = {
    "name": "digits",
    "seed": {"model": 0, "cohort": 0, "batches": 0},
    "data": "digits-dir03-20.h5",
    "data_content": "9d4f06ac6a3b1c55",
    "model": {"name": "mlp", "hidden": [200, 100]},
    "rounds": 60,
    "cohort": {"size": 10, "fraction": None, "sampling": "uniform"},
    "local": {"steps": 20, "batch_size": 50, "lr": 0.1},
    "guess": "none",
    "algorithm": {"name": "fedavg"},
    "evaluate": {"every": 1},
    "output": "runs/digits",
}
ENVIRONMENT = {
    "hosts": ["node-1"],
    "ranks": 2,
    "threads_per_rank": 1,
    "mpi": "MPICH 4.3",
    "versions": {"python": "3.11.7", "torch": "2.13.0", "hpcfed": "0.1.0"},
}
SPEED = {"fedavg": 0.08, "fedprox": 0.085, "fedexp": 0.17, "feddyn": 0.14}
NUM_PARAMETERS = 178_110


def make_rows(rounds: int, method: str, seed: int, every: int = 1) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl for a method that learns at its own speed, with noise from the seed."""
    noise = np.random.default_rng([seed, len(method)])
    rows: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        gap = np.exp(-SPEED[method] * number**0.9)
        is_evaluated = number % every == 0
        sent = NUM_PARAMETERS * 10 * number
        rows.append(
            {
                "round": number,
                "cohort": list(range(10)),
                "local_loss": 0.03 + 2.2 * gap * noise.uniform(0.8, 1.2),
                "train_loss": None,
                "train_accuracy": None,
                "test_loss": 0.1 + 2.2 * gap * noise.uniform(0.9, 1.1) if is_evaluated else None,
                "test_accuracy": 0.97 - 0.87 * gap * noise.uniform(0.8, 1.2) if is_evaluated else None,
                "server_lr": 1 + 3 * noise.random() if method == "fedexp" else None,
                "delta_sq": gap,
                "mean_delta_sq": 2 * gap,
                "params_up": sent,
                "params_down": sent,
                "gradients": 200 * 50 * number,
                "seconds": {
                    "local": 0.21 + 0.01 * noise.random(),
                    "wait": 0.012,
                    "reduce": 0.003,
                    "server": 0.002,
                    "evaluate": 0.03 if is_evaluated else 0.0,
                    "total": 0.26,
                },
                "imbalance": 1 + 0.1 * noise.random(),
            }
        )
    return rows


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every run in or at the folders."""
    return [read_run(folder) for folder in find_runs(folders)[0]]


def make_report(
    runs: Sequence[Path], output: Path | None = None, targets: Sequence[float] = (), *, figures: bool = True
) -> Path:
    return write_comparison(compare(runs, targets), output, figures=figures)


def write_run(
    folder: Path,
    method: str = "fedavg",
    seed: int = 0,
    *,
    rows: list[dict[str, Any]] | None = None,
    status: str | None = "finished",
    change: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run folder; `change` holds recipe keys that differ from the usual ones."""
    folder.mkdir(parents=True)
    recipe = copy.deepcopy(RECIPE) | {"name": folder.name, "output": str(folder), "algorithm": {"name": method}}
    recipe["seed"] = {"model": seed, "cohort": seed, "batches": seed}
    recipe |= change or {}
    rows = make_rows(60, method, seed) if rows is None else rows
    YAML(typ="safe", pure=True).dump(recipe, folder / "recipe.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT), encoding="utf-8")
    if status is not None:
        result = {"status": status, "rounds": len(rows), "seconds": 0.26 * len(rows)}
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def write_code(folder: Path, digest: str, before: str = "") -> Path:
    """Record the user's file ``mine.py`` with a hash, and its hash in the first five rounds if it was another."""
    made = {since: {"file": "mine.py", "path": "", "hash": since, "text": None} for since in (digest, before)}
    earlier = [{"files": {"mine": made[before]}, "since": 1}] if before else []
    record = {"files": {"mine": made[digest]}, "since": 6 if before else 1, "before": earlier}
    (folder / "code.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def write_clients(folder: Path, accuracies: list[float], *, rounds: tuple[int, ...] = (1, 2)) -> None:
    """Write ``clients.csv``: in the last round clients have these test accuracies, before nobody has any."""
    lines = ["round,client,model,split,loss,accuracy,n"]
    for number in rounds:
        for client, accuracy in enumerate(accuracies):
            shown = accuracy if number == rounds[-1] else 0.0
            lines += [f"{number},{client},global,train,0.5,0.123,40", f"{number},{client},global,test,0.5,{shown},10"]
    (folder / "clients.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def accuracies(tmp_path: Path) -> Callable[..., Path]:
    """Make a run folder with these test accuracies, round by round (None: not evaluated)."""

    def make(name: str, values: list[float | None], seed: int = 0, **options: Any) -> Path:
        rows = make_rows(len(values), "fedavg", seed)
        for row, value in zip(rows, values, strict=True):
            row["test_accuracy"] = value
        return write_run(tmp_path / name, seed=seed, rows=rows, **options)

    return make
