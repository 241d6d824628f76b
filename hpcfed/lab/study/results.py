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
    """Return the mean of those values that are finite numbers, nan without any."""
    finite = [value for value in values if is_number(value)]
    return float(np.mean(finite)) if finite else math.nan


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        split, seed: of the run.
        sites: site → its values after the last round, by model: ``global``, ``fine-tuned`` or ``personal``.
        curves: (model, site, metric) → (round, value) of each evaluation.
        whole: values on all test samples together.
        skipped: sites whose updates some round did without (`why_skipped`).
    """

    split: int
    seed: int
    sites: Mapping[tuple[str, int], Values]
    curves: Mapping[tuple[str, int, str], list[tuple[int, float]]] = field(default_factory=dict)
    whole: Values = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()

    def at(self, model: str, site: int, metric: str) -> Any:
        """Return a model's value of a metric at a site; None where it is missing."""
        return self.sites.get((model, site), {}).get(metric)


@dataclass(frozen=True)
class StudyResults:
    """The finished runs of each arm, by its key, and how many there should be."""

    runs: Mapping[str, Sequence[RunResult]]
    planned: Mapping[str, int]

    def values(self, arm: str, metric: str, site: int, splits: int, model: str = GLOBAL) -> list[float]:
        """Return a metric on a site in each split, (J,), each a mean over seeds; nan where it is missing."""
        return self._by_split(arm, splits, lambda run: run.at(model, site, metric))

    def whole(self, arm: str, metric: str, splits: int) -> list[float]:
        """Return a metric on all test samples together in each split, (J,), as `values` does."""
        return self._by_split(arm, splits, lambda run: run.whole.get(metric))

    def _by_split(self, arm: str, splits: int, value_of: Callable[[RunResult], Any]) -> list[float]:
        runs = self.runs.get(arm, ())
        return [mean_of(value_of(run) for run in runs if run.split == split) for split in range(splits)]

    def counts(self, arm: str, metric: str, model: str, site: int) -> np.ndarray | None:
        """Return a confusion matrix on a site, added up over runs, (C, C); None without any."""
        each = (run.at(model, site, metric) for run in self.runs.get(arm, ()))
        found = [np.array(matrix) for matrix in each if matrix is not None]
        return np.sum(found, axis=0) if found else None
