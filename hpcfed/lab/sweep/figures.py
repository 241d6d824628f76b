"""The figures of a sweep: a curve for one grid of numbers, a row per value for one grid of words, else heat maps.

Each pair of grids has a heat map, as in FedExP's figure 1 and GeL's figure 7.

With three or more grids, a heat map's cell has the best value over all grids outside the pair.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hpcfed.errors import cut
from hpcfed.io.figure import literal
from hpcfed.io.figure_style import LIGHT, Medium, blank, to_files
from hpcfed.io.text import Malformed, parse_yaml
from hpcfed.lab.sweep.grid import Grid
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.select import Candidate, Rule

FONT = 10.5
CELL = 0.78
"""Side of a heat map's cell, in inches."""
TITLE, CHARACTER = 10, 0.6
"""Size of a title in points; width of one of its characters, in that size."""
LINE = 0.42
"""Distance between the rows of a grid of words, in inches."""
LONGEST = 24.0
"""Length in inches of the rows or columns of a figure with many values, whose cells are narrower: a picture of 600
whole ones, of 75,000 pixels, takes a gigabyte, and programs that show pictures refuse it."""
ROOM = 0.6, 0.2
"""Least width and height in inches of a cell that its number fits into; the height is also that of a tick's label."""
WIDE, MOST = 8, 40
"""Length in characters above which labels below the axis are rotated, and maximum length of a label."""
DECADES = 3.0
"""Orders of magnitude that the shades of a heat map span."""


def draw(plan: Plan, ranked: Sequence[Candidate], rule: Rule) -> Mapping[str, bytes]:
    """Return the figures, file name → content, PNG and PDF; empty if nothing is ranked or no grid has two values.

    `ranked` has all configurations of the plan, in any order.
    """
    if not any(candidate.rank for candidate in ranked):
        return {}
    by_point = {candidate.point: candidate for candidate in ranked}
    axes = [index for index, grid in enumerate(plan.grids) if len(grid.values) > 1]
    if len(axes) == 1:
        one = _lines if plan.grids[axes[0]].numbers is None else _curve
        figures = {_file(plan.grids[axes[0]].key): one(plan, axes[0], by_point, rule)}
    else:
        figures = {
            f"{_file(plan.grids[first].key)}-{_file(plan.grids[second].key)}": _heat_map(
                plan, first, second, by_point, rule
            )
            for first, second in itertools.combinations(axes, 2)
        }
    return {name + suffix: drawn for name, figure in figures.items() for suffix, drawn in to_files(figure).items()}


def table_of(
    plan: Plan, first: int, second: int, by_point: Mapping[int, Candidate], rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best mean in each cell of a heat map, and whether the cell has rank 1; both are (rows, columns).

    Rows are the values of ``plan.grids[first]``, columns those of ``plan.grids[second]``; a cell without a mean is nan.
    `by_point` maps an index in ``plan.points`` to the configuration.
    """
    places = [{value: place for place, value in enumerate(plan.grids[index].values)} for index in (first, second)]
    shape = len(places[0]), len(places[1])
    means, best = np.full(shape, math.nan), np.zeros(shape, dtype=bool)
    for number, point in enumerate(plan.points):
        cell = places[0][point.values[first]], places[1][point.values[second]]
        candidate = by_point[number]
        if math.isfinite(candidate.mean) and (math.isnan(means[cell]) or rule.better(candidate.mean, means[cell])):
            means[cell] = candidate.mean
        best[cell] |= candidate.rank == 1
    return means, best


def _heat_map(plan: Plan, first: int, second: int, by_point: Mapping[int, Candidate], rule: Rule) -> Figure:
    """Draw the heat map of two grids: rows are the first one's values, from the bottom, columns the second one's."""
    means, best = table_of(plan, first, second, by_point, rule)
    rows, columns = means.shape
    width, height = (min(CELL, LONGEST / count) for count in (columns, rows))
    has_numbers = width >= ROOM[0] and height >= ROOM[1]
    figure, axes = blank(Medium(1.9 + width * columns, 1.5 + height * rows, FONT, legend=False))
    shades = _shades(means, rule)
    axes.imshow(np.ma.masked_invalid(shades), cmap="cividis", origin="lower", vmin=0, vmax=1)
    axes.set_aspect("equal" if width == height else "auto")
    for (row, column), mean in np.ndenumerate(means):
        if math.isnan(mean):
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="///", edgecolor=LIGHT.helper, linewidth=0)
            )
        colour = LIGHT.text if math.isnan(mean) or shades[row, column] > 0.55 else LIGHT.background
        if has_numbers:
            axes.text(column, row, _number(mean, rule), ha="center", va="center", color=colour, fontsize=10)
        if best[row, column]:
            axes.add_patch(
                Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, fill=False, edgecolor=LIGHT.groups[1], linewidth=2.5)
            )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    across = _labels(plan.grids[second])
    words = [label for label in across if not label.startswith("$")]
    is_wide = width < CELL or max(map(len, words), default=0) > WIDE
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_wide else {}
    axes.set_xticks(*_thinned(across, width), **turned)
    axes.set_yticks(*_thinned(_labels(plan.grids[first]), height))
    axes.set_xlabel(literal(plan.grids[second].key))
    axes.set_ylabel(literal(plan.grids[first].key))
    others = ", best over the other grids" if sum(len(grid.values) > 1 for grid in plan.grids) > 2 else ""
    _set_title(figure, _title(rule) + others)
    return figure


def _curve(plan: Plan, index: int, by_point: Mapping[int, Candidate], rule: Rule) -> Figure:
    """Draw mean ± standard deviation over seeds against the grid's values, without configurations that have no mean."""
    grid = plan.grids[index]
    figure, axes = blank(Medium(6.4, 4.1, FONT, legend=False))
    order = sorted(range(len(plan.points)), key=lambda number: plan.points[number].values[index].number or 0.0)
    kept = [number for number in order if math.isfinite(by_point[number].mean)]
    numbers = grid.numbers
    assert numbers is not None
    where = [numbers[number] for number in kept]
    means = [by_point[number].mean for number in kept]
    stds = [by_point[number].std if math.isfinite(by_point[number].std) else 0.0 for number in kept]
    axes.errorbar(where, means, stds, color=LIGHT.groups[0], linewidth=1.7, marker="o", capsize=3, zorder=3)
    best = [number for number in kept if by_point[number].rank == 1]
    for number in best:
        place = where[kept.index(number)]
        axes.plot(place, by_point[number].mean, "o", mfc="none", color=LIGHT.groups[1], ms=13, mew=2.2, zorder=4)
    if grid.is_logarithmic:
        axes.set_xscale("log")
    if not rule.is_percentage and min(means) > 0 and max(means) > 10 * min(means):
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], min(means) / 10))  # a bar may end just above 0, decades below
    if rule.is_percentage:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None, symbol=" %"))
    axes.set_xlabel(literal(grid.key))
    axes.set_ylabel(literal(rule.column.replace("_", " ")))
    _set_title(figure, _title(rule))
    return figure


def _lines(plan: Plan, index: int, by_point: Mapping[int, Candidate], rule: Rule) -> Figure:
    """Draw a row per value of the grid: its mean ± standard deviation over seeds; without a mean, the row is empty."""
    grid = plan.grids[index]
    line = min(LINE, LONGEST / len(grid.values))
    figure, axes = blank(Medium(6.4, 1.3 + line * len(grid.values), FONT, legend=False))
    for place, candidate in sorted(by_point.items()):
        if not math.isfinite(candidate.mean):
            continue
        std = candidate.std if math.isfinite(candidate.std) else 0.0
        colour = LIGHT.groups[1 if candidate.rank == 1 else 0]
        axes.errorbar([candidate.mean], [place], xerr=[std], color=colour, marker="o", capsize=3, zorder=3)
    axes.set_yticks(*_thinned(_labels(grid), line))
    axes.set_ylim(len(grid.values) - 0.5, -0.5)
    if rule.is_percentage:
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None, symbol=" %"))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(literal(rule.column.replace("_", " ")))
    _set_title(figure, f"{_title(rule)}, by {grid.key}")
    return figure


def _shades(means: np.ndarray, rule: Rule) -> np.ndarray:
    """Return each cell's shade, from 0 for the worst to 1 for the best.

    Shades of losses that span more than a factor of 10 are logarithmic, cut off `DECADES` decades above the least.
    """
    values = means if rule.largest else -means
    finite = means[np.isfinite(means)]
    if not rule.largest and finite.min() > 0 and finite.max() > 10 * finite.min():
        values = np.maximum(-np.log10(means), -np.log10(finite.min()) - DECADES)
    low, high = np.nanmin(values), np.nanmax(values)
    shades: np.ndarray = (values - low) / (high - low) if high > low else np.where(np.isnan(values), np.nan, 1.0)
    return shades


def _thinned(labels: Sequence[str], distance: float) -> tuple[range, Sequence[str]]:
    """Return the places and labels of an axis whose values are so many inches apart: each n-th, as far as they fit."""
    step = math.ceil(ROOM[1] / distance)
    return range(0, len(labels), step), labels[::step]


def _labels(grid: Grid) -> list[str]:
    """Return the tick labels of a grid's axis; those of a logarithmic grid of (half) powers of ten are 10^k."""
    numbers = grid.numbers
    if numbers is not None and grid.is_logarithmic:
        exponents = [round(math.log10(number), 6) for number in numbers]
        if all((2 * exponent).is_integer() for exponent in exponents):
            return [f"$10^{{{exponent:g}}}$" for exponent in exponents]
    return [literal(_in_words(value.label)) for value in grid.values]


def _in_words(label: str) -> str:
    """Return a value's label, cut to `MOST` characters; a mapping is shown as name and keys: ``fedprox, mu 0.1``."""
    if not label.startswith("{"):
        return cut(label, MOST)
    try:
        keys = parse_yaml(label)
    except Malformed:
        return cut(label, MOST)
    parts = [str(value) if key == "name" else f"{key} {value}" for key, value in keys.items()]
    return cut(", ".join(parts), MOST)


def _number(mean: float, rule: Rule) -> str:
    if math.isnan(mean):
        return "–"
    return f"{100 * mean:.1f}" if rule.is_percentage else f"{mean:.2g}"


def _title(rule: Rule) -> str:
    unit = " (%)" if rule.is_percentage else ""
    rounds = "last round" if rule.last == 1 else f"mean of the last {rule.last} rounds"
    return f"{rule.column.replace('_', ' ')}{unit}, {rounds}"


def _set_title(figure: Figure, title: str) -> None:
    """Set a title over the whole figure, in lines that fit: axes beside long labels are narrower than a title."""
    most = int(figure.get_figwidth() * 72 / (CHARACTER * TITLE))
    parts = title.replace(", ", ",\n").split("\n") if len(title) > most else [title]
    lines = "\n".join(textwrap.fill(part, most) for part in parts)
    figure.suptitle(literal(lines), x=0.02, ha="left", fontsize=TITLE)


def _file(key: str) -> str:
    return re.sub(r"[^\w.-]", "-", key)
