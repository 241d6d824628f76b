"""Splits are valid: no sample on both sides, strata kept, each sample once in the folds; and what is too small falls
back with a word."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import StratifiedKFold, train_test_split

from hpcfed.errors import InputError
from hpcfed.lab.study.splits import Divisible, make_splits

RNG = np.random.default_rng(0)
SITE = np.repeat([0, 1, 2], (61, 34, 23))
LABEL = (RNG.random(len(SITE)) < np.array([0.3, 0.5, 0.2])[SITE]).astype(np.int64)
NAMES = ["a", "b", "c"]


def split(kind: str, count: int = 5, *, label=LABEL, fraction: float = 0.2, seed: int = 0):
    return make_splits(kind, Divisible(SITE, label, NAMES, ["well", "ill"]), count, fraction, seed)


def counts(tests: np.ndarray) -> np.ndarray:
    """Test samples by site and label, (3, 2)."""
    return np.array([[np.sum(tests & (k == SITE) & (c == LABEL)) for c in (0, 1)] for k in range(3)])


def test_folds_hold_each_sample_once_and_keep_the_strata():
    """As scikit-learn's do, site by site: the counts of a fold differ by one at most, and so do its sizes."""
    found = split("k-fold")
    tests = np.array([one.tests for one in found.each])
    assert (tests.sum(axis=0) == 1).all()
    assert not found.remarks
    for k in range(3):
        rows = k == SITE
        assert np.ptp(tests[:, rows].sum(axis=1)) <= 1
        theirs = [
            np.bincount(LABEL[rows][t], minlength=2) for _, t in StratifiedKFold(5).split(LABEL[rows], LABEL[rows])
        ]
        ours = [np.bincount(LABEL[rows][one[rows]], minlength=2) for one in tests]
        assert np.ptp(ours, axis=0).max() <= 1
        assert sorted(map(tuple, ours)) == sorted(map(tuple, theirs)) or np.abs(np.subtract(ours, theirs)).max() <= 1


def test_holdouts_keep_the_strata_and_differ():
    """A site has as many test samples as scikit-learn's split of it, and each label its share, to one sample."""
    found = split("holdout")
    assert len({one.tests.tobytes() for one in found.each}) == 5
    whole = counts(np.ones(len(SITE), bool))
    for one in found.each:
        assert np.abs(counts(one.tests) - 0.2 * whole).max() < 1
        for k in range(3):
            rows = np.flatnonzero(k == SITE)
            theirs = train_test_split(rows, test_size=round(0.2 * len(rows)), stratify=LABEL[rows], random_state=0)[1]
            assert np.sum(one.tests[rows]) == len(theirs)
        assert one.ratio == pytest.approx(one.tests.sum() / (~one.tests).sum())


def test_the_same_seed_gives_the_same_splits_whatever_their_number():
    five, three = split("holdout").each, split("holdout", 3).each
    assert all(np.array_equal(a.tests, b.tests) for a, b in zip(five, three, strict=False))
    assert not np.array_equal(split("holdout", seed=1).each[0].tests, five[0].tests)


def test_a_site_left_out_is_tested_whole():
    found = split("leave-one-site-out")
    assert [one.site for one in found.each] == [0, 1, 2]
    assert all(np.array_equal(one.tests, k == SITE) for k, one in enumerate(found.each))


def test_a_stratum_too_small_falls_back_with_a_word():
    """One sample of a label cannot lie on both sides: it joins the others, and a line names site and label."""
    rare = np.where(SITE == 2, 0, LABEL)
    rare[np.flatnonzero(SITE == 2)[0]] = 1
    for kind in ("holdout", "k-fold"):
        found = split(kind, label=rare)
        assert [line for line in found.remarks if "c:" in line and "ill" in line]
        tests = np.array([one.tests for one in found.each])
        assert (tests[:, SITE == 2].sum(axis=1) >= 4).all()
    assert not split("holdout", label=None).remarks


def test_few_samples_are_refused():
    with pytest.raises(InputError, match="site 'c' is too small: expected at least 24 samples, got 23"):
        split("k-fold", 24)


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_both_sides_of_a_stratum_have_a_sample(fraction):
    whole = counts(np.ones(len(SITE), bool))
    found = split("holdout", fraction=fraction)
    for one in found.each:
        assert (counts(one.tests) >= 1).all()
        assert (counts(one.tests) < whole).all()
    tested = "b (2 of 34), c (2 of 23)" if fraction == 0.01 else "b (32 of 34), c (21 of 23)"
    why = "since each label keeps a sample in both parts: tested are"
    assert found.remarks == (f"--test-fraction {fraction:g} is not met, {why} {tested}",)
    assert not split("holdout", fraction=0.05).remarks  # b and c test on one sample more, or as many
