"""The figures of a report, for paper (light) and for dark screens, drawn without any display or global state.

Lines are means over seeds with a band of ± one standard deviation. Groups keep their colour (after Okabe and Ito's
palette for colour-blind readers) and their dash in all figures: lines stay apart where they coincide, and in grey.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from hpcfed.report.group import Group
from hpcfed.report.measure import Curve, curve, mean_seconds
from hpcfed.report.read import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 160
DASHES = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)))


@dataclass(frozen=True)
class Theme:
    """Colours of the page's background, of text, of lines that only help, and of the groups in turn."""

    background: str
    text: str
    helper: str
    groups: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1c1e21", "#d5d8dc", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
)
DARK = Theme(
    "#1b1e23", "#e4e6ea", "#3d424a", ("#56B4E9", "#FF8A4C", "#2CC69B", "#E29BC4", "#F0C244", "#A9B8FF", "#B5B5B5")
)


@dataclass(frozen=True)
class LinePlot:
    """`column` against the column `against`, one line a group; `caption` says in words what is seen."""

    file: str
    column: str
    against: str
    label: str
    caption: str

    def draw(self, groups: Sequence[Group], targets: Sequence[float], theme: Theme) -> Figure | None:
        """Return the figure with a dotted line at every target, None where no run recorded the column."""
        curves = [curve(group, self.column, self.against) for group in groups]
        if not any(curves):
            return None
        figure, axes = _blank(theme, (6.4, 4.1))
        for index, (group, line) in enumerate(zip(groups, curves, strict=True)):
            if line:
                _draw_curve(axes, line, _plain(group.label), theme, index)
        for target in targets:
            axes.axhline(target, color=theme.text, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        axes.set_ylabel(self.label)
        _scale_horizontal(axes, self.against)
        _scale_vertical(axes, curves, is_percentage=self.column.endswith("accuracy"))
        _add_legend(figure, axes)
        return figure


@dataclass(frozen=True)
class SecondsPlot:
    """Mean seconds of a round by phase, one stacked bar a group."""

    file: str
    column: str
    caption: str

    def draw(self, groups: Sequence[Group], targets: Sequence[float], theme: Theme) -> Figure | None:
        """Return the figure, None without timings; targets are no times, so they leave no mark."""
        seconds = np.nan_to_num(
            [[mean_seconds(group.runs, phase) for phase in PHASES] for group in groups]
        )  # (G, phases)
        if not seconds.any():
            return None
        figure, axes = _blank(theme, (6.4, 1.3 + 0.38 * len(groups)))
        starts = np.cumsum(seconds, axis=1) - seconds
        names = [textwrap.fill(_plain(group.label), 28) for group in groups]
        for index, phase in enumerate(PHASES):
            axes.barh(names, seconds[:, index], 0.62, starts[:, index], label=phase, color=theme.groups[index])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("mean time of a round")
        axes.xaxis.set_major_formatter(ticker.EngFormatter(unit="s"))
        _add_legend(figure, axes)
        return figure


PLOTS: tuple[LinePlot | SecondsPlot, ...] = (
    LinePlot("test-accuracy-rounds.png", "test_accuracy", "round", "test accuracy", "Test accuracy against rounds."),
    LinePlot(
        "test-accuracy-params.png",
        "test_accuracy",
        "params",
        "test accuracy",
        "Test accuracy against parameters sent, up and down.",
    ),
    LinePlot("test-loss-rounds.png", "test_loss", "round", "test loss", "Test loss against rounds."),
    LinePlot(
        "test-loss-params.png", "test_loss", "params", "test loss", "Test loss against parameters sent, up and down."
    ),
    LinePlot(
        "local-loss-rounds.png",
        "local_loss",
        "round",
        "local training loss",
        "Training loss: mean over the minibatches of the cohort's local training.",
    ),
    LinePlot(
        "train-loss-rounds.png",
        "train_loss",
        "round",
        "training loss",
        "Training loss of the global model: unweighted mean over all clients.",
    ),
    LinePlot(
        "train-accuracy-rounds.png",
        "train_accuracy",
        "round",
        "training accuracy",
        "Training accuracy of the global model: unweighted mean over all clients.",
    ),
    LinePlot(
        "server-lr-rounds.png",
        "server_lr",
        "round",
        "server step size $\\eta_g$",
        "Server step size of each round.",
    ),
    SecondsPlot("seconds.png", "seconds", "Where the time of a round goes."),
)


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": "hpcfed report"})
    return buffer.getvalue()


def _blank(theme: Theme, size: tuple[float, float]) -> tuple[Figure, Axes]:
    style: dict[Any, Any] = {
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.text,
        "axes.labelcolor": theme.text,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "text.color": theme.text,
        "grid.color": theme.helper,
        "savefig.facecolor": theme.background,
        "font.size": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.add_subplot()


def _draw_curve(axes: Axes, line: Curve, label: str, theme: Theme, index: int) -> None:
    colour, dash = theme.groups[index % len(theme.groups)], DASHES[index % len(DASHES)]
    marker = "o" if len(line.x) == 1 else None
    axes.plot(line.x, line.mean, color=colour, linestyle=dash, linewidth=1.7, label=label, marker=marker, zorder=3)
    if line.std.any():
        low, high = line.mean - line.std, line.mean + line.std
        axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    for x, y in line.tails:
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=0.7, zorder=3)


def _plain(label: str) -> str:
    """Keep a label from being read as mathematics, or (with a leading underscore) from being left out of the legend."""
    return ("\u200b" + label if label.startswith("_") else label).replace("$", r"\$")


def _scale_horizontal(axes: Axes, against: str) -> None:
    axes.margins(x=0.02)
    if against == "params":
        axes.set_xlabel("parameters sent, up and down")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
    else:
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))


def _scale_vertical(axes: Axes, curves: Sequence[Curve], *, is_percentage: bool) -> None:
    """Accuracies: leave out the steep first tenth of the rounds; the rest: logarithmic when it spans a decade."""
    values = [part for line in curves for part in (line.mean, *(y for _, y in line.tails)) if len(part)]
    if is_percentage:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1, decimals=None, symbol=" %"))
        low = min(part[len(part) // 10 :].min() for part in values)
        high = max(part.max() for part in values)
        if low > 0.5 * high:
            axes.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
        return
    low, high = min(part.min() for part in values), max(part.max() for part in values)
    if 0 < 10 * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend above the axes, in as many columns as its labels leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    fits_one_row = sum(len(label) + 10 for label in labels) <= 80  # ten characters: a handle and its margins
    columns = len(labels) if fits_one_row else max(1, 80 // (max(map(len, labels)) + 10))
    figure.legend(
        handles,
        [textwrap.fill(label, 64) for label in labels],
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
        fontsize=10,
        labelcolor=axes.xaxis.label.get_color(),
    )
