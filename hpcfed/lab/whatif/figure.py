"""The bar chart of clients' contributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hpcfed.io.console import short_names
from hpcfed.io.figure import literal
from hpcfed.io.figure_style import LIGHT, Medium, blank

FONT, WIDTH, MARGIN, EACH = 10.5, 6.4, 1.4, 0.34
"""Font size in points; the figure's width, its height without bars, and the height per client, in inches."""
MAX_CLIENTS = 40
"""Maximum number of clients in the figure."""


def figure_of(clients: Sequence[Any], column: str, over: str, *, has_shapley: bool) -> Figure:
    """Draw a bar per client with its interval.

    Args:
        clients: the contributions; the `MAX_CLIENTS` largest are drawn.
        column: the score's column in the record.
        over: number and kind of the values behind means and intervals, ``5 seeds``.
        has_shapley: whether bars are Shapley values; else they are leave-one-out values.
    """
    key, title = ("shapley", "Shapley value") if has_shapley else ("left_out", "leave-one-out value")
    shown = sorted(clients, key=lambda one: -np.nan_to_num(getattr(one, key).mean, nan=-np.inf))[:MAX_CLIENTS]
    means = np.array([getattr(one, key).mean for one in shown])
    halves = np.array([getattr(one, key).half_width for one in shown], dtype=float)
    known = np.isfinite(halves)
    figure, axes = blank(Medium(WIDTH, MARGIN + EACH * len(shown), FONT, legend=False))
    places = np.arange(len(shown))
    axes.barh(places, np.nan_to_num(means), color=LIGHT.groups[0], height=0.62, zorder=2)
    for place in places[np.isnan(means)]:
        axes.text(0, place, " –", va="center", color=LIGHT.text)  # no value: not a bar of length 0
    if known.any():
        look: dict[str, Any] = {"fmt": "none", "color": LIGHT.text, "capsize": 3, "zorder": 3}
        axes.errorbar(means[known], places[known], xerr=halves[known], **look)
    axes.axvline(0, color=LIGHT.text, linewidth=0.8)
    axes.set_yticks(places, [literal(name) for name in short_names([one.name for one in shown])])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    what = f"{title} in {literal(column.replace('_', ' '))}, a gain where positive"
    axes.set_xlabel(f"{what}\nwhiskers: 95 % interval over {over}" if known.any() else what)
    return figure
