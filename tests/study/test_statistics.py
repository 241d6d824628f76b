"""Corrected intervals against scipy and the paper's formula, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hpcfed.lab.study.statistics import CUT, auroc_interval, corrected, cut, delong, on_logit, wilson

VALUES = [0.71, 0.74, 0.69, 0.75, 0.70]


def test_the_interval_is_nadeau_and_bengios():
    """½ width: t · s · √(1/J + n_test/n_train), at the 97.5 % quantile of Student's t with J − 1 degrees of freedom."""
    found = corrected(VALUES, 0.25)
    assert found.mean == pytest.approx(np.mean(VALUES))
    by_hand = stats.t.ppf(0.975, 4) * np.std(VALUES, ddof=1) * math.sqrt(1 / 5 + 0.25)
    assert found.half_width == pytest.approx(by_hand, rel=1e-12)


def test_without_overlap_it_is_the_usual_one():
    low, high = stats.ttest_1samp(VALUES, 0).confidence_interval(0.95)
    found = corrected(VALUES, 0.0)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high))


def test_values_that_are_missing_are_left_out():
    assert corrected([*VALUES, math.nan], 0.25) == corrected(VALUES, 0.25)
    assert corrected([math.nan], 0.25) is None
    assert corrected([0.5], 0.25).half_width is None


def test_equal_values_have_no_interval():
    """Not even where they differ by rounding: a deviation of zero says nothing of the mean's uncertainty."""
    found = corrected([0.1 + 0.2, 0.3, 0.3], 0.25)
    assert found.half_width is None
    assert not found.is_clear


def test_of_shares_it_stays_between_0_and_1():
    """logit(m) ± t s_NB / (m (1 − m)); the same to first order in the middle; none where the mean is 0 or 1."""
    values = [0.99, 0.95, 1.0, 0.6, 0.745]
    plain, found = corrected(values, 0.25), corrected(values, 0.25, share=True)
    assert plain.interval[1] > 1
    low, high = found.interval
    m, half = found.mean, plain.half_width / (found.mean * (1 - found.mean))
    logit = math.log(m / (1 - m))
    assert (low, high) == pytest.approx([1 / (1 + math.exp(half - logit)), 1 / (1 + math.exp(-half - logit))])
    assert 0 < low < m < high < 1
    narrow = [0.5, 0.5001, 0.4999]
    assert corrected(narrow, 0.25, share=True).interval == pytest.approx(corrected(narrow, 0.25).interval, abs=1e-8)
    assert on_logit(1.0, 0.1) is None
    assert on_logit(0.0, 0.1) is None
    assert corrected([1.0, 1.0], 0.25, share=True).interval is None


def test_differences_are_cut_at_1_and_say_so():
    wide, narrow = (cut(corrected(values, 0.25)) for values in ([0.9, 0.2, -0.8], [0.1, 0.12]))
    assert wide.interval == (-1, 1)
    assert wide.method.endswith(CUT)
    assert not wide.is_clear
    assert narrow == corrected([0.1, 0.12], 0.25)


@pytest.mark.parametrize(("right", "count"), [(0, 7), (5, 7), (7, 7), (83, 120)])
def test_of_one_splits_accuracy_it_is_wilsons(right, count):
    ends = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right / count, count) == pytest.approx((ends.low, ends.high), abs=1e-12)


def test_of_one_splits_auroc_it_is_delongs():
    """By the definition, pair by pair, with ties; of several models their mean's; near a bootstrap's deviation."""
    rng = np.random.default_rng(0)
    positive = rng.random(60) < 0.4
    scores = [(positive + rng.normal(size=60)).round(1), (0.5 * positive + rng.normal(size=60)).round(1)]

    def kernel(score):
        apart = score[positive][:, None] - score[~positive]
        return (apart > 0) + 0.5 * (apart == 0)

    for each in (scores[:1], scores):
        pairs = np.mean([kernel(score) for score in each], axis=0)
        variance = sum(pairs.mean(axis).var(ddof=1) / pairs.shape[1 - axis] for axis in (0, 1))
        assert delong(each, positive) == pytest.approx((pairs.mean(), variance))
    area, variance = delong(scores[:1], positive)
    again = []
    for _ in range(2000):
        ones, zeros = (rng.choice(np.flatnonzero(which), which.sum()) for which in (positive, ~positive))
        apart = scores[0][ones][:, None] - scores[0][zeros]
        again.append(np.mean((apart > 0) + 0.5 * (apart == 0)))
    assert math.sqrt(variance) == pytest.approx(np.std(again), rel=0.1)
    low, high = auroc_interval(scores[:1], positive)
    assert 0.5 < low < area < high < 1
    assert auroc_interval([positive.astype(float)], positive) is None
    assert auroc_interval(scores, np.ones(60, bool)) is None
