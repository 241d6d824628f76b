"""Results beside published means, and whether the two agree, by the 95 % interval of their difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.measure import Spread, best, final, spread
from hpcfed.lab.report.paired import student
from hpcfed.lab.report.text import criterion_text, difference_text
from hpcfed.lab.reproduce.experiment import Case, Experiment
from hpcfed.lab.reproduce.measure import SettingRuns, criterion_of

RUNS = 3
"""Number of runs behind a published mean."""
MARGIN, WIDEST = 0.01, 0.05
"""As fractions: means agree if the interval is within ± MARGIN; one of more than ± WIDEST decides nothing."""
HEADER = ("Case", "Method", "Best", "Last", "Rounds", "Seeds", "Published best", "Difference", "Verdict")
NOTE = (
    "Best and last: test accuracy of the best and of the last round, mean ± one standard deviation over seeds. "
    "Difference: of the best from the published one of three runs, with its 95 % interval (Welch), in points; they "
    "agree if the interval lies within ± 1, differ if beyond, and where it is wider than ± 5 this table cannot tell."
)


def rows(experiment: Experiment, case: Case, settings: Sequence[SettingRuns]) -> list[tuple[str, ...]]:
    """Return a row of cells, as in `HEADER`, for each method of a case."""
    criterion, found = criterion_of(experiment), []
    for one in settings:
        runs = list(one.runs.values())
        highest = spread(best(run, criterion) for run in runs)
        last = spread(final(run, experiment.measure.column, 1) for run in runs)
        cells = [criterion_text(value, criterion) if value else ABSENT for value in (highest, last)]
        if not runs:
            cells[0] = one.absent
        cells += [f"{one.rounds} of {one.setting.rounds}", one.seeds]
        theirs = _published(case, one.setting.method)
        whole = len(runs) == len(one.setting.folders) and one.rounds == one.setting.rounds
        difference = welch(highest, theirs) if highest and theirs and whole else None
        cells += [criterion_text(theirs, criterion) if theirs else ABSENT]
        if difference is None:
            why = "diverged" if one.diverged else "one run cannot tell" if whole else "not finished"
            cells += [ABSENT, why if theirs else ABSENT]
        else:
            mean, half = difference
            ends = f"{difference_text(mean - half, criterion)}, {difference_text(mean + half, criterion)}"
            cells += [f"{difference_text(mean, criterion)} [{ends}]", verdict(mean, half)]
        found.append((case.title, one.title, *cells))
    return found


def welch(ours: Spread, theirs: Spread) -> tuple[float, float] | None:
    """Return the difference of two means, ours − theirs, and half its 95 % interval; None if either has a single run.

    Reference: Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", Biometrika 34, 1947.
    """
    if ours.std is None or theirs.std is None:
        return None
    parts = [one.std**2 / one.count for one in (ours, theirs) if one.std is not None]
    if not (variance := sum(parts)):
        return ours.mean - theirs.mean, 0.0
    counts = ours.count, theirs.count
    freedom = variance**2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return ours.mean - theirs.mean, student(freedom) * math.sqrt(variance)


def verdict(mean: float, half: float) -> str:
    """Return in words whether two means agree, from their difference `mean` and half its 95 % interval, `half`."""
    if half > WIDEST:
        return "this table cannot tell"
    if max(abs(mean - half), abs(mean + half)) <= MARGIN:
        return "agrees"
    return "differs" if abs(mean) - half > MARGIN else "not decided"


def _published(case: Case, method: str) -> Spread | None:
    numbers = case.paper.get(method)
    if numbers is None:
        return None
    mean, deviation = (float(number) / 100 for number in numbers if number is not None)  # `checks`: there are two
    return Spread(mean, deviation, RUNS)
