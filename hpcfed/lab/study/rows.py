"""The rows of a study's tables: its arms, the sites' own models as one row, and the models made of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.config.load import load_recipe, to_plain
from hpcfed.lab.study.arms import ALONE, ENSEMBLE, FEDERATED, PERSONALISED, Arm
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.results import GLOBAL, OWN, TUNED, StudyResults


@dataclass(frozen=True)
class StudyRow:
    """One row: its name in files, its title, its gradient steps, and its values.

    `values` maps a metric and a site to one value a split, (J,), `whole` a metric to the values on all test samples
    together; nan where there is none. `curve` names the arm and model of its learning curves, "" for none.
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
        steps = f"{alone[0].steps} {at_each(len(study.trainers(0)))}"
        rows.append(_row(study, results, ENSEMBLE, "Ensemble of the sites' models", steps))
    return rows


def steps_of(study: Study, arm: Arm, rounds: int) -> str:
    """Return a method's gradient steps at a site over `rounds` rounds, as text; a range if clients draw their steps."""
    budget = load_recipe(to_plain(study.recipe), arm.overrides).budget
    if budget is None:
        return study.amount.in_text(rounds)
    if budget.low is None or budget.high is None:
        return "scheduled"
    low, high = (f"{steps * rounds:,}" for steps in (budget.low, budget.high))
    return low if low == high else f"{low} to {high}"


def _steps(study: Study, arm: Arm) -> str:
    """Return an arm's gradient steps as text; for a federated method, the steps at each site."""
    if arm.kind != FEDERATED:
        return arm.steps
    return f"{steps_of(study, arm, arm.rounds)} {at_each(study.amount.sites)}"


def at_each(sites: int) -> str:
    """Return ``at one site`` or ``at each of 5 sites``."""
    return "at one site" if sites == 1 else f"at each of {sites} sites"


def _of_arm(study: Study, results: StudyResults, arm: Arm) -> StudyRow:
    if arm.personal and not study.leaves_out:
        title, steps = f"{arm.title}, each site's model", f"{_steps(study, arm)}, twice"
        return _row(study, results, arm.key, title, steps, arm.key, OWN)
    return _row(study, results, arm.key, arm.title, _steps(study, arm), arm.key)


def _row(
    study: Study, results: StudyResults, key: str, title: str, steps: str, arm: str = "", model: str = GLOBAL
) -> StudyRow:
    whose, count = arm or key, len(study.splits.each)
    return StudyRow(
        key,
        title,
        steps,
        lambda metric, site: results.values(whose, metric, site, count, model),
        lambda metric: results.whole(whose, metric, count) if model == GLOBAL else [np.nan] * count,
        lambda metric: results.counts(whose, metric, model),
        arm,
        model,
    )


def _tuned(study: Study, results: StudyResults) -> StudyRow:
    """Return the reference's model after K steps of fine-tuning on each site's training samples."""
    arm = next(one for one in study.arms if one.key == study.methods.reference)
    title, steps = f"{arm.title}, fine-tuned at each site", f"{_steps(study, arm)}, + {study.amount.in_text()}"
    return _row(study, results, PERSONALISED, title, steps, arm.key, TUNED)


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
