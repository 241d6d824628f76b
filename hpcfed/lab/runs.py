"""`hpcfed.runs`: the records of run folders as one tidy table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfed.errors import InputError
from hpcfed.lab.report.group import method_of
from hpcfed.lab.report.read import find_runs, read_run

if TYPE_CHECKING:
    import pandas as pd


def runs(paths: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Return the records of runs as one tidy table: a row for each number that a round recorded.

    Args:
        paths: run folders, or folders that contain runs: of a sweep, a study, an experiment, or a recipe with seeds.

    Returns:
        Columns ``run`` (the folder), ``method`` (as in reports: ``FedExP``), ``seed`` (text), ``round`` (from 1),
            ``column`` (dotted name in the record: ``test_accuracy``, ``seconds.local``,
            ``clients.global.test.loss.mean``) and ``value`` (float64). What a round did not measure has no row, and
            neither have scores measured only because the run ended there, if it was resumed later.

    Raises:
        InputError: a folder is not a run or has no round yet, or a file in it is damaged.
    """
    import pandas

    found, _ = find_runs([Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)])
    tables = []
    for run in map(read_run, found):
        wide = run.record.astype("float64").reset_index().melt("round", var_name="column").dropna()
        tables.append(wide.assign(run=str(run.folder), method=method_of(run), seed=run.seed))
    if not tables:
        raise InputError("no run named", remedy="name the output folder of a run")
    return pandas.concat(tables, ignore_index=True)[["run", "method", "seed", "round", "column", "value"]]
