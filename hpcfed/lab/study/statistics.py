"""95 % confidence intervals of a study: of means over splits or sites, and of one split's AUROC and accuracy.

Means over J splits. Values of splits are dependent: their training sets share most of their samples. The variance of
their mean m is therefore estimated by s_NB² = (1/J + n_test/n_train) s² instead of s²/J; the interval is Student's with
J − 1 degrees of freedom. For k folds n_test/n_train is 1/(k − 1). Means over sites, whose samples are disjoint, have no
correction term. For a metric between 0 and 1 the interval is computed on the logit scale, so that it stays in this
range: logit(m) ± t s_NB/(m (1 − m)); there is none if m is 0 or 1. Intervals of differences are computed without the
logit; for metrics between 0 and 1 they are cut at −1 and 1.

One split at one site. AUROC a: the variance of DeLong, DeLong, Clarke-Pearson, computed from midranks as by Sun and Xu,
on the logit scale: logit(a) ± z √var/(a (1 − a)). Accuracy: Wilson's interval for a share of n samples. Both assume
independent samples, so there is no interval if samples have groups, such as patients.

References: Nadeau, Bengio, "Inference for the generalization error", Machine Learning 52, 2003, section 3; DeLong,
DeLong, Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating characteristic curves",
Biometrics 44, 1988; Sun, Xu, "Fast implementation of DeLong's algorithm", IEEE Signal Processing Letters 21, 2014;
Pepe, "The statistical evaluation of medical tests", 2003, section 5.2 (the logit); Wilson, "Probable inference, the law
of succession, and statistical inference", JASA 22, 1927 (as `statsmodels.stats.proportion.proportion_confint` with
``method="wilson"``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpcfed.lab.report.paired import MeanEstimate, student

ROUNDING = 1e-12
"""Relative range up to which values are taken to differ by rounding alone."""
LOW, HIGH = 2.5, 97.5
DEFINED = 0.95
"""Share of resamples in which a value must be defined to have an interval."""
NORMAL = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""
CORRECTED, STUDENT = "Student's t, corrected", "Student's t"
ON_LOGIT, CUT = ", on the logit", ", cut at ±1"
DELONG, WILSON, BOOTSTRAP = "DeLong, on the logit", "Wilson", "bootstrap over patients"
Ends = tuple[float, float]
"""The ends of an interval."""


def corrected(values: Sequence[float], ratio: float, *, share: bool = False) -> MeanEstimate | None:
    """Return the mean of the finite values and its corrected 95 % interval; None if no value is finite.

    There is no interval if only one value is finite, if all finite values are equal, or on the logit scale if the mean
    is 0 or 1.

    Args:
        values: one per split, (J,); if each split leaves one site out, this is one per site.
        ratio: n_test / n_train; 0 for independent values, such as those of sites.
        share: whether values are between 0 and 1, so that the interval is computed on the logit scale.
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    if not len(finite):
        return None
    mean, method = float(finite.mean()), CORRECTED if ratio else STUDENT
    if len(finite) < 2 or np.ptp(finite) <= ROUNDING * np.abs(finite).max():
        return MeanEstimate(mean, None, len(finite))
    half = student(len(finite) - 1) * math.sqrt((1 / len(finite) + ratio) * float(finite.var(ddof=1)))
    if not share:
        return MeanEstimate(mean, half, len(finite), method=method)
    return MeanEstimate(mean, None, len(finite), on_logit(mean, half), method + ON_LOGIT)


def on_logit(mean: float, half: float) -> Ends | None:
    """Return the interval logit(m) ± half/(m (1 − m)), m = `mean`, transformed back to (0, 1); None if m is 0 or 1.

    `half` is half the interval's width before the transformation to the logit scale.
    """
    if not 0 < mean < 1:
        return None
    centre, width = math.log(mean / (1 - mean)), half / (mean * (1 - mean))
    return _expit(centre - width), _expit(centre + width)


def _expit(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def cut(estimate: MeanEstimate | None) -> MeanEstimate | None:
    """Return the estimate of a difference of shares, its interval cut at −1 and 1; None for None."""
    if estimate is None or estimate.interval is None:
        return estimate
    low, high = estimate.interval
    if low >= -1 and high <= 1:
        return estimate
    return replace(estimate, half_width=None, ends=(max(low, -1.0), min(high, 1.0)), method=estimate.method + CUT)


def wilson(share: float, count: int) -> Ends | None:
    """Return Wilson's 95 % interval of a `share` of `count` samples; None if `count` is 0 or `share` is nan.

    The samples are assumed to be independent.
    """
    if not count or not math.isfinite(share):
        return None
    square = NORMAL**2 / count
    centre = (share + square / 2) / (1 + square)
    half = NORMAL / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def delong(scores: Sequence[np.ndarray], positive: np.ndarray) -> tuple[float, float]:
    """Return the mean AUROC of models that score the same n samples, and its DeLong variance.

    Both are nan if a class is absent; only the variance is nan if a class has a single sample. The placement of a
    positive is the share of negatives with a lower score, ties ½; the placement of a negative is the share of positives
    with a higher score. Placements are averaged over the models before the variance is computed.

    Args:
        scores: one array per model, (n,).
        positive: (n,) bool, whether each sample is of the positive class.
    """
    from pandas import Series

    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not (ones and zeros):
        return math.nan, math.nan
    of_ones, of_zeros = np.zeros(ones), np.zeros(zeros)
    for each in scores:
        ranks, above, below = (np.asarray(Series(one).rank()) for one in (each, each[positive], each[~positive]))
        of_ones += (ranks[positive] - above) / zeros
        of_zeros += 1 - (ranks[~positive] - below) / ones
    of_ones, of_zeros = of_ones / len(scores), of_zeros / len(scores)
    spread = [one.var(ddof=1) / len(one) if len(one) > 1 else math.nan for one in (of_ones, of_zeros)]
    return float(of_ones.mean()), float(sum(spread))


def auroc_interval(scores: Sequence[np.ndarray], positive: np.ndarray) -> Ends | None:
    """Return the 95 % interval of AUROC from DeLong's variance, computed on the logit scale and transformed back.

    None if AUROC is 0 or 1, or if the variance is not positive. Arguments are those of `delong`.
    """
    area, variance = delong(scores, positive)
    return on_logit(area, NORMAL * math.sqrt(variance)) if variance > 0 else None


def interval(values: np.ndarray) -> Ends | None:
    """Return the 95 % percentile interval of the finite numbers among B resampled values, (B,).

    None if more than 5 % of the values are not finite.
    """
    defined = values[np.isfinite(values)]
    if len(defined) < DEFINED * len(values):
        return None
    low, high = np.percentile(defined, (LOW, HIGH))
    return float(low), float(high)
