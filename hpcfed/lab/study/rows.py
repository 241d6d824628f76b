"""The rows of a study's tables: each for one arm, or for several arms, such as those of all sites that train alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcfed.config.load import load_recipe, to_plain
from hpcfed.lab.study.arms import ALONE, ENSEMBLE, FEDERATED, PERSONALISED, Arm
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.results import GLOBAL, OWN, TUNED, StudyResults


@dataclass(frozen=True)
class StudyRow:
    """One row of the tables.

    Attributes:
        key: the row's name in files.
        title: the row's name in tables.
        steps: number of gradient steps, as text.
        arms: for each site, the keys of one or more arms; the row's value at the site is the mean of theirs.
        model: which model of an arm is measured: ``global``, ``fine-tuned`` or ``personal``.
    """

    key: str
    title: str
    steps: str
    arms: Sequence[Sequence[str]]
    model: str = GLOBAL

    @property
    def arm(self) -> str:
        """Key of the row's arm if all sites have one and the same; else ""."""
        first, *others = self.arms[0]
        return first if not others and all(own == [first] for own in self.arms) else ""


def rows_of(study: Study, results: StudyResults) -> list[StudyRow]:
    """Return the rows: the federated methods, then the baselines."""
    arms, sites = study.arms, len(study.samples.sites)
    rows = [_of_arm(study, arm) for arm in arms if arm.kind == FEDERATED]
    if PERSONALISED in study.baselines and not study.leaves_out:
        arm = next(one for one in arms if one.key == study.methods.reference)
        title, steps = f"{arm.title}, fine-tuned at each site", f"{_steps(study, arm)}, + {study.amount.in_text()}"
        rows.append(StudyRow(PERSONALISED, title, steps, [[arm.key]] * sites, TUNED))
    rows += [_of_arm(study, arm) for arm in arms if arm.kind not in (FEDERATED, ALONE)]
    alone = [arm for arm in arms if arm.kind == ALONE]
    if ALONE in study.baselines:
        title = "A single other site, mean" if study.leaves_out else "Each site alone"
        whose = [[arm.key for arm in alone if (arm.site == k) != study.leaves_out] for k in range(sites)]
        rows.append(StudyRow(ALONE, title, alone[0].steps, whose))
    if ENSEMBLE in results.runs:
        steps = f"{alone[0].steps} {at_each(len(study.trainers(0)))}"
        rows.append(StudyRow(ENSEMBLE, "Ensemble of the sites' models", steps, [[ENSEMBLE]] * sites))
    return rows


def steps_of(study: Study, arm: Arm, rounds: int) -> str:
    """Return the number of a method's gradient steps at a site in `rounds` rounds, as text.

    The text is a range if the number is drawn or differs between splits, and ``scheduled`` if a schedule sets it.
    """
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


def _of_arm(study: Study, arm: Arm) -> StudyRow:
    """Return the row of an arm, with its personal models if it trains any, else with its global model.

    If each split leaves one site out, the global model is taken: a left-out site has no personal model.
    """
    title, steps, whose = arm.title, _steps(study, arm), [[arm.key]] * len(study.samples.sites)
    if arm.personal and not study.leaves_out:
        return StudyRow(arm.key, f"{title}, each site's model", f"{steps}, twice", whose, OWN)
    return StudyRow(arm.key, title, steps, whose)
