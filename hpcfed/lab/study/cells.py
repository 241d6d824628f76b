"""Text of table cells for values, estimates and intervals: accuracies in %, – for missing values."""

from __future__ import annotations

import math

from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.statistics import Ends


def value_text(value: float, metric: StudyMetric) -> str:
    """Return a value such as 0.812 as text: ``81.2`` if in percent, else ``0.812``; a dash if it is not finite."""
    if not math.isfinite(value):
        return ABSENT
    return f"{100 * value:z.1f}" if metric.is_percentage else f"{value:z.3f}"  # z: no -0.000


def estimate_text(value: MeanEstimate | None, metric: StudyMetric, splits: int = 0) -> str:
    """Return an estimate as text: ``81.2 ± 0.4``, or ``81.2 [80.1, 82.0]`` if its interval is not symmetric.

    The text begins with ``1 of 5:`` if the estimate is from one of 5 `splits`; with `splits` = 0 it never does. None
    gives a dash.
    """
    if value is None:
        return ABSENT
    width = "" if value.half_width is None else f"\u00a0±\u00a0{value_text(value.half_width, metric)}"
    if value.ends is not None:
        low, high = (value_text(end, metric) for end in value.ends)
        width = f" [{low},\u00a0{high}]"
    some = f"{value.count} of {splits}: " if value.count < splits else ""
    return f"{some}{value_text(value.mean, metric)}{width}"


def difference_text(value: MeanEstimate | None, metric: StudyMetric) -> str:
    """Return an estimate of a difference as text: ``+1.2 [−0.3, +2.7]``, or ``+1.2`` without interval; – for None."""
    if value is None:
        return ABSENT
    mean = _signed(value.mean, metric)
    return mean if value.interval is None else f"{mean} {signed_interval_text(value.interval, metric)}"


def signed_interval_text(ends: Ends | None, metric: StudyMetric) -> str:
    """Return the interval of a difference as text: ``[−0.3, +2.7]``; a dash for None."""
    return ABSENT if ends is None else f"[{_signed(ends[0], metric)},\u00a0{_signed(ends[1], metric)}]"


def percentile_text(mean: float, ends: Ends | None, metric: StudyMetric) -> str:
    """Return a mean and its percentile interval as text: ``81.2 [79.0, 83.1]``, or ``81.2 [–]`` if the ends are equal.

    The text is a dash if the mean is not finite or `ends` is None.
    """
    if ends is None or not math.isfinite(mean):
        return ABSENT
    low, high = (value_text(end, metric) for end in ends)
    shown = ABSENT if ends[0] == ends[1] else f"{low},\u00a0{high}"
    return f"{value_text(mean, metric)} [{shown}]"


def _signed(value: float, metric: StudyMetric) -> str:
    text = f"{100 * value:+.1f}" if metric.is_percentage else f"{value:+.3f}"
    return text.replace("-", "−") if float(text) else "0"
