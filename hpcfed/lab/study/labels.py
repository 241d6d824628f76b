"""Label values that occur among each site's test samples in each split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.errors import counted, first_of
from hpcfed.lab.study.samples import SiteSamples
from hpcfed.lab.study.splits import Splits

MOST_NAMED = 4
"""Most labels of a site that a sentence names."""
MOST_SITES_NAMED = 12
"""Most sites that a sentence names."""


@dataclass(frozen=True)
class TestedLabels:
    """Which label values occur among each site's test samples, in each split.

    Classification has one label (M = 1) of V = C classes; multi-label tasks have M labels of V = 2 values.

    Attributes:
        present: (J, N, M, V) bool, over splits, sites, labels and values.
        labels: names of the C classes, or of the M labels.
    """

    present: np.ndarray
    labels: Sequence[str]

    @property
    def several(self) -> bool:
        """Whether each sample has several labels, M > 1."""
        return self.present.shape[2] > 1

    @property
    def tested(self) -> np.ndarray:
        """Which sites each split tests on, (J, N) bool."""
        return np.asarray(self.present.any(axis=(2, 3)))

    @property
    def of_one_class(self) -> np.ndarray:
        """Whether a site's test samples all have one value of a label, (J, N, M) bool; False without test samples."""
        return np.equal(self.present.sum(axis=3), 1)

    @property
    def lack_some(self) -> np.ndarray:
        """Whether a site's test samples lack some value of some label, (J, N) bool; False without test samples."""
        return self.tested & ~self.present.all(axis=(2, 3))

    @property
    def lack_some_everywhere(self) -> bool:
        """Whether every site lacks some value in every split that tests on it."""
        return bool((self.lack_some == self.tested).all())

    def missing(self, sites: Sequence[str]) -> str:
        """Return the missing labels as text: ``ill at west; 3, 8 at north in 2 of 5 splits``; "" if none is missing."""
        found = []
        for k, site in enumerate(sites):
            lacks, of = int(self.lack_some[:, k].sum()), int(self.tested[:, k].sum())
            if lacks:
                absent = (self.tested[:, k, None, None] & ~self.present[:, k]).any(axis=0)
                names = [self._name(label, value) for label, value in np.argwhere(absent).tolist()]
                some = f" in {lacks} of {of} splits" if lacks < of else ""
                found.append(f"{first_of(names, MOST_NAMED)} at {site}{some}")
        more = len(found) - MOST_SITES_NAMED
        rest = f"; and at {counted(more, 'more site')}" if more > 0 else ""
        return "; ".join(found[:MOST_SITES_NAMED]) + rest

    def _name(self, label: int, value: int) -> str:
        return f"{self.labels[label]}={value}" if self.several else self.labels[value]


def tested_labels(samples: SiteSamples, splits: Splits) -> TestedLabels | None:
    """Return the label values among test samples; None if the task is neither classification nor multi-label."""
    if samples.dataset.task not in ("classification", "multi-label"):
        return None
    of_each = samples.dataset.y > 0 if samples.label is None else samples.label[:, None]
    values = 2 if samples.label is None else len(samples.labels)
    sites, owner = len(samples.sites), samples.owner
    counts = np.array([
        [np.bincount(owner[one.tests] * values + label[one.tests], minlength=sites * values) for label in of_each.T]
        for one in splits.each
    ])  # fmt: skip
    return TestedLabels(counts.reshape(*counts.shape[:2], sites, values).swapaxes(1, 2) > 0, samples.labels)
