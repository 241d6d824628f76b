"""Numbers of a report as text, with units, digits and standard deviations."""

from __future__ import annotations

import math
from collections.abc import Callable

from matplotlib.ticker import EngFormatter

from hpcfed.lab.report.measure import Criterion, Spread


def criterion_text(value: Spread, criterion: Criterion) -> str:
    """Return a value of the criterion as text: accuracy ``96.62 ± 0.13 %``, loss ``0.1234 ± 0.0021``."""
    if criterion.is_fraction:
        return _with_deviation(value, lambda number: f"{100 * number:.2f}") + " %"
    return _with_deviation(value, lambda number: f"{number:.4g}")


def difference_text(value: float, criterion: Criterion) -> str:
    """Return a difference of the criterion as text: accuracy ``+0.79``, in percentage points; loss ``−0.0123``."""
    text = f"{100 * value:+.2f}" if criterion.is_fraction else f"{value:+.3g}"
    return text.replace("-", "−")


def rounds_difference_text(value: float) -> str:
    """Return a difference in rounds as text: ``−15.3``, ``+4``, ``0``."""
    return f"{value:+.1f}".removesuffix(".0").replace("-", "−") if round(value, 1) else "0"


def hours_text(value: Spread) -> str:
    """Return the mean hours as text, three significant digits below 1000: ``0.0123``, ``1.25``, ``5,312``."""
    return f"{value.mean:.3g}" if value.mean < 1000 else f"{value.mean:,.0f}"


def target_text(target: float, criterion: Criterion) -> str:
    return f"{100 * target:.6g} %" if criterion.is_fraction else f"{target:.6g}"


def rounds_text(value: Spread) -> str:
    """Return a number of rounds as text: ``41 ± 2``."""
    return _with_deviation(value, lambda number: f"{number:.1f}".removesuffix(".0"))


def count_text(value: Spread) -> str:
    """Return a count as text: ``9200``, or ``797.4 ± 3.1 M`` with an SI prefix if the mean is 10,000 or more."""
    exponent = 3 * int(math.log10(value.mean) // 3) if value.mean >= 10_000 else 0
    digits = 1 if exponent else 0
    text = _with_deviation(value, lambda number: f"{number / 10**exponent:.{digits}f}")
    return f"{text} {EngFormatter.ENG_PREFIXES[exponent]}".rstrip()


def seconds_text(value: Spread) -> str:
    """Return seconds as text: ``12.3 ms``, ``1.53 ± 0.02 s``, ``125 ± 3 s``, ``3.21 ± 0.10 h``."""
    if value.mean == 0:
        return "0 s"
    factor, unit = next(
        (entry for entry, least in (((1 / 3600, "h"), 7200), ((1, "s"), 1)) if value.mean >= least), (1e3, "ms")
    )
    digits = max(0, 2 - math.floor(math.log10(value.mean * factor))) if value.mean * factor >= 0.01 else 4
    return _with_deviation(value, lambda number: f"{number * factor:.{digits}f}") + f" {unit}"


def _with_deviation(value: Spread, text: Callable[[float], str]) -> str:
    """Return mean ± standard deviation; the mean alone for a single value or a deviation of zero."""
    return f"{text(value.mean)} ± {text(value.std)}" if value.std else text(value.mean)
