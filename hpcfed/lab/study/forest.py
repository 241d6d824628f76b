"""Forest plots of a study's main metric: one panel per site, with each method's mean and its interval.

A dashed line marks the reference's mean, which is zero in panels of differences from it. Marks tell the reference,
other methods and baselines apart without colour. All panels share one scale, unless some panel's marks would lie too
close together on it; then every panel has a separate scale.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpcfed.errors import cut
from hpcfed.io.figure import literal
from hpcfed.io.figure_style import LIGHT, Medium, panels
from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.study.arms import FEDERATED
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.statistics import Ends, interval
from hpcfed.lab.study.tested import tested_sizes
from hpcfed.lab.study.view import MEAN, View

MOST_PANELS = 12
"""Most sites that have a panel each; for more sites, only their mean is drawn."""
PAPER = Medium(7.2, 0.0, 8.0, legend=True)
PAGE = Medium(5.2, 0.0, 9.0, legend=False)
LINE, SPACED, BETWEEN, AROUND = 1.35, 1.2, 0.35, 0.32
"""Heights: a line of text above or below a panel, a line of a method's title, and the space between methods, in font
sizes; ticks and space around a panel, in inches."""
WIDE, BOLD, TICK = 0.58, 0.66, 7
"""Width of a character and of a bold character, in font sizes; width of a tick label with its space, in characters."""
LABEL_WIDTH = 25
"""Most characters in a line of a method's title."""
BEYOND = 2.0
"""How far intervals are drawn beyond the outermost means, in median half-widths; longer ones end in an arrow."""
LEAST_SHARE = 1 / 6
"""Least share of the common scale that a panel's range must fill; if one fills less, panels have separate scales."""
MARGIN = 0.05
MARK = "\u200b"
"""Zero-width space, which does not occur in names."""
SHADE = 0.22
"""Opacity of an interval over patients."""


@dataclass(frozen=True)
class ForestMark:
    """A mean with two intervals: over splits or sites (`corrected`), and over patients; None for a missing interval."""

    mean: float
    corrected: Ends | None
    over_patients: Ends | None

    @property
    def intervals(self) -> list[Ends]:
        """The intervals that exist."""
        return [ends for ends in (self.corrected, self.over_patients) if ends is not None]


@dataclass(frozen=True)
class ForestPanel:
    """One panel: a site, or the mean of the sites.

    Attributes:
        title: the site's name, or the words for the mean of the sites.
        note: text below the title: the number of the site's tested samples, or of the sites in the mean.
        marks: one per row of the tables; None for the row `minus`, and for rows with an undefined metric.
        line: position of the dashed line, the mean of the reference; None if undefined.
        axis: label of the axis.
        minus: index of the reference's row in panels of differences from it; None in panels of values.
        limits: ends of the axis.
    """

    title: str
    note: str
    marks: Sequence[ForestMark | None]
    line: float | None
    axis: str
    minus: int | None = None
    limits: Ends = (0.0, 1.0)


@dataclass(frozen=True)
class Forest:
    """The content of a study's forest plots.

    Attributes:
        metric: the metric on the axes.
        titles: the rows' titles.
        methods: whether each row is a federated method; False for baselines.
        reference: index of the reference's row.
        values: the panels of values.
        differences: the panels of differences from the reference, in the same order; empty if there is one row.
        of_patients: whether intervals over patients have been computed.
        over: unit of the intervals `ForestMark.corrected`: ``splits``, or ``sites`` if each split leaves one site out.
    """

    metric: StudyMetric
    titles: Sequence[str]
    methods: Sequence[bool]
    reference: int
    values: Sequence[ForestPanel]
    differences: Sequence[ForestPanel]
    of_patients: bool
    over: str

    @property
    def has_own_scales(self) -> bool:
        """Whether panels have separate scales, among those of values or those of differences."""
        return any(len({panel.limits for panel in each}) > 1 for each in (self.values, self.differences))


def forest_of(view: View, metric: StudyMetric) -> Forest:
    """Return a metric's forest plots: panels of values and, if there are several rows, of differences from the
    reference.
    """
    methods = {arm.key for arm in view.study.arms if arm.kind == FEDERATED}
    reference = next(k for k, row in enumerate(view.rows) if row is view.reference)
    direction = {True: ", larger is better", False: ", smaller is better", None: ""}[metric.larger_is_better]
    values = _panels(view, metric, f"{metric.in_text}{direction}", None)
    apart: list[ForestPanel] = []
    if len(view.rows) > 1:
        points = ", points" if metric.is_percentage else ""
        apart = _panels(view, metric, f"{metric.in_text} minus {view.reference.title}'s{points}{direction}", reference)
    share = view.is_share(metric)
    return Forest(
        metric,
        [row.title for row in view.rows],
        [row.key in methods for row in view.rows],
        reference,
        _scaled(values, (0.0, 1.0) if share else (-math.inf, math.inf)),
        _scaled(apart, (-1.0, 1.0) if share else (-math.inf, math.inf)),
        view.resampled is not None,
        "sites" if view.study.leaves_out else "splits",
    )


def _panels(view: View, metric: StudyMetric, axis: str, minus: int | None) -> list[ForestPanel]:
    """Return a panel for each site and one for the mean of sites: values, or differences from the row `minus`.

    Above `MOST_PANELS` sites only the mean has a panel; empty if the metric is undefined everywhere.
    """
    count = len(view.sites)
    resampled = [None if view.resampled is None else view.resampled.get((row.key, metric.name)) for row in view.rows]
    if minus is not None:
        theirs = resampled[minus]
        resampled = [None if one is None or theirs is None else one - theirs for one in resampled]
    of_row = view.estimates if minus is None else view.differences
    estimates = [of_row(row, metric) for row in view.rows]
    reference = next(k for k, row in enumerate(view.rows) if row is view.reference)
    kept = range(count + 1) if count <= MOST_PANELS else [count]
    found = []
    for place in kept:
        column = [one[place] for one in estimates]
        marks = [
            None if minus == k else _mark(one, None if of_patients is None else of_patients[place])
            for k, (one, of_patients) in enumerate(zip(column, resampled, strict=True))
        ]
        of_reference = column[reference]
        line = None if of_reference is None else of_reference.mean  # 0 among differences from it
        found.append(
            ForestPanel([*view.sites, MEAN][place], _note(view, metric, place, column), marks, line, axis, minus)
        )
    return found if any(mark is not None for panel in found for mark in panel.marks) else []


def _mark(estimate: MeanEstimate | None, resamples: np.ndarray | None) -> ForestMark | None:
    if estimate is None:
        return None
    of_patients = None if resamples is None else interval(resamples)
    return ForestMark(estimate.mean, _drawable(estimate.interval), _drawable(of_patients))


def _drawable(ends: Ends | None) -> Ends | None:
    """Return an interval, or None if an end is not finite: the variance of values above 1e154 overflows."""
    return ends if ends is not None and math.isfinite(ends[0]) and math.isfinite(ends[1]) else None


def _note(view: View, metric: StudyMetric, place: int, column: Sequence[MeanEstimate | None]) -> str:
    """Return a panel's note: the number of the site's tested samples, or the number of sites in the mean.

    If the metric is undefined in some splits, the note also says in how many it is defined.
    """
    measured = view.measured(metric)
    if place == len(measured):
        some = "" if measured.all() else f"{measured.sum()} of "
        tested = "" if measured.all() else f", {view.num_tested(measured)} tested"
        said = [f"{some}{len(measured)} sites{tested}"]
    else:
        said = [f"{tested_sizes(view.study)[place]} tested"]
    counts = [one.count for one in column if one is not None]
    splits = view.num_values
    if not counts:
        said.append("undefined")
    elif splits and min(counts) < splits:
        low, high = min(counts), max(counts)
        said.append(f"{low if low == high else f'{low} to {high}'} of {splits} splits")
    return ", ".join(said)


def _scaled(every: Sequence[ForestPanel], domain: Ends) -> list[ForestPanel]:
    """Return the panels with axis limits: common ones, or separate ones if a panel is too small on the common scale.

    `domain` is the range of possible values.
    """
    own = [_limits([panel], domain) for panel in every]
    low, high = _limits(every, domain)
    drawn = [ends for panel, ends in zip(every, own, strict=True) if any(panel.marks)]
    if all(high - low <= (ends[1] - ends[0]) / LEAST_SHARE for ends in drawn):
        own = [(low, high)] * len(every)
    return [replace(panel, limits=ends) for panel, ends in zip(every, own, strict=True)]


def _limits(every: Sequence[ForestPanel], domain: Ends) -> Ends:
    """Return axis limits that contain all marks and their intervals, but not the ends of unusually long intervals."""
    marks = [mark for panel in every for mark in panel.marks if mark is not None]
    means = [*(mark.mean for mark in marks), *(panel.line for panel in every if panel.line is not None)]
    if not means:
        return 0.0, 1.0
    ends = [ends for mark in marks for ends in mark.intervals]
    further = BEYOND * float(np.median([high - low for low, high in ends])) / 2 if ends else 0.0
    low = max(min([*means, *(one[0] for one in ends)]), min(means) - further, min(domain[0], *means))
    high = min(max([*means, *(one[1] for one in ends)]), max(means) + further, max(domain[1], *means))
    margin = MARGIN * (high - low) or MARGIN * abs(high) or MARGIN
    return low - margin, high + margin


def draw_forest(forest: Forest, shown: Sequence[ForestPanel], medium: Medium) -> Figure:
    """Draw `shown`, the panels of values or of differences, in at most four columns, sized for `medium`."""
    columns = len(shown) if len(shown) <= 4 else 4 if len(shown) in (7, 8) or len(shown) > 9 else 3
    inch = medium.font / 72
    titles = ["\n".join(_wrapped(title, LABEL_WIDTH, 3)) for title in forest.titles]
    beside = WIDE * inch * max(len(line) for title in titles for line in title.split("\n"))
    width = ((medium.width - beside) / columns - 2 * inch) / inch
    room, room_bold = int(width / WIDE), int(width / BOLD)
    names = [_wrapped(panel.title, room_bold, 4) for panel in shown]
    notes = [_wrapped(panel.note, room, 2) for panel in shown]
    heights = [((title.count("\n") + 1) * SPACED + BETWEEN) * inch for title in titles]
    centres = np.cumsum(heights) - np.array(heights) / 2
    above = max(len(name) + len(note) for name, note in zip(names, notes, strict=True)) * LINE * inch
    axis = [_wrapped(panel.axis, room, 3) for panel in shown]
    below = max(map(len, axis)) * LINE * inch
    legend = 2.4 * LINE * inch if medium.legend else 0.0
    rows = math.ceil(len(shown) / columns)
    height = rows * (sum(heights) + above + AROUND) + below * (rows if forest.has_own_scales else 1) + legend
    figure, grid = panels(medium, rows, columns, height)
    for k, axes in enumerate(grid.flat):
        if k >= len(shown):
            axes.set_visible(False)
            continue
        _draw_panel(axes, forest, shown[k], centres, medium)
        axes.set_ylim(sum(heights), 0)
        name, pad = "\n".join(names[k]), 3 + SPACED * medium.font * len(notes[k])
        axes.set_title(name, loc="left", fontsize=medium.font, fontweight="bold", linespacing=1.15, pad=pad)
        note = axes.text(0, 1, "\n".join(notes[k]), transform=axes.transAxes, va="bottom", fontsize=medium.font)
        note.set_in_layout(False)
        axes.set_yticks(centres, titles if k % columns == 0 else [""] * len(titles), fontsize=medium.font)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(max(2, room // TICK), steps=(1, 2, 5, 10)))
        if k + columns >= len(shown) or forest.has_own_scales:
            axes.set_xlabel("\n".join(axis[k]), fontsize=medium.font)
    if medium.legend:
        figure.legend(
            handles=list(_keys(forest, shown)), loc="outside upper left", ncols=3, frameon=False,
            fontsize=medium.font, handlelength=1.8, columnspacing=1.4, labelcolor=LIGHT.text,
        )  # fmt: skip
    return figure


def _draw_panel(axes: Axes, forest: Forest, panel: ForestPanel, centres: np.ndarray, medium: Medium) -> None:
    low, high = panel.limits
    axes.set_xlim(low, high)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, pad=7)
    axes.spines["left"].set_visible(False)
    if panel.line is not None:
        axes.axvline(panel.line, color=LIGHT.text, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    for k, (mark, y) in enumerate(zip(panel.marks, centres, strict=True)):
        value = panel.line if k == panel.minus else None if mark is None else mark.mean
        if value is None:
            axes.text(0.02, y, ABSENT, transform=axes.get_yaxis_transform(), va="center", color=LIGHT.text)
        elif mark is not None:
            if mark.over_patients is not None:
                _draw_interval(axes, y, mark.over_patients, panel.limits, medium, wide=True)
            if mark.corrected is not None:
                _draw_interval(axes, y, mark.corrected, panel.limits, medium)
        if value is not None:
            axes.plot([value], [y], zorder=4, clip_on=False, **_marker(forest, k))
    percent = _percent if panel.minus is None else _points
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(percent if forest.metric.is_percentage else _plain))
    axes.tick_params(axis="x", labelsize=medium.font)


def _percent(value: float, _: int) -> str:
    return f"{round(100 * value, 6):g} %"


def _points(value: float, _: int) -> str:
    return f"{round(100 * value, 6):+g}".replace("-", "−") if round(value, 8) else "0"


def _plain(value: float, _: int) -> str:
    return f"{value:g}".replace("-", "−")


def _draw_interval(axes: Axes, y: float, ends: Ends, limits: Ends, medium: Medium, *, wide: bool = False) -> None:
    """Draw an interval as a line, if `wide` as a grey bar, with an arrow at an end beyond the axis."""
    low, high = max(ends[0], limits[0]), min(ends[1], limits[1])
    width, alpha, zorder = (0.8 * medium.font, SHADE, 2) if wide else (1.0, 1.0, 3)
    look: dict[str, Any] = {"color": LIGHT.text, "alpha": alpha, "zorder": zorder}
    axes.plot([low, high], [y, y], linewidth=width, solid_capstyle="butt", **look)
    size = width if wide else 6.0
    for end, limit, side in ((ends[0], limits[0], -1), (ends[1], limits[1], 1)):
        if end < limits[0] or end > limits[1]:
            arrow = [(0, -1), (side, 0), (0, 1)]
            axes.plot([limit], [y], marker=arrow, markersize=size, markeredgewidth=0, clip_on=False, **look)
        elif not wide:
            axes.plot([end], [y], marker="|", markersize=4.5, color=LIGHT.text, zorder=3)


def _marker(forest: Forest, row: int) -> dict[str, Any]:
    """Return the look of a row's mark: a diamond for the reference, a disc for methods, a ring for baselines."""
    if row == forest.reference:
        return {"marker": "D", "markersize": 4.2, "color": LIGHT.text, "linestyle": "none"}
    face = LIGHT.groups[0] if forest.methods[row] else LIGHT.background
    edge = LIGHT.groups[0] if forest.methods[row] else LIGHT.text
    return {
        "marker": "o", "markersize": 4.4, "markerfacecolor": face, "markeredgecolor": edge, "markeredgewidth": 1.1,
        "linestyle": "none",
    }  # fmt: skip


def _keys(forest: Forest, shown: Sequence[ForestPanel]) -> Iterator[Line2D]:
    """Yield the entries of the legend: the kinds of marks and intervals that are drawn."""

    def mark(row: int, label: str) -> Line2D:
        return Line2D([], [], label=literal(label), **_marker(forest, row))

    yield mark(forest.reference, f"{cut(forest.titles[forest.reference], LABEL_WIDTH)}, dashed line")
    others = [k for k in range(len(forest.titles)) if k != forest.reference]
    for is_method, label in ((True, "other methods"), (False, "baselines")):
        if rows := [k for k in others if forest.methods[k] == is_method]:
            yield mark(rows[0], label)
    marks = [mark for panel in shown for mark in panel.marks if mark is not None]
    if any(mark.corrected for mark in marks):
        yield Line2D([], [], color=LIGHT.text, linewidth=1.0, label=f"95 % interval over {forest.over}")
    if any(mark.over_patients for mark in marks):
        yield Line2D([], [], color=LIGHT.text, alpha=SHADE, linewidth=6, label="95 % interval over patients")
    if forest.has_own_scales:
        yield Line2D([], [], linestyle="none", label="each panel has its own scale")


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """Return a text as at most `most` lines of `width` characters, also broken after underscores; the rest is cut."""
    lines = [
        line.replace(f"_{MARK} ", "_").removesuffix(MARK)
        for line in textwrap.wrap(text.replace("_", f"_{MARK} "), max(width, 8))
    ] or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), width)]
    return [literal(line) for line in lines]
