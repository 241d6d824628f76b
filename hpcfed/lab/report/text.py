"""Numbers of a report as text: units, digits, and deviations."""

from __future__ import annotations

import math
from collections.abc import Callable

from matplotlib.ticker import EngFormatter

from hpcfed.lab.report.measure import Criterion, Spread


def criterion_text(value: Spread, criterion: Criterion) -> str:
    """``96.62 ± 0.13 %`` for an accuracy, ``0.1234 ± 0.0021`` for a loss."""
    if criterion.is_fraction:
        return _with_deviation(value, lambda number: f"{100 * number:.2f}") + " %"
    return _with_deviation(value, lambda number: f"{number:.4g}")


def difference_text(value: float, criterion: Criterion) -> str:
    """``+0.79`` percentage points for an accuracy, ``−0.0123`` for a loss."""
    text = f"{100 * value:+.2f}" if criterion.is_fraction else f"{value:+.3g}"
    return text.replace("-", "−")


def rounds_difference_text(value: float) -> str:
    """``−15.3``, ``+4``, ``0``."""
    return f"{value:+.1f}".removesuffix(".0").replace("-", "−") if round(value, 1) else "0"


def hours_text(value: Spread) -> str:
    """``0.0123``, ``1.25``, ``312``: three significant digits."""
    return f"{value.mean:.3g}" if value.mean < 1000 else f"{value.mean:,.0f}"


def target_text(target: float, criterion: Criterion) -> str:
    return f"{100 * target:.6g} %" if criterion.is_fraction else f"{target:.6g}"


def rounds_text(value: Spread) -> str:
    """``41 ± 2``."""
    return _with_deviation(value, lambda number: f"{number:.1f}".removesuffix(".0"))


def count_text(value: Spread) -> str:
    """``797.4 ± 3.1 M``: from ten thousand on with an SI prefix, chosen by the mean."""
    exponent = 3 * int(math.log10(value.mean) // 3) if value.mean >= 10_000 else 0
    digits = 1 if exponent else 0
    text = _with_deviation(value, lambda number: f"{number / 10**exponent:.{digits}f}")
    return f"{text} {EngFormatter.ENG_PREFIXES[exponent]}".rstrip()


def seconds_text(value: Spread) -> str:
    """``12.3 ms``, ``1.53 ± 0.02 s``, ``125 ± 3 s``, ``3.21 ± 0.10 h``."""
    if value.mean == 0:
        return "0 s"
    factor, unit = next(
        (entry for entry, least in (((1 / 3600, "h"), 7200), ((1, "s"), 1)) if value.mean >= least), (1e3, "ms")
    )
    digits = max(0, 2 - math.floor(math.log10(value.mean * factor))) if value.mean * factor >= 0.01 else 4
    return _with_deviation(value, lambda number: f"{number * factor:.{digits}f}") + f" {unit}"


def _with_deviation(value: Spread, text: Callable[[float], str]) -> str:
    """Write mean ± deviation; the mean alone for a single value or a deviation of zero."""
    return f"{text(value.mean)} ± {text(value.std)}" if value.std else text(value.mean)
