"""A scaling study as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hpcfed.errors import counted
from hpcfed.lab.bench.tables import blank
from hpcfed.lab.scaling.model import CostModel
from hpcfed.lab.scaling.result import ScalingRow, ScalingStudy


def shown(study: ScalingStudy) -> Group:
    """Return the study's tables, with headings and remarks."""
    parts: list[Table | Text] = [Text(f"{study.name}, {study.mode} scaling, measured"), _rows(study.rows)]
    if study.model is not None:
        parts += [Text("\nmodel of cost, by least squares"), _model(study.model)]
    if study.error is not None:
        parts += [Text(f"\nwhat the fit did not know: largest error {study.error:.1%}"), _tested(study)]
    if study.predictions:
        parts += [Text(f"\npredicted, {study.clients:,} clients, a core or GPU of its own for each rank")]
        network = study.network.source if study.network else "as measured"
        parts += [Text(f"from {study.basis}; network {network}")]
        parts += [_predictions(study.predictions)]
    if study.refused:
        parts += [Text(f"\nnothing is predicted: {study.refused}")]
    return Group(*parts)


def _rows(rows: Sequence[ScalingRow]) -> Table:
    headings = ("ranks", "cohort", "ms a round", "by the model", "rounds/s", "efficiency", "communication", "imbalance")
    table = blank(*headings)
    table.add_column("")
    for row in rows:
        table.add_row(
            str(row.ranks),
            f"{row.cohort:g}",
            f"{1e3 * row.seconds:.3f}" if row.seconds is not None else "",
            f"{1e3 * row.modelled:.3f}" if row.modelled is not None else "",
            f"{row.speed:.3g}",
            f"{row.efficiency:.2f}",
            f"{row.communication:.1%}",
            f"{row.imbalance:.2f}",
            row.note,
        )
    return table


def _predictions(rows: Sequence[ScalingRow]) -> Table:
    table = blank("ranks", "cohort", "ms a round", "interval", "rounds/s", "efficiency", "communication", "imbalance")
    table.add_column("")
    for row in rows:
        low_to_high = f"{1e3 * row.interval[0]:.4g} to {1e3 * row.interval[1]:.4g}" if row.interval else "not known"
        times = (f"{1e3 * (row.modelled or 0.0):.4g}", low_to_high, f"{row.speed:.3g}", f"{row.efficiency:.2f}")
        shares = (f"{row.communication:.1%}", f"{row.imbalance:.2f}", row.note)
        table.add_row(str(row.ranks), f"{row.cohort:g}", *times, *shares)
    return table


def _model(model: CostModel) -> Table:
    bandwidth = f"{1e-9 / model.byte:.4g} GB/s" if model.byte else "not measured"
    table = blank("parameter", "value")
    table.add_column("")
    table.add_row("fixed", f"{1e3 * model.fixed:.4g} ms", "of every round, on every rank")
    table.add_row("member", f"{1e6 * model.member:.4g} µs", "for each member of the cohort, on every rank")
    table.add_row("sample", f"{1e6 * model.sample:.4g} µs", "for each sample visited, on its rank")
    table.add_row("latency", f"{1e6 * model.latency:.4g} µs", "of a message of the Allreduce")
    table.add_row("bandwidth", bandwidth, "of its messages")
    return table


def _tested(study: ScalingStudy) -> Table:
    table = blank("predicted", "cohort", "measured ms", "predicted ms", "error")
    for entry in study.tested:
        times = (f"{1e3 * entry.measured:.3f}", f"{1e3 * entry.predicted:.3f}", f"{entry.error:+.1%}")
        what = entry.what if "rank" in entry.what else f"{entry.what}, {counted(entry.ranks, 'rank')}"
        table.add_row(what, f"{entry.cohort:g}", *times)
    return table
