"""The tables of a study as records with unrounded numbers, for CSV files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.statistics import interval
from hpcfed.lab.study.view import MEAN, TOGETHER, View


def result_records(view: View, metrics: Sequence[StudyMetric]) -> list[dict[str, Any]]:
    """Return the rows of ``results.csv``, with unrounded numbers: one per metric, table row and column of values.

    Columns of values are the sites, their mean and, unless each split leaves one site out, all samples together.
    """
    found: list[dict[str, Any]] = []
    for metric in metrics:
        measured, count = view.measured(metric), len(view.sites)
        sites = [1] * count + [int(measured.sum()), count]
        together = [] if view.study.leaves_out else [TOGETHER]
        for row in view.rows:
            pairs = zip(view.estimates(row, metric), view.differences(row, metric), sites, strict=True)
            for site, (own, apart, of) in zip([*view.sites, MEAN, *together], pairs, strict=False):
                found.append({
                    "method": row.title, "steps": row.steps, "metric": metric.name, "site": site, "sites": of,
                    **_numbers("", own), **_numbers("difference_", apart), "splits": own.count if own else 0,
                })  # fmt: skip
    return found


def value_records(view: View) -> list[dict[str, Any]]:
    """Return the rows of ``values.csv``: one per finished run, model and site, with all metrics."""
    return [
        {"arm": key, "split": run.split, "seed": run.seed, "model": model, "site": view.sites[site], **values}
        for key, runs in view.results.runs.items()
        for run in runs
        for (model, site), values in run.sites.items()
    ]


def bootstrap_records(view: View, metrics: Sequence[StudyMetric]) -> list[dict[str, Any]]:
    """Return the rows of ``bootstrap.csv``, unrounded: one per metric, table row, and site or mean of sites.

    Table rows without resampled values have none; if patients have not been resampled, the result is empty.
    """
    resampled, found = view.resampled or {}, []
    for metric in metrics:
        theirs = resampled.get((view.reference.key, metric.name))
        for row in view.rows:
            values = resampled.get((row.key, metric.name))
            if values is None or theirs is None:
                continue
            for site, own, other in zip([*view.sites, MEAN], values, theirs, strict=True):
                low, high = interval(own) or (None, None)
                low_apart, high_apart = interval(own - other) or (None, None)
                found.append({
                    "method": row.title, "metric": metric.name, "site": site, "low": low, "high": high,
                    "difference_low": low_apart, "difference_high": high_apart,
                    "resamples": int(np.isfinite(own).sum()),
                })  # fmt: skip
    return found


def tuning_records(study: Study) -> list[dict[str, Any]]:
    """Return the rows of ``tuning-points.csv``: one per arm, split and point of its grid; empty if nothing is tuned."""
    if study.tuned is None:
        return []
    return [
        {
            "arm": one.arm, "split": one.split, "point": one.point.label, "value": _known(one.value),
            "loss": _known(one.loss), "chosen": int(study.tuned.chosen[one.arm, one.split] is one),
        }
        for one in study.tuned.candidates
    ]  # fmt: skip


def _numbers(prefix: str, value: MeanEstimate | None) -> dict[str, float | str | None]:
    """Return an estimate as columns, named with `prefix`: mean, ends of its interval, and the interval's method."""
    mean = None if value is None else value.mean
    low, high = (None if value is None else value.interval) or (None, None)
    method = value.method if value is not None and value.interval is not None else None
    return {f"{prefix}mean": mean, f"{prefix}low": low, f"{prefix}high": high, f"{prefix}interval": method}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
