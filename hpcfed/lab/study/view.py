"""Values behind a study's tables, figures and pages: rows × sites × splits, and means over them.

Values of a split are means over its seeds; intervals are of the mean over splits (`hpcfed.lab.study.statistics`). Where
each split leaves one site out, a site has one value, and intervals are those of the mean over sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.study.arms import ALONE
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.results import StudyResults
from hpcfed.lab.study.rows import StudyRow, reference_of
from hpcfed.lab.study.statistics import corrected

MEAN = "Mean of sites"
Resampled = dict[tuple[str, str], np.ndarray]
"""Row and metric → values of each site, then of the mean of the sites, (N + 1, B); nan where undefined."""


@dataclass(frozen=True)
class View:
    """What all tables are made of; `resampled` if patients were resampled."""

    study: Study
    results: StudyResults
    rows: Sequence[StudyRow]
    resampled: Resampled | None = None

    @property
    def sites(self) -> list[str]:
        """The names of the sites, (N,)."""
        return self.study.samples.sites

    def site_values(self, row: StudyRow, metric: StudyMetric) -> np.ndarray:
        """Return a row's values, (N, J); nan where there is none."""
        return np.array([row.values(metric.name, k) for k in range(len(self.sites))])

    def measured(self, metric: StudyMetric) -> np.ndarray:
        """Return the sites that means are over, (N,) bool: all but those without a value in any row and split.

        A site of one class has no AUROC, whatever the model.
        """
        return np.any([np.isfinite(self.site_values(row, metric)).any(axis=1) for row in self.rows], axis=0)

    def over_sites(self, values: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Return the mean over the measured sites of each split, (J,), from values (N, J); nan where one has none.

        Where each split leaves one site out, it is that site's value.
        """
        if self.study.leaves_out:
            return np.diagonal(values)
        return values[measured].mean(axis=0) if measured.any() else np.full(values.shape[1], np.nan)

    @property
    def num_values(self) -> int:
        """How many values an estimate is of where all are defined: the splits; 0 where each leaves one site out."""
        return 0 if self.study.leaves_out else len(self.study.splits.each)

    @property
    def reference(self) -> StudyRow:
        """The row that the others' differences are from."""
        return reference_of(self.study, self.rows)

    def estimates(self, values: np.ndarray, measured: np.ndarray) -> list[MeanEstimate | None]:
        """Return the estimate of each site, and of the mean of the measured sites, (N + 1,), from values (N, J)."""
        ratio = self.study.ratio
        found = [corrected(line.tolist(), ratio) for line in values]
        return [*found, corrected(self.over_sites(values, measured).tolist(), ratio)]

    def cross_values(self, metric: StudyMetric) -> np.ndarray | None:
        """Return the mean over splits of site i's model on site j, (N, N); None if sites are not trained alone."""
        arms = [arm for arm in self.study.arms if arm.kind == ALONE]
        if not arms:
            return None
        count, sites = len(self.study.splits.each), range(len(self.sites))
        values = np.array([[self.results.values(arm.key, metric.name, k, count) for k in sites] for arm in arms])
        return means_over(values)


def means_over(values: np.ndarray) -> np.ndarray:
    """Return means over the last axis, nan left out; nan where there is none."""
    kept = np.isfinite(values)
    total = np.where(kept, values, 0.0).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return total / kept.sum(axis=-1)
