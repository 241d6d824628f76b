"""The rows of a study's tables: its arms, the sites' own models as one row, and the models made of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.study.arms import ALONE, ENSEMBLE, FEDERATED, PERSONALISED, Arm
from hpcfed.study.measured import GLOBAL, TUNED, StudyResults
from hpcfed.study.plan import Study


@dataclass(frozen=True)
class StudyRow:
    """One row: its name in files, its title, its gradient steps, and its values.

    `values` maps a metric and a site to one value a split, (J,), `whole` a metric to those of all test samples
    together; nan where there is none. `curve` names the arm and model whose curves are its, "" for none.
    """

    key: str
    title: str
    steps: str
    values: Callable[[str, int], list[float]]
    whole: Callable[[str], list[float]]
    counts: Callable[[str], np.ndarray | None]
    arm: str = ""
    model: str = GLOBAL


def rows_of(study: Study, results: StudyResults) -> list[StudyRow]:
    """Return the rows: the federated methods, then the baselines."""
    arms = study.arms
    rows = [_of_arm(study, results, arm) for arm in arms if arm.kind == FEDERATED]
    if PERSONALISED in study.baselines and not study.leaves_out:
        rows.append(_tuned(study, results))
    rows += [_of_arm(study, results, arm) for arm in arms if arm.kind not in (FEDERATED, ALONE)]
    alone = [arm for arm in arms if arm.kind == ALONE]
    if ALONE in study.baselines:
        rows.append(_alone(study, results, alone))
    if ENSEMBLE in results.runs:
        steps = f"{alone[0].steps} at each of {len(alone)} sites"
        rows.append(_row(study, results, ENSEMBLE, "Ensemble of the sites' models", steps))
    return rows


def reference_of(study: Study, rows: Sequence[StudyRow]) -> StudyRow:
    """Return the row that differences are from."""
    return next(row for row in rows if row.key == study.methods.reference)


def _of_arm(study: Study, results: StudyResults, arm: Arm) -> StudyRow:
    return _row(study, results, arm.key, arm.title, arm.steps, arm.key)


def _row(study: Study, results: StudyResults, key: str, title: str, steps: str, arm: str = "") -> StudyRow:
    count = len(study.splits.each)
    return StudyRow(
        key,
        title,
        steps,
        lambda metric, site: results.values(key, metric, site, count),
        lambda metric: results.whole(key, metric, count),
        lambda metric: results.counts(key, metric),
        arm,
    )


def _tuned(study: Study, results: StudyResults) -> StudyRow:
    """Return the reference's model after K steps of fine-tuning on each site's training samples."""
    arm, count = study.methods.reference, len(study.splits.each)
    of_arm = next(one for one in study.arms if one.key == arm)
    return StudyRow(
        PERSONALISED,
        f"{of_arm.title}, fine-tuned at each site",
        f"{of_arm.steps}, + {study.work.steps:,}",
        lambda metric, site: results.values(arm, metric, site, count, TUNED),
        lambda metric: [np.nan] * count,
        lambda metric: results.counts(arm, metric, TUNED),
        arm,
        TUNED,
    )


def _alone(study: Study, results: StudyResults, arms: Sequence[Arm]) -> StudyRow:
    """Return each site's own model on that site; on a site that is left out, the mean over the others' models."""
    count = len(study.splits.each)

    def values(metric: str, site: int) -> list[float]:
        whose = [arm for arm in arms if (arm.site == site) != study.leaves_out]
        found = np.array([results.values(arm.key, metric, site, count) for arm in whose])
        return found.mean(axis=0).tolist()

    def counts(metric: str) -> np.ndarray | None:
        own = [results.counts(arm.key, metric, site=None if study.leaves_out else arm.site) for arm in arms]
        found = [matrix for matrix in own if matrix is not None]
        return np.sum(found, axis=0) if found else None

    title = "A single other site, mean" if study.leaves_out else "Each site alone"
    return StudyRow(ALONE, title, arms[0].steps, values, lambda metric: [np.nan] * count, counts)
