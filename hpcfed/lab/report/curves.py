"""The curves of a figure as data for the page's script, which shows the values under the pointer and smooths curves."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 1000
"""Maximum number of points of a curve on the page; longer curves are thinned."""
POINTS_PER_INCH = 72
OF_METHOD = "method-"
"""Prefix of the SVG group identifiers of a method's drawing; the method's index in the legend follows."""


def curves_of(figure: Figure) -> str:
    """Return the curves of a figure that has been rendered as SVG, in JSON for a script element; "" without curves.

    Keys: ``box`` (left, top, right and bottom of the axes, in SVG units), ``x`` and ``y`` (lower limit, upper limit,
    whether the axis is logarithmic), ``xlabel``, ``percent`` (whether values are fractions), ``points`` (whether they
    are differences of fractions, in percentage points on the axis), and ``curves`` (each with ``m``, the group's index,
    and ``x`` and ``y``, the coordinates of at most `MOST` points).
    """
    (axes,) = figure.axes[:1]
    lines = [line for line in axes.lines if _is_line(line.get_gid())]
    if not lines:
        return ""
    width, height = (POINTS_PER_INCH * inches for inches in figure.get_size_inches())
    place = axes.get_position()
    half = axes.yaxis.get_major_formatter()(0.5, 0)
    content = {
        "box": _short([place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height]),
        "x": [*_short(axes.get_xlim(), 9), axes.get_xscale() == "log"],
        "y": [*_short(axes.get_ylim(), 9), axes.get_yscale() == "log"],
        "xlabel": axes.get_xlabel(),
        "percent": half.endswith("%"),
        "points": half == "+50",
        "curves": [_curve(line) for line in lines],
    }
    return json.dumps(content, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def of_method(index: int, part: str = "line") -> str:
    """Return the SVG identifier of a part of group `index`: ``line``, ``band``, or ``raw``, the means not smoothed."""
    return f"{OF_METHOD}{index}-{part}"


def _is_line(gid: object) -> bool:
    return isinstance(gid, str) and gid.startswith(OF_METHOD) and gid.endswith("-line")


def _curve(line: Any) -> dict[str, Any]:
    x, y = (np.asarray(values, dtype=np.float64) for values in (line.get_xdata(), line.get_ydata()))
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST)).round().astype(int))
    index = int(line.get_gid().removeprefix(OF_METHOD).removesuffix("-line"))
    return {"m": index, "x": _short(x[kept], 7), "y": _short(y[kept], 5)}


def _short(values: Any, digits: int = 5) -> list[float | int | None]:
    """Return numbers rounded to `digits` significant digits: integers if whole, None if not finite."""
    rounded = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]
    return [int(value) if value is not None and value == int(value) else value for value in rounded]
