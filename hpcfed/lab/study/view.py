"""Values behind a study's tables, figures and pages: rows × sites × splits, and means over them.

The value of a split is a mean over its seeds; intervals are of the mean over splits (`hpcfed.lab.study.statistics`). If
each split leaves one site out, a site has one value, and intervals are of the mean over sites.

Means of sites are over complete cases: sites on which the metric is defined in all splits and rows, and that have the
classes it needs among every split's test samples. Otherwise methods would be compared on different sites. Complete
cases favour large sites, so the value of all test samples together stands beside the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hpcfed.config.metrics import is_share
from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.study.arms import ALONE
from hpcfed.lab.study.measures import ACCURACY, StudyMetric
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.results import GLOBAL, StudyResults
from hpcfed.lab.study.rows import StudyRow
from hpcfed.lab.study.statistics import BOOTSTRAP, DELONG, WILSON, Ends, corrected, cut, interval, wilson
from hpcfed.lab.study.tested import tested_counts

MEAN, TOGETHER = "Mean of sites", "All samples together"
Resampled = dict[tuple[str, str], np.ndarray]
"""(Row's key, metric's name) → B resampled values of each of N sites, then of their mean, (N + 1, B); or nan."""
Single = Mapping[tuple[str, str], Mapping[int, Ends]]
"""(Row's key, metric's name) → site → interval of the site's value, if only one split tests on the site."""


@dataclass(frozen=True)
class View:
    """The values behind all tables of a study.

    Attributes:
        study, results: the study, and the results of its finished runs.
        rows: the rows of the tables.
        resampled: values in resamples of patients; None before they are computed.
        single: intervals of AUROC at sites on which a single split tests.
    """

    study: Study
    results: StudyResults
    rows: Sequence[StudyRow]
    resampled: Resampled | None = None
    single: Single = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """The names of the sites, (N,)."""
        return self.study.samples.sites

    def site_values(self, row: StudyRow, metric: StudyMetric) -> np.ndarray:
        """Return a row's values of a metric at N sites in J splits, (N, J); nan where missing."""
        splits = len(self.study.splits.each)
        found = [
            [self.results.values(arm, metric.name, site, splits, row.model) for arm in arms]
            for site, arms in enumerate(row.arms)
        ]
        return np.array([np.mean(of_arms, axis=0) for of_arms in found])

    def counts(self, row: StudyRow, metric: str) -> np.ndarray | None:
        """Return a row's confusion matrix, summed over sites and runs, (C, C); None if no run has one."""
        each = (self.results.counts(arm, metric, row.model, site) for site, arms in enumerate(row.arms) for arm in arms)
        found = [matrix for matrix in each if matrix is not None]
        return np.sum(found, axis=0) if found else None

    @cached_property
    def tested(self) -> np.ndarray:
        """The number of test samples in each of J splits at each of N sites, (J, N)."""
        return tested_counts(self.study)

    def measured(self, metric: StudyMetric) -> np.ndarray:
        """Return which sites enter the means, (N,) bool: complete cases, with a value in all splits and rows.

        A site is left out if its test samples in some split lack a class that the metric needs, as AUROC does, or are
        of a single class: a model that always predicts this class has 100 % accuracy. A row need not have values in
        splits in which it has no finished run.
        """
        kept = self._with_classes(metric)
        found = np.zeros(len(self.sites), bool)
        for row in self.rows:
            finite = np.isfinite(self.site_values(row, metric))
            there = self._finished(row) if self.study.leaves_out else finite.any(axis=0)
            kept &= ~(there & (self.tested.T > 0) & ~finite).any(axis=1)
            found |= finite.any(axis=1)
        return kept & found

    def _finished(self, row: StudyRow) -> np.ndarray:
        """Return in which splits, each of which leaves one site out, a row's runs have finished, (J,) bool."""
        done = {(arm, run.split) for arm, runs in self.results.runs.items() for run in runs}
        return np.array([all((arm, site) in done for arm in arms) for site, arms in enumerate(row.arms)])

    def _with_classes(self, metric: StudyMetric) -> np.ndarray:
        """Return at which sites every split's test samples, if any, have the classes that a metric needs, (N,) bool."""
        labels = self.study.tested_labels
        if labels is None:
            return np.ones(len(self.sites), bool)
        lacking = labels.lack_some if metric.needs_all_labels else labels.of_one_class.all(axis=2)
        return np.asarray(~(lacking & labels.tested).any(axis=0))

    def mean_title(self, metric: StudyMetric) -> str:
        """Return the title of the column of means; with numbers of kept sites and samples if sites are left out."""
        kept = self.measured(metric)
        if kept.all() or not kept.any():
            return MEAN
        return f"Mean of {kept.sum()} of {len(kept)} sites, {self.num_tested(kept)} tested samples"

    def num_tested(self, kept: np.ndarray) -> str:
        """Return as text how many samples at the sites `kept`, (N,) bool, some split tests on.

        The text is ``46`` if all sites are kept, else ``40 of 46``, the second number being that of all sites.
        """
        own = np.bincount(
            self.study.samples.owner[np.any([one.tests for one in self.study.splits.each], axis=0)],
            minlength=len(kept),
        )
        return f"{own[kept].sum():,}" if kept.all() else f"{own[kept].sum():,} of {own.sum():,}"

    def over_sites(self, values: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Return the mean of `values`, (N, J), over the sites `measured`, (N,) bool, for each split, (J,).

        The mean is nan if a measured site has no value. If each split leaves one site out, the result of a split is the
        left-out site's value; nan if that site is not measured.
        """
        if self.study.leaves_out:
            return np.where(measured, np.diagonal(values), np.nan)
        return values[measured].mean(axis=0) if measured.any() else np.full(values.shape[1], np.nan)

    def pooled(self, row: StudyRow, metric: StudyMetric) -> np.ndarray:
        """Return a row's metric on the test samples of all sites together, in each split, (J,); nan where undefined.

        For a row whose sites have different models, only accuracy is defined: the share of correct predictions at all
        sites. If each split leaves one site out, even that is undefined for such a row.
        """
        arm = row.arm if row.model == GLOBAL else ""
        whole = np.array(self.results.whole(arm, metric.name, len(self.study.splits.each)), dtype=float)
        if metric.name != ACCURACY or self.study.leaves_out or np.isfinite(whole).any():
            return whole
        values, counts = self.site_values(row, metric), self.tested.T
        with np.errstate(invalid="ignore"):
            return np.asarray((np.where(counts > 0, values, 0.0) * counts).sum(axis=0) / counts.sum(axis=0))

    @property
    def num_values(self) -> int:
        """Number of values in an estimate that lacks none: the number of splits; 0 if every split leaves a site out."""
        return 0 if self.study.leaves_out else len(self.study.splits.each)

    @property
    def reference(self) -> StudyRow:
        """The row of the reference method, which is subtracted from the other rows for differences."""
        return next(row for row in self.rows if row.key == self.study.methods.reference)

    @property
    def ratio(self) -> float:
        """Ratio n_test / n_train of the splits; 0 if each split leaves one site out, whose intervals are over sites."""
        return 0.0 if self.study.leaves_out else self.study.ratio

    def is_share(self, metric: StudyMetric) -> bool:
        """Whether a metric's values are between 0 and 1."""
        return is_share(metric.name, self.study.recipe.evaluate.metrics)

    def estimates(self, row: StudyRow, metric: StudyMetric) -> list[MeanEstimate | None]:
        """Return a row's N + 2 estimates: of the N sites, of the mean of the sites in `measured`, and of `pooled`.

        An estimate is None if no split has a value.
        """
        values, share = self.site_values(row, metric), self.is_share(metric)
        over = self.over_sites(values, self.measured(metric))
        found = [
            corrected(line.tolist(), self.ratio, share=share) for line in (*values, over, self.pooled(row, metric))
        ]
        resampled = None if self.resampled is None else self.resampled.get((row.key, metric.name))
        of_site = [self._of_one_split(row, metric, k, one) for k, one in enumerate(found[: len(values)])]
        return [
            _by_patients(one, None if resampled is None or k >= len(resampled) else resampled[k])
            for k, one in enumerate([*of_site, *found[len(values) :]])
        ]

    def _of_one_split(
        self, row: StudyRow, metric: StudyMetric, site: int, one: MeanEstimate | None
    ) -> MeanEstimate | None:
        """Return a site's estimate; if only one split has a value, with Wilson's or DeLong's interval.

        It gets no such interval if samples have groups.
        """
        if one is None or one.count != 1 or self.study.samples.group is not None:
            return one
        if metric.name == ACCURACY:
            split = int(np.flatnonzero(np.isfinite(self.site_values(row, metric)[site]))[0])
            return replace(one, ends=wilson(one.mean, int(self.tested[split, site])), method=WILSON)
        ends = self.single.get((row.key, metric.name), {}).get(site)
        return one if ends is None else replace(one, ends=ends, method=DELONG)

    def differences(self, row: StudyRow, metric: StudyMetric) -> list[MeanEstimate | None]:
        """Return a row's N + 2 differences from the reference, paired by split, in the order of `estimates`.

        Intervals of differences of shares are cut at −1 and 1.
        """
        values, theirs = self.site_values(row, metric), self.site_values(self.reference, metric)
        apart = values - theirs
        over = self.over_sites(apart, self.measured(metric))
        pooled = self.pooled(row, metric) - self.pooled(self.reference, metric)
        found = [corrected(line.tolist(), self.ratio) for line in (*apart, over, pooled)]
        return [cut(one) for one in found] if self.is_share(metric) else found

    def cross_values(self, metric: StudyMetric) -> np.ndarray | None:
        """Return the metric of the model that site i trains alone, on site j's test samples, (N, N), mean over splits.

        Entries without a value are nan; the result is None if no site trains alone.
        """
        arms = [arm for arm in self.study.arms if arm.kind == ALONE]
        if not arms:
            return None
        count, sites = len(self.study.splits.each), range(len(self.sites))
        values = np.array([[self.results.values(arm.key, metric.name, k, count) for k in sites] for arm in arms])
        return means_over(values)


def _by_patients(estimate: MeanEstimate | None, resampled: np.ndarray | None) -> MeanEstimate | None:
    """Return the estimate; if it has no interval, add the percentile interval of B resampled values, (B,), if any."""
    if estimate is None or estimate.interval is not None or resampled is None:
        return estimate
    ends = interval(resampled)
    return estimate if ends is None or ends[0] == ends[1] else replace(estimate, ends=ends, method=BOOTSTRAP)


def means_over(values: np.ndarray) -> np.ndarray:
    """Return means of the finite values over the last axis; nan where no value is finite."""
    kept = np.isfinite(values)
    total = np.where(kept, values, 0.0).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return total / kept.sum(axis=-1)
