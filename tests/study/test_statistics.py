"""Corrected intervals against scipy and the paper's formula, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hpcfed.lab.study.statistics import corrected

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
