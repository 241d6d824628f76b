"""The figures of a report, in the style of `hpcfed.io.figure_style`.

Lines of a `LinePlot` are means over seeds with a band of ± one standard deviation; with a window above 1 they are
moving averages, over a paler line of the recorded means.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import ticker
from matplotlib.lines import Line2D

from hpcfed.io.figure import literal
from hpcfed.io.figure_style import DASHES, LIGHT, Medium, blank, markers, over
from hpcfed.lab.report.clients import Clients, from_worst
from hpcfed.lab.report.curves import of_method
from hpcfed.lab.report.group import Group
from hpcfed.lab.report.measure import Criterion, Curve, Quantity, curve, mean_seconds, unit_of
from hpcfed.lab.report.paired import difference_curve, other_samples, pairs
from hpcfed.run_folder.rounds import PHASES, is_own

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PERCENT = ticker.FuncFormatter(lambda value, _: f"{round(100 * value, 9):g} %")


DISTINCT = math.lcm(len(LIGHT.groups), len(DASHES))
"""Number of groups whose lines can be told apart by colour and dash."""
LINE, ROOM = 0.2, 4
"""Height of a legend's line in inches, and number of lines that fit before the figure grows."""


@dataclass(frozen=True)
class Scene:
    """The input that all figures of a report share."""

    groups: Sequence[Group]
    criterion: Criterion
    targets: Sequence[float]
    window: int
    baseline: Group


@dataclass(frozen=True)
class LinePlot:
    """A figure of `column`, which its axis calls `label`, against the column `against`, one line per group."""

    file: str
    column: str
    against: str
    label: str
    caption: str

    def draw(self, scene: Scene, medium: Medium) -> Figure | None:
        """Return the figure for a medium; None if no run recorded both `column` and `against`.

        If `column` is the criterion's, dotted lines mark the targets.
        """
        curves = [curve(group, self.column, self.against, scene.window) for group in scene.groups]
        if not any(curves):
            return None
        figure, axes = blank(medium)
        for index, (group, line) in enumerate(zip(scene.groups, curves, strict=True)):
            if line:
                _draw_curve(axes, line, _plain(group.label), index)
            if scene.window > 1:
                raw = curve(group, self.column, self.against)
                pale: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.7, "zorder": 1, "gid": of_method(index, "raw")}
                axes.plot(raw.x, raw.mean, color=_colour(index), **pale)
        for target in scene.targets if self.column == scene.criterion.column else ():
            axes.axhline(target, color=LIGHT.text, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        axes.set_ylabel(self.label)
        _scale_horizontal(axes, self.against)
        unit = unit_of(self.column, [run for group in scene.groups for run in group.runs])
        _scale_vertical(axes, curves, self.column, unit)
        _add_legend(figure, axes, medium)
        return figure


@dataclass(frozen=True)
class PathPlot:
    """A figure of `columns`, (x, y), against each other: the path of each group's first run, one point per round."""

    file: str
    columns: tuple[str, str]
    caption: str

    def draw(self, scene: Scene, medium: Medium) -> Figure | None:
        """Return the figure for a medium; None if no run recorded both `columns`."""
        paths = [[group.runs[0].column(column) for column in self.columns] for group in scene.groups]
        if not any(np.isfinite(path).all(axis=0).any() for path in paths):
            return None
        figure, axes = blank(medium)
        for index, (group, (x, y)) in enumerate(zip(scene.groups, paths, strict=True)):
            axes.plot(x, y, color=_colour(index), linewidth=1.2, marker="o", markersize=3.5, label=_plain(group.label))
        axes.set_xlabel(literal(self.columns[0].removeprefix("test_")))
        axes.set_ylabel(literal(self.columns[1].removeprefix("test_")))
        axes.set_aspect("equal", adjustable="datalim")
        _add_legend(figure, axes, medium)
        return figure


@dataclass(frozen=True)
class DifferencePlot:
    """A figure of the criterion's paired difference from the baseline against rounds, with confidence intervals."""

    file: str
    caption: str

    def draw(self, scene: Scene, medium: Medium) -> Figure | None:
        """Return the figure for a medium; None if no group shares a seed and the scored samples with the baseline."""
        figure, axes = blank(medium)
        for index, group in enumerate(scene.groups):
            paired = pairs(scene.baseline, group) if group is not scene.baseline else []
            if not paired or other_samples(*paired[0], scene.criterion.column):
                continue
            x, mean, half = difference_curve(paired, scene.criterion.column, scene.window)
            if len(x):
                _draw_curve(axes, Curve(x, mean, half, ()), _plain(group.label), index)
        if not axes.lines:
            return None
        axes.axhline(0, color=LIGHT.text, linewidth=1, zorder=1)
        if scene.criterion.is_fraction:
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _signed(100 * value)))
        unit = " in points" if scene.criterion.is_fraction else ""
        axes.set_ylabel(literal(f"{scene.criterion.title}, difference{unit}"))
        _focus(axes)
        _scale_horizontal(axes, "round")
        _add_legend(figure, axes, medium)
        return figure


@dataclass(frozen=True)
class ClientsPlot:
    """A figure of the clients' accuracies, or else losses, at the last evaluation, sorted from worst to best."""

    file: str
    caption: str

    def draw(self, scene: Scene, medium: Medium) -> Figure | None:
        """Return the figure for a medium, one line per group; None if no run has a finite value of any client."""
        figure, axes = blank(medium)
        measured = [[run.clients for run in group.runs if run.clients] for group in scene.groups]
        measure = next((clients.measure for entry in measured for clients in entry), "")
        is_accuracy = measure == "accuracy"
        every: list[Clients] = []
        others: list[str] = []
        for index, (group, entry) in enumerate(zip(scene.groups, measured, strict=True)):
            same = [clients for clients in entry if clients.measure == measure]
            every += same
            others += [_plain(group.label)] if entry and not same else []
            ordered = [from_worst(clients.main, higher_is_better=is_accuracy) for clients in same]
            shared = min(map(len, ordered), default=0)
            if not shared:
                continue
            stacked = np.stack([values[:shared] for values in ordered])  # (runs, clients)
            std = stacked.std(axis=0, ddof=1) if len(ordered) > 1 else np.zeros(shared)
            x = (np.arange(shared) + 0.5) / shared
            _draw_curve(axes, Curve(x, stacked.mean(axis=0), std, ()), _plain(group.label), index)
        if not axes.lines:
            return None
        axes.set_xlabel("share of the clients, worst first")
        models, splits = ({getattr(clients, key): None for clients in every} for key in ("model", "split"))
        part = {"all": "", "train": "training "}
        where = " or ".join(f"{part.get(split, f'{split} ')}samples" for split in splits)
        if others:
            axes.set_title(
                textwrap.fill(f"without {measure}: {', '.join(others)}", 60), fontsize=medium.font, loc="left"
            )
        axes.set_ylabel(literal(f"{measure} of the {' or '.join(models)} model\non each client's {where}"))
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PERCENT)
        if is_accuracy:
            axes.yaxis.set_major_formatter(PERCENT)
            axes.set_ylim(top=min(axes.get_ylim()[1], 1.01))  # bands above 100 % accuracy are cut off
        _add_legend(figure, axes, medium)
        return figure


@dataclass(frozen=True)
class SecondsPlot:
    """A figure of the mean seconds of a round by phase, one stacked bar for each of the first `DISTINCT` groups.

    The record holds the local seconds of the slowest rank and the ranks' mean wait for it. The bar begins with their
    difference, which is the ranks' mean local work.
    """

    file: str
    caption: str

    def draw(self, scene: Scene, medium: Medium) -> Figure | None:
        """Return the figure for a medium, always with a legend of the phases; None if no run recorded times."""
        groups = scene.groups[:DISTINCT]  # the figure grows with them
        seconds = np.nan_to_num(
            [[mean_seconds(group.runs, phase) for phase in PHASES] for group in groups]
        )  # (G, phases)
        if not seconds.any():
            return None
        seconds[:, 0] = np.maximum(seconds[:, 0] - seconds[:, 1], 0)
        names = [textwrap.fill(_plain(group.label), 22) for group in groups]
        heights = np.array([0.18 * (name.count("\n") + 2) for name in names])  # inches, by the lines of the label
        places = np.cumsum(heights) - heights / 2
        figure, axes = blank(medium, 1.1 + heights.sum())
        starts = np.cumsum(seconds, axis=1) - seconds
        for index, phase in enumerate(PHASES):
            axes.barh(places, seconds[:, index], 0.22, starts[:, index], label=phase, color=LIGHT.phases[index])
        axes.set_yticks(places, names)
        axes.set_ylim(heights.sum(), 0)
        axes.grid(visible=False, axis="y")
        of = f"\nof the first {DISTINCT} of {len(scene.groups)}" if len(scene.groups) > DISTINCT else ""
        axes.set_xlabel(f"mean time of a round{of}")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(unit="s"))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=len(PHASES),
            frameon=False,
            handlelength=1,
            handletextpad=0.4,
            columnspacing=1,
            labelcolor=LIGHT.text,
        )
        return figure


def _colour(index: int) -> str:
    return LIGHT.groups[index % len(LIGHT.groups)]


def _draw_curve(axes: Axes, line: Curve, label: str, index: int) -> None:
    colour, dash = _colour(index), DASHES[index % len(DASHES)]
    drawn = {**markers(len(line.x)), "gid": of_method(index), "zorder": over(index)}
    axes.plot(line.x, line.mean, color=colour, linestyle=dash, linewidth=1.7, label=label, **drawn)
    if line.std.any():
        low, high = line.mean - line.std, line.mean + line.std
        axes.fill_between(
            line.x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2, gid=of_method(index, "band")
        )
    for x, y in line.tails:
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=0.7, **{**drawn, **markers(len(x))})


def _plain(label: str) -> str:
    """Return a label that matplotlib shows verbatim: not as mathematics, and not hidden for a leading underscore."""
    return literal("\u200b" + label if label.startswith("_") else label)


def _signed(value: float) -> str:
    return f"{value:+g}".replace("-", "−") if round(value, 9) else "0"


HORIZONTAL = {
    "round": "round",
    "params": "parameters sent, up and down",
    "gradients": "minibatch gradients computed",
    "seconds": "time",
}


def _scale_horizontal(axes: Axes, against: str) -> None:
    axes.margins(x=0.02)
    axes.set_xlabel(HORIZONTAL[against])
    if against == "round":
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
        return
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    if against == "seconds":
        most = axes.get_xlim()[1]
        factor, unit = next((entry for entry in ((3600, "h"), (60, "min")) if most > 3 * entry[0]), (1, "s"))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=(1, 2, 3, 5, 10)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / factor:g} {unit}"))
    else:
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=" "))


def _scale_vertical(axes: Axes, curves: Sequence[Curve], column: str, unit: Quantity) -> None:
    """Set the vertical axis of a figure of `column`.

    Fractions: the axis may cut off the steep first tenth of the rounds, and bands above 1. User-defined metrics within
    [0, 1], mostly fractions: the axis is linear and cuts bands off outside [0, 1]. All others: the axis is logarithmic
    if the values are positive and span more than a factor of ten.
    """
    values = [part for line in curves for part in (line.mean, *(y for _, y in line.tails)) if len(part)]
    if unit == "fraction":
        axes.yaxis.set_major_formatter(PERCENT)
        shared = [line for line in curves if len(line.mean)]
        lower = [line.mean - line.std for line in shared]
        upper = [np.maximum(line.mean, np.minimum(line.mean + line.std, 1.0)) for line in shared]
        low = min(part[len(part) // 10 :].min() for part in (*values, *lower))
        high = max(part.max() for part in (*values, *upper))
        if low > 0.5 * high:
            axes.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
        return
    low, high = min(part.min() for part in values), max(part.max() for part in values)
    if is_own(column) and low >= 0 and high <= 1:
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, -0.01), min(top, 1.01))
    elif 0 < 10 * low < high:
        axes.set_yscale("log")
        margin = (high / low) ** 0.03
        bottom = low / max(1.3, margin)
        axes.set_ylim(bottom, high * max(1.2, margin))
        _end_bands_at(axes, bottom)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _end_bands_at(axes: Axes, bottom: float) -> None:
    """Cut bands off at the lower end of a logarithmic axis, which cannot show a mean − deviation of 0 or less."""
    for band in axes.collections:
        for path in band.get_paths():
            path.vertices = np.maximum(path.vertices, (-np.inf, bottom))


def _focus(axes: Axes) -> None:
    """Fit the axes to the differences after the steep first tenth of the rounds; earlier ones may be cut off."""
    courses = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
    late = np.concatenate([course[len(course) // 10 :] for course in courses])
    margin = 0.6 * (max(late.max(), 0.0) - min(late.min(), 0.0)) or 1e-3
    axes.set_ylim(min(late.min(), 0.0) - margin, max(late.max(), 0.0) + margin)


def _add_legend(figure: Figure, axes: Axes, medium: Medium) -> None:
    """Put the legend above the axes, in as many columns as fit; the page has its own legend."""
    if not medium.legend:
        return
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > DISTINCT:
        labels = [*labels[:DISTINCT], f"and {len(labels) - DISTINCT} more, which look like these"]
        handles = [*handles[:DISTINCT], Line2D([], [], linestyle="none")]
    fits_one_row = sum(len(label) + 10 for label in labels) <= 80  # ten characters: a handle and its margins
    columns = len(labels) if fits_one_row else max(1, 80 // (max(map(len, labels)) + 10))
    wrapped = [textwrap.fill(label, 64) for label in labels]
    lines = sum(label.count("\n") + 1 for label in wrapped) / columns
    figure.set_figheight(medium.height + LINE * max(0.0, lines - ROOM))
    figure.legend(
        handles,
        wrapped,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
        fontsize=10,
        labelcolor=LIGHT.text,
    )
