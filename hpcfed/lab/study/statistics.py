"""Means over splits whose training sets overlap, with corrected confidence intervals.

Values of J splits are no independent sample: their training sets share most of their samples. The variance of their
mean is estimated by (1/J + n_test/n_train) s², in place of s²/J, and the interval is Student's with J − 1 degrees of
freedom. For k folds n_test/n_train is 1/(k − 1).

Reference: Nadeau, Bengio, "Inference for the generalization error", Machine Learning 52, 2003, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpcfed.lab.report.paired import MeanEstimate, student

ROUNDING = 1e-12
"""Relative range of values that differ by rounding alone."""
LOW, HIGH = 2.5, 97.5
DEFINED = 0.95
"""Share of resamples in which a value must be defined."""


def corrected(values: Sequence[float], ratio: float) -> MeanEstimate | None:
    """Return mean and corrected interval of one value a split, those that are not finite left out; None without any.

    Args:
        values: one a split, (J,).
        ratio: n_test / n_train; 0 for independent values.
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    if not len(finite):
        return None
    half = None
    if len(finite) > 1 and np.ptp(finite) > ROUNDING * np.abs(finite).max():
        error = math.sqrt((1 / len(finite) + ratio) * float(finite.var(ddof=1)))
        half = student(len(finite) - 1) * error
    return MeanEstimate(float(finite.mean()), half, len(finite))


def interval(values: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of resampled values (B,); None if more than one in 20 is undefined."""
    defined = values[np.isfinite(values)]
    if len(defined) < DEFINED * len(values):
        return None
    low, high = np.percentile(defined, (LOW, HIGH))
    return float(low), float(high)
