"""The figure of a scaling study: time, efficiency, communication and imbalance over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import ticker

from hpcfed.io.figure_style import LIGHT, Medium, panels, to_files
from hpcfed.lab.scaling.result import ScalingRow, ScalingStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHEET = Medium(8.4, 6.0, 10, legend=True)
MEASURED, MODEL, IDEAL = LIGHT.groups[0], LIGHT.groups[1], LIGHT.groups[-1]
DOTS: dict[str, Any] = {"linestyle": "", "marker": "o", "color": MEASURED, "clip_on": False}
PREDICTED: dict[str, Any] = {**DOTS, "linestyle": "--", "color": MODEL, "markerfacecolor": "none"}


def draw(study: ScalingStudy) -> dict[str, bytes]:
    """Return the figure as PNG and PDF, suffix → bytes: dots measured, circles predicted, dotted line ideal scaling."""
    figure, axes = panels(SHEET, 2, 2)
    time, efficiency, communication, imbalance = axes.ravel()
    _time(time, study)
    _values(efficiency, study, "efficiency", lambda row: row.efficiency)
    _values(communication, study, "communication, share of a round", lambda row: row.communication)
    for axes in (efficiency, communication):
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1, decimals=None, symbol=" %"))
    _values(imbalance, study, "slowest rank's work over average", lambda row: row.imbalance)
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False)
    doubts = sorted({row.note for row in (*study.rows, *study.predictions) if row.note})
    if study.refused and study.model:
        doubts.append("no predictions: the model is too far off")
    figure.supxlabel("; ".join(doubts), fontsize=9, color=LIGHT.text)
    return to_files(figure)


def _time(axes: Axes, study: ScalingStudy) -> None:
    rows = study.rows
    axes.plot(*_line(rows, lambda row: row.seconds or 0.0), **DOTS, label="measured")
    modelled = [row for row in rows if row.modelled is not None]
    if modelled:
        axes.plot(*_line(modelled, lambda row: row.modelled or 0.0), "--", color=MODEL, label="model of cost")
    if study.predictions:
        cohorts = [row.cohort for row in study.predictions]
        label = f"predicted, cohorts of {' to '.join(f'{size:g}' for size in sorted({min(cohorts), max(cohorts)}))}"
        axes.plot(*_line(study.predictions, lambda row: row.modelled or 0.0), **PREDICTED, label=label)
    first = rows[0]
    slope = 1 if study.mode == "strong" else 0
    ideal = [(first.seconds or 0.0) * (first.ranks / row.ranks) ** slope for row in rows]
    axes.plot([row.ranks for row in rows], ideal, ":", color=IDEAL, label="ideal")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:  # maybe without a power of ten
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
    axes.yaxis.set_major_formatter(ticker.EngFormatter(unit="s"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    _ranks(axes, "time of a round")


def _values(axes: Axes, study: ScalingStudy, label: str, value: Callable[[ScalingRow], float]) -> None:
    axes.plot(*_line(study.rows, value), **DOTS)
    if study.predictions:
        axes.plot(*_line(study.predictions, value), **PREDICTED)
    axes.set_ylim(bottom=0)
    _ranks(axes, label)


def _line(rows: Sequence[ScalingRow], value: Callable[[ScalingRow], float]) -> tuple[list[int], list[float]]:
    ordered = sorted(rows, key=lambda row: row.ranks)
    return [row.ranks for row in ordered], [value(row) for row in ordered]


def _ranks(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)
