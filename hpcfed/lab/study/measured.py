"""Reading a study's results from the folders of its runs."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpcfed.config.metrics import UNMEASURED_COLUMNS
from hpcfed.config.recipe import Seeds
from hpcfed.errors import InputError
from hpcfed.lab.frame import clients_table
from hpcfed.lab.study.arms import Arm
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.results import GLOBAL, RunResult, StudyResults, Values, is_number
from hpcfed.run_folder.files import CLIENTS
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.rounds import RECORD, read_rounds, skipped_in


def read_results(study: Study, finished: Collection[str]) -> StudyResults:
    """Read the results of the runs whose names are in `finished`; skip all others, such as runs to be continued.

    Raises:
        InputError: a run's files are damaged, its ``clients.csv`` lacks rows, or it has not measured a metric of the
            study.
    """
    runs: dict[str, list[RunResult]] = {}
    planned: dict[str, int] = {}
    for arm in study.arms:
        runs[arm.key] = []
        planned[arm.key] = 0
        for split in range(len(study.splits.each)):
            if arm.site is not None and arm.site not in study.trainers(split):
                continue
            for seed in study.seeds:
                planned[arm.key] += 1
                folder = study.run_folder(arm, split, seed)
                if study.run_name(arm, split, seed) in finished and RunFolder(folder).has_result():
                    runs[arm.key].append(_read(study, arm, split, seed, folder))
    return StudyResults(runs, planned)


def _read(study: Study, arm: Arm, split: int, seed: Seeds, folder: Path) -> RunResult:
    record = read_rounds(folder / RECORD)
    evaluated = [row for row in record if row.get("test_loss") is not None or row.get("clients")]
    last = {name.removeprefix("test_"): value for name, value in record[-1].items() if name.startswith("test_")}
    trainers = study.trainers(split)
    skipped = frozenset(trainers[client] for row in record for client in skipped_in(row) if not arm.pools)
    out = study.splits.each[split].site
    columns = (*last, *(() if out is not None else clients_table(folder / CLIENTS)))
    if absent := [metric.name for metric in study.metrics if metric.name not in columns]:  # the run is older
        remedy = "name the metrics of its first call, or choose another --output"
        raise InputError(f"this run has not measured {', '.join(absent)}", where=str(folder), remedy=remedy)
    if out is not None:
        curves = {
            (GLOBAL, out, metric): [
                (row["round"], row[f"test_{metric}"]) for row in evaluated if is_number(row.get(f"test_{metric}"))
            ]
            for metric in last
        }
        return RunResult(split, seed.model, {(GLOBAL, out): last}, curves, last, skipped)
    measured = max((row["round"] for row in record if row.get("clients")), default=0)
    first = int(arm.pools)  # the pooled file's first client has all training samples
    sites: dict[tuple[str, int], Values] = {}
    rounds: dict[tuple[str, int], int] = {}
    curves = {}
    for row in clients_table(folder / CLIENTS).to_dict("records"):
        client = int(row["client"]) - first
        if row["split"] != "test" or client < 0:
            continue
        site = trainers[client]
        rounds[row["model"], site] = int(row["round"])
        values = {name: _parsed(text) for name, text in row.items() if name not in UNMEASURED_COLUMNS}
        sites[row["model"], site] = values
        for metric, value in values.items():
            if is_number(value):
                curves.setdefault((row["model"], site, metric), []).append((int(row["round"]), value))
    if measured and {*rounds.values()} != {measured}:
        expected, remedy = f"rows of round {measured} for all sites", "remove the run's folder to train it again"
        raise InputError("rows are missing", where=str(folder / CLIENTS), expected=expected, remedy=remedy)
    return RunResult(split, seed.model, sites, curves, last, skipped)


def _parsed(text: str | None) -> Any:
    """Return a cell's number or matrix; None if the cell is empty or not JSON."""
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
