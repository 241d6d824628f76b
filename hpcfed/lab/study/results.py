"""Results of a study's runs on the sites' test samples: final values, curves, and matrices of counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GLOBAL, TUNED, OWN = "global", "fine-tuned", "personal"
Values = dict[str, Any]
"""Metric → number, nested lists of counts, or None where it is undefined."""


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def mean_of(values: Iterable[Any]) -> float:
    """Return the mean of the finite numbers among `values`; nan if there are none."""
    finite = [value for value in values if is_number(value)]
    return float(np.mean(finite)) if finite else math.nan


@dataclass(frozen=True)
class RunResult:
    """The result of one finished run.

    Attributes:
        split: index of the run's split.
        seed: the run's model seed.
        sites: (model, site) → metrics after the last round; the model is ``global``, ``fine-tuned`` or ``personal``.
        curves: (model, site, metric) → (round, value) of each evaluation with a finite value.
        whole: metrics on the test samples of all sites together, after the last round.
        skipped: indices of the sites whose update was left out in at least one round (see `why_skipped`).
    """

    split: int
    seed: int
    sites: Mapping[tuple[str, int], Values]
    curves: Mapping[tuple[str, int, str], list[tuple[int, float]]] = field(default_factory=dict)
    whole: Values = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()

    def at(self, model: str, site: int, metric: str) -> Any:
        """Return a model's value of a metric at a site; None if it is missing or undefined."""
        return self.sites.get((model, site), {}).get(metric)


@dataclass(frozen=True)
class StudyResults:
    """The results of a study: arm's key → the finished `runs`, and → the number of `planned` runs."""

    runs: Mapping[str, Sequence[RunResult]]
    planned: Mapping[str, int]

    def values(self, arm: str, metric: str, site: int, splits: int, model: str = GLOBAL) -> list[float]:
        """Return an arm's metric at a site, mean over seeds, for each of J = `splits` splits; nan without value."""
        return self._by_split(arm, splits, lambda run: run.at(model, site, metric))

    def whole(self, arm: str, metric: str, splits: int) -> list[float]:
        """Return an arm's metric on all sites' test samples together, mean over seeds, for each of J = `splits` splits.

        The mean is nan if no run of the split has a value.
        """
        return self._by_split(arm, splits, lambda run: run.whole.get(metric))

    def _by_split(self, arm: str, splits: int, value_of: Callable[[RunResult], Any]) -> list[float]:
        runs = self.runs.get(arm, ())
        return [mean_of(value_of(run) for run in runs if run.split == split) for split in range(splits)]

    def counts(self, arm: str, metric: str, model: str, site: int) -> np.ndarray | None:
        """Return an arm's confusion matrix at a site, summed over runs, (C, C); None if no run has one."""
        each = (run.at(model, site, metric) for run in self.runs.get(arm, ()))
        found = [np.array(matrix) for matrix in each if matrix is not None]
        return np.sum(found, axis=0) if found else None
