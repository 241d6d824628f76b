"""The results of a sweep as tidy tables: runs in ``results.csv``, configurations in ``summary.csv``, one per row."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcfed.config.recipe import Recipe
from hpcfed.io.atomic import write_files
from hpcfed.lab.frame import as_csv
from hpcfed.lab.frame import record as read_record
from hpcfed.lab.report.read import read_code
from hpcfed.lab.sweep.claims import RunState
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.select import Candidate, Row, Rule, usual_rule
from hpcfed.run_folder import code
from hpcfed.run_folder.rounds import RECORD, count_rounds, iterate_rounds, lacks_score, skipped_in, why_skipped

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]


def read_results(plan: Plan, states: Mapping[str, RunState], rule: Rule | None) -> tuple[list[Row], Rule]:
    """Return a row for each run of the plan, and the rule that scored them: `rule`, or the default rule if it is None.

    Raises:
        InputError: a run's record is damaged.
    """
    import pandas

    records = {
        unit.name: _record_of(unit.recipe) if states[unit.name].decided else pandas.DataFrame() for unit in plan.units
    }
    chosen = rule or usual_rule(plan, records.values())
    rows = []
    for unit in plan.units:
        one, record = states[unit.name], records[unit.name]
        evaluate = unit.recipe.evaluate.model_dump()
        measured = {"rounds": unit.recipe.rounds, "evaluate": evaluate}
        status = str(one.claim.ending) if one.decided else "running" if one.held else one.claim.ending or "waiting"
        rows.append(
            Row(
                unit=unit,
                status="stopped" if status in ("busy", "again") else status,
                rounds=len(record) if one.decided or not one.last else count_rounds(unit.recipe.output / RECORD),
                seconds=float(record.get("seconds.total", pandas.Series(dtype=float)).sum()),
                metrics=_final(record, measured),
                score=chosen.score(record, measured) if status == "finished" else math.nan,
                message=one.claim.message if one.decided else "",
                code=code_of(unit.recipe),
                lacks=status == "finished" and chosen.lacks(record, evaluate),
                left_out=_why_left_out(unit.recipe) if status == "finished" else "",
            )
        )
    return rows, chosen


def code_of(recipe: Recipe) -> dict[str, str]:
    """Return file → hash, for the user's code that a run recorded; empty if its recipe names no code."""
    return read_code(recipe.output / code.CODE_FILE) if code.references(recipe) else {}


def _record_of(recipe: Recipe) -> pd.DataFrame:
    """Return a run's recorded numbers, a row per round; an empty table if it has no record."""
    import pandas

    path = recipe.output / RECORD
    evaluate = recipe.evaluate.model_dump(include={"every", "train", "clients"})
    return read_record(path, evaluate) if count_rounds(path) else pandas.DataFrame()


def _why_left_out(recipe: Recipe) -> str:
    """Return why rounds of a run left out updates; "" if none did."""
    masked, skips = recipe.secure_aggregation is not None, recipe.on_bad_client == "skip"
    if not (masked or skips) or not any(skipped_in(row) for row in iterate_rounds(recipe.output / RECORD)):
        return ""
    return why_skipped(masked=masked, skips=skips)


def _final(record: pd.DataFrame, recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return the last recorded value of each metric, without timers; nan if it was not finite or undefined."""
    final = record.ffill().tail(1).dropna(axis=1)
    return {
        name: math.nan if lacks_score(name, record[name].iloc[-1], len(record), recipe) else column.item()
        for name, column in final.items()
        if not name.startswith("seconds.")
    }


def result_records(plan: Plan, rows: Sequence[Row], rule: Rule) -> list[Record]:
    """Return a record per run, for ``results.csv``: grid keys, seed, status, rounds, final metrics, score, and more."""
    names, has_code = _metric_names(rows), any(row.code for row in rows)
    return [
        {
            **settings_of(plan, row.unit.point),
            "seed": row.unit.seed,
            "status": row.status,
            "rounds": row.rounds,
            **{name: row.metrics.get(name) for name in names},
            "score": row.score if math.isfinite(row.score) else None,
            "rule": str(rule),
            "seconds": round(row.seconds, 3),
            "folder": str(row.unit.recipe.output.relative_to(plan.folder)),
            **({"code": "; ".join(map(" ".join, row.code.items()))} if has_code else {}),
            "message": row.message,
        }
        for row in rows
    ]


def summary_records(plan: Plan, ranked: Sequence[Candidate]) -> list[Record]:
    """Return a record per configuration, for ``summary.csv``: means and deviations over seeds.

    Those of metrics are over the seeds that finished; those of the score are None unless all seeds have a score.
    """
    names = _metric_names([row for candidate in ranked for row in candidate.rows])
    return [
        {
            "rank": candidate.rank,
            **settings_of(plan, candidate.point),
            "status": candidate.status,
            "runs": len(candidate.rows),
            "finished": sum(row.status == "finished" for row in candidate.rows),
            "score_mean": candidate.mean if math.isfinite(candidate.mean) else None,
            "score_std": candidate.std if math.isfinite(candidate.std) else None,
            **{key: value for name in names for key, value in _spread(name, candidate.rows).items()},
        }
        for candidate in ranked
    ]


def write_tables(plan: Plan, results: Sequence[Record], summary: Sequence[Record], *, parquet: bool) -> None:
    """Write ``results.csv``, ``summary.csv`` and optionally ``results.parquet`` into the sweep's folder.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    tables = {"results.csv": as_csv(results), "summary.csv": as_csv(summary)}
    write_files(plan.folder, tables | ({"results.parquet": _parquet(results)} if parquet else {}))


def settings_of(plan: Plan, point: int) -> Record:
    """Return grid key → value of configuration `point`: a number if the whole grid is numeric, else text."""
    pairs = zip(plan.grids, plan.points[point].values, strict=True)
    return {grid.key: value.text if grid.numbers is None else value.number for grid, value in pairs}


def _metric_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def _spread(name: str, rows: Sequence[Row]) -> Record:
    values = [float(row.metrics[name]) for row in rows if row.status == "finished" and name in row.metrics]
    values = [value for value in values if math.isfinite(value)]
    return {
        f"{name}_mean": statistics.fmean(values) if values else None,
        f"{name}_std": statistics.stdev(values) if len(values) > 1 else None,
    }


def _parquet(records: Sequence[Record]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [record[name] for record in records] for name in records[0]}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()
