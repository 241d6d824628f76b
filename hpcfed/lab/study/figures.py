"""The figures of a study's page: learning curves by site, the cross-site matrix, and confusion matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcfed.errors import cut
from hpcfed.io.figure import literal
from hpcfed.io.figure_style import DASHES, LIGHT, PAGE, Medium, markers, over, panels
from hpcfed.lab.study.cells import value_text
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.view import View

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Title of a row → rounds (E,) and values (E,) of E evaluations."""
CELL, MARGIN = 0.62, 1.5
"""Width of a matrix cell, and of the margin beside a matrix, in inches."""
MOST = 16
"""Most characters of a name beside a matrix."""
SHADE = 0.55
"""Opacity of the cell with the largest value: the text on it stays readable in the light and the dark scheme."""


def curves_of(view: View, metric: StudyMetric, site: int) -> Curves:
    """Return each row's learning curve at a site: the metric against rounds, mean over splits and seeds.

    Rounds of arms with more rounds than the methods are scaled down to the methods' number. A row of several arms has
    no curve. A round has no point if some run that has values at the site has none in this round.
    """
    arms = {arm.key: arm for arm in view.study.arms}
    found = {}
    for row in view.rows:
        runs = view.results.runs.get(row.arm, ())
        courses = [
            run.curves[row.model, site, metric.name] for run in runs if (row.model, site, metric.name) in run.curves
        ]
        by_round: dict[int, list[float]] = {}
        for course in courses:
            for number, value in course:
                by_round.setdefault(number, []).append(value)
        whole = [number for number, values in sorted(by_round.items()) if len(values) == len(courses)]
        if whole:
            scale = arms[row.arm].rounds / view.study.amount.rounds
            found[row.title] = np.array(whole) / scale, np.array([np.mean(by_round[number]) for number in whole])
    return found


def draw_curves(curves: Curves, places: Mapping[str, int], metric: StudyMetric) -> Figure:
    """Draw one site's learning curves.

    `places` maps a row's title to its index in the tables, which sets the colour and dashes, equal at all sites.
    """
    figure, ((axes,),) = panels(PAGE, 1, 1)
    for title, (rounds, values) in curves.items():
        place = places[title]
        axes.plot(
            rounds,
            values,
            color=LIGHT.groups[place % len(LIGHT.groups)],
            linestyle=DASHES[place % len(DASHES)],
            linewidth=1.6,
            zorder=over(place),
            **markers(len(rounds)),
        )
    axes.set_xlabel("round")
    axes.set_ylabel(literal(metric.in_text))
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    if metric.is_percentage:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None, symbol=" %"))
    return figure


def draw_cross(matrix: np.ndarray, sites: Sequence[str], metric: StudyMetric) -> Figure:
    """Draw the cross-site matrix (N, N): rows are the sites' models, columns the sites on which they are tested."""
    shades = _between(matrix if metric.larger_is_better is not False else -matrix)
    size = MARGIN + CELL * len(sites)
    figure, ((axes,),) = panels(Medium(max(size + 0.6, 3.4), size, PAGE.font, legend=False), 1, 1)
    _matrix(axes, shades, [[value_text(value, metric) for value in line] for line in matrix], sites, sites)
    axes.set_xlabel("tested at")
    axes.set_ylabel("trained at")
    return figure


def draw_confusion(counts: np.ndarray, labels: Sequence[str]) -> Figure:
    """Draw a confusion matrix (C, C): rows are labels, columns predictions; shades show shares of the row."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = MARGIN + CELL * len(labels)
    figure, ((axes,),) = panels(Medium(max(size + 0.4, 3.0), size, PAGE.font, legend=False), 1, 1)
    _matrix(axes, shares, [[f"{value:,.0f}" for value in line] for line in counts], labels, labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    return figure


def _matrix(
    axes: Axes, shades: np.ndarray, texts: Sequence[Sequence[str]], rows: Sequence[str], columns: Sequence[str]
) -> None:
    """Draw a matrix of texts in shaded cells, the first row on top; shades are from 0 to 1, nan if unshaded."""
    for (row, column), shade in np.ndenumerate(shades):
        if math.isfinite(shade):
            opacity = SHADE * float(shade)
            axes.fill(
                [column - 0.5, column + 0.5, column + 0.5, column - 0.5],
                [row - 0.5, row - 0.5, row + 0.5, row + 0.5],
                color=LIGHT.groups[5],
                alpha=opacity,
                linewidth=0,
            )
        axes.text(column, row, texts[row][column], ha="center", va="center", color=LIGHT.text, fontsize=PAGE.font)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = [_short(name) for name in columns]
    axes.set_xticks(range(len(columns)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), [_short(name) for name in rows])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_aspect("equal")


def _between(values: np.ndarray) -> np.ndarray:
    """Return values scaled linearly to [0, 1], nan kept; ½ if all values are equal."""
    if not np.isfinite(values).any():
        return values
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else np.where(np.isfinite(values), 0.5, math.nan)


def _short(name: str) -> str:
    return literal(cut(name, MOST))
