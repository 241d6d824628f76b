"""Paired comparison of groups, seed by seed: shared cohorts and batches lower the variance of the differences.

The interval is Student's, for the mean d̄ of n differences with sample deviation s: d̄ ± t · s/√n, where a Student
variable with n − 1 degrees of freedom lies between −t and t with the chosen probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfed.errors import InputError, nearest
from hpcfed.lab.report.group import Group, method_of, name_of
from hpcfed.lab.report.measure import ROUNDING, Criterion, final, moving, round_reached
from hpcfed.lab.report.read import Run

CONFIDENCE = 0.95


@dataclass(frozen=True)
class MeanEstimate:
    """Mean of `count` values, or of paired differences, with its confidence interval.

    Attributes:
        mean: the mean.
        half_width: half the width of a symmetric interval; None if `ends` are set, for a single value, and for equal
            values, since a standard deviation of zero would claim a mean without uncertainty.
        count: number of values.
        ends: lower and upper end of an interval that is not symmetric; None otherwise.
        method: how the interval was computed, in words; "" if not stated.
    """

    mean: float
    half_width: float | None
    count: int
    ends: tuple[float, float] | None = None
    method: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end of the confidence interval; None without an interval."""
        if self.ends is not None:
            return self.ends
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)

    @property
    def is_clear(self) -> bool:
        """Whether there is an interval and zero lies outside it."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def choose_baseline(groups: Sequence[Group], wanted: str | None) -> Group:
    """Return the group to compare the others with: the one named `wanted`; if None, that of FedAvg, else the first.

    `wanted` is a group's label, the name of its runs or its method, and must name a single group.

    Raises InputError: `wanted` names no group, or more than one.
    """
    if wanted is None:
        return next((group for group in groups if method_of(group.runs[0]) == "FedAvg"), groups[0])
    calls = (lambda group: group.label, lambda group: name_of(group.runs), lambda group: method_of(group.runs[0]))
    for call in calls:
        found = [group for group in groups if (call(group) or "").lower() == wanted.lower()]
        if len(found) == 1:
            return found[0]
    names = {call(group) for group in groups for call in calls} - {None}
    expected = "a method of the report, or a run's name, that no other shares"
    raise InputError("--baseline", expected=expected, got=repr(wanted), remedy=nearest(wanted, map(str, names)))


def shared_draws(ours: Run, theirs: Run) -> str:
    """Return which random draws two runs with the same seed share: ``cohorts and batches``, ``cohorts``, or "".

    Cohorts depend on the seed, the secret seed if there is one, the clients and the cohort's size; batches also on the
    batch size and on augmentation. Runs with different numbers of steps share the batches of the steps that both take.
    """

    def same(*keys: str) -> bool:
        return all(value_at(ours.recipe, key) == value_at(theirs.recipe, key) for key in keys)

    drawn = same("data_content", "cohort", "secret_commitment")
    if not (drawn and (value_at(ours.recipe, "data_content") is not None or same("data"))):
        return ""
    return "cohorts and batches" if same("local.batch_size", "local.augment") else "cohorts"


def value_at(recipe: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, such as ``local.lr``; None if there is no such key."""
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def pairs(baseline: Group, group: Group) -> list[tuple[Run, Run]]:
    """Return (the baseline's run, the group's run) for each seed that both groups have."""
    ours, theirs = _by_seed(baseline), _by_seed(group)
    return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def other_samples(ours: Run, theirs: Run, column: str) -> str:
    """Return how the samples scored in `column` differ between the baseline's run, `ours`, and `theirs`, as text.

    Samples differ if their recorded numbers do, or if ``cohort.without`` leaves out different clients; the difference
    of the scores then means nothing. "" if the samples are the same.
    """
    left_out = ours.left_out(column) != theirs.left_out(column)
    if not _differ([ours, theirs], column):
        return ""
    part = _part(column)
    remedy = "; hpcfed without RUN --client NAME --evaluate all measures on the same ones" if left_out else ""
    return f"its {part} samples are {_samples(theirs, column)}, the baseline's {_samples(ours, column)}{remedy}"


def unrecorded(paired: Sequence[tuple[Run, Run]], criterion: Criterion) -> str:
    """Return why no pair has both values of the criterion, as text; "" if one has."""
    has = [(_has(ours, criterion.column), _has(theirs, criterion.column)) for ours, theirs in paired]
    if any(map(all, has)):
        return ""
    of_baseline, of_group = map(any, zip(*has, strict=True))
    if of_baseline and of_group:
        return f"no seed has the {criterion.title} in both records"
    whose = "its" if of_baseline else "the baseline's"
    return f"{whose} record has no {criterion.title}"


def samples_note(groups: Sequence[Group], column: str) -> str:
    """Return a warning that groups were scored on different samples, ``Test samples differ: 74 for FedAvg; …``.

    "" if the groups' first runs, of those with scores, agree in the number of samples and in the clients left out.
    """
    groups = [group for group in groups if _has(group.runs[0], column)]
    if not _differ([group.runs[0] for group in groups], column):
        return ""
    labels: dict[str, list[str]] = {}
    for group in groups:
        labels.setdefault(_samples(group.runs[0], column), []).append(group.label)
    said = "; ".join(f"{samples} for {', '.join(own)}" for samples, own in labels.items())
    return f"{_part(column).capitalize()} samples differ: {said}."


def _differ(runs: Sequence[Run], column: str) -> bool:
    """Whether runs were scored on different samples: their recorded sample counts or left-out clients differ."""
    counts = {run.num_samples(column) for run in runs} - {None}
    return len(counts) > 1 or len({run.left_out(column) for run in runs}) > 1


def _has(run: Run, column: str) -> bool:
    return bool(np.isfinite(run.column(column)).any())


def _part(column: str) -> str:
    return "test" if column.startswith("test_") else "training"


def _samples(run: Run, column: str) -> str:
    """Return a description of the samples behind a score: ``54 (without mono)`` if client mono is left out.

    If the number of samples is not recorded: ``those of all clients but mono``.
    """
    names = value_at(run.environment, "without.clients")
    names = names if isinstance(names, Mapping) else {}
    left_out = ", ".join(str(names.get(number, number)) for number in run.left_out(column))
    count = run.num_samples(column)
    if count is None:
        return "those of all clients" + (f" but {left_out}" if left_out else "")
    return f"{count:,}" + (f" (without {left_out})" if left_out else "")


def _by_seed(group: Group) -> dict[str, Run]:
    return {run.seed: run for run in group.runs}


def difference(paired: Sequence[tuple[Run, Run]], value: Callable[[Run], float]) -> MeanEstimate | None:
    """Return the mean difference of `value`, group's run minus baseline's, over pairs in which both are finite.

    None if there is no such pair. Differences count as equal up to `ROUNDING` of the values, and then have no interval:
    0.97 − 0.96 and 0.96 − 0.95 differ in their last bits.
    """
    values = np.array([(value(ours), value(theirs)) for ours, theirs in paired])
    values = values[np.isfinite(values).all(axis=1)]
    return estimated(values[:, 1] - values[:, 0], ROUNDING * np.abs(values).max()) if len(values) else None


def estimated(values: np.ndarray, noise: float = 0.0) -> MeanEstimate:
    """Return the mean of `values`, (n,), with Student's confidence interval.

    `noise` bounds rounding errors: a mean between −`noise` and `noise` becomes 0, and values that differ by at most
    `noise` count as equal, so that there is no interval.
    """
    mean, half = float(values.mean()), None
    if np.ptp(values) > noise:
        half = student(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return MeanEstimate(0.0 if abs(mean) <= noise else mean, half, len(values))


@dataclass(frozen=True)
class PairedDifferences:
    """A group's mean differences from the baseline: group minus baseline, over shared seeds.

    Attributes:
        group: the group.
        paired: (the baseline's run, the group's run) of each shared seed; never empty.
        final: difference in the criterion's final value; None if no pair has both values.
        rounds: for each target, difference in the rounds to reach it; None if in no pair both runs reached it.
        why_not: if no pair has both values, or the runs were scored on different samples, what is missing or how these
            differ, as text; `final` and all `rounds` are then None. Otherwise "".
    """

    group: Group
    paired: Sequence[tuple[Run, Run]]
    final: MeanEstimate | None = None
    rounds: Sequence[MeanEstimate | None] = ()
    why_not: str = ""

    @property
    def seeds(self) -> list[str]:
        """The shared seeds."""
        return [run.seed for run, _ in self.paired]


def paired_differences(
    groups: Sequence[Group], baseline: Group, criterion: Criterion, targets: Sequence[float], window: int
) -> list[PairedDifferences]:
    """Return the differences from `baseline` of each other group that shares a seed with it.

    Final values, and rounds to reach `targets`, are computed from means over `window` evaluations.
    """
    found = []
    for group in groups:
        paired = pairs(baseline, group)
        if group is baseline or not paired:
            continue
        if why := unrecorded(paired, criterion) or other_samples(*paired[0], criterion.column):
            found.append(PairedDifferences(group, paired, None, [None] * len(targets), why))
            continue
        at_end = difference(paired, lambda run: final(run, criterion.column, window))
        rounds = [difference(paired, _rounds_to(criterion, target, window)) for target in targets]
        found.append(PairedDifferences(group, paired, at_end, rounds))
    return found


def _rounds_to(criterion: Criterion, target: float, window: int) -> Callable[[Run], float]:
    return lambda run: round_reached(run, criterion, target, window) or math.nan


def difference_curve(
    paired: Sequence[tuple[Run, Run]], column: str, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds, mean differences of `column` over the pairs, and half-widths of their intervals, (E,) each.

    A difference is the group's value minus the baseline's, each averaged over `window` evaluations; the E rounds are
    those in which every run has such a value. With a single pair, half-widths are 0. `paired` is not empty.
    """
    shared = min(run.num_rounds for pair in paired for run in pair)
    values = np.array([[moving(run.column(column), window)[:shared] for run in pair] for pair in paired])
    apart = values[:, 1] - values[:, 0]  # (pairs, shared)
    common = np.flatnonzero(np.isfinite(apart).all(axis=0))
    apart = apart[:, common]
    half = np.zeros(len(common))
    if len(paired) > 1:
        half = student(len(paired) - 1) * apart.std(axis=0, ddof=1) / math.sqrt(len(paired))
    return common + 1.0, apart.mean(axis=0), half


def student(freedom: float) -> float:
    """Return t such that |T| ≤ t has probability `CONFIDENCE` for Student's T with `freedom` ≥ 1 degrees of freedom."""
    from scipy.special import stdtrit  # what scipy.stats.t asks, which takes two seconds longer to import

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
