"""The numbers that a report compares: means over seeds, curves with their spread, and the cost of reaching a target.

Standard deviations are sample deviations (n − 1) over the runs of a group. A run that never reached a target is
reported as such and enters no mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any, Literal

import numpy as np

from hpcfed.config.metrics import BUILT_IN, is_matrix, is_percentage, listed
from hpcfed.errors import InputError, nearest
from hpcfed.lab.report.group import Group
from hpcfed.lab.report.read import Run
from hpcfed.run_folder.rounds import lacks_score

Quantity = Literal["fraction", "loss", "number"]
"""Kind of a column's numbers: fractions, losses or other numbers."""
LOSSES = ("test_loss", "train_loss", "local_loss")
DIRECTIONS = {"max": True, "min": False}
"""Word behind a metric's name → whether larger is better."""
ROUNDING = 1e-12
"""Relative difference up to which numbers are taken to be equal: means of equal values differ by rounding alone."""


def unit_of(column: str, runs: Iterable[Run] = ()) -> Quantity:
    """Return the kind of a column's numbers: ``loss``, ``fraction``, or else ``number``.

    A metric is a fraction if each recipe of `runs` that lists it shows it in percent; if none does, its name decides.
    """
    if column in LOSSES:
        return "loss"
    name = column.partition("_")[2]
    recipes = [{name: metric} for run in runs if (metric := _in_recipe(run, name)) is not None] or [{}]
    return "fraction" if all(is_percentage(column, metrics) for metrics in recipes) else "number"


def _in_recipe(run: Run, name: str) -> Any:
    """Return the entry of a metric in the run's ``evaluate.metrics``; None if the recipe does not name it."""
    try:
        return listed((run.recipe.get("evaluate") or {}).get("metrics"))[name]
    except (AttributeError, KeyError, TypeError, ValueError):  # none at all, or a record that was changed by hand
        return None


@dataclass(frozen=True)
class Criterion:
    """The metric by which runs are compared, a column of the record; by default, `unit` is `unit_of` the column."""

    column: str
    title: str
    higher_is_better: bool
    unit: Quantity | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", self.unit or unit_of(self.column))

    @property
    def is_fraction(self) -> bool:
        return self.unit == "fraction"

    @property
    def is_loss(self) -> bool:
        return self.unit == "loss"

    def reaches(self, values: np.ndarray, target: float) -> np.ndarray:
        """Return whether each of `values`, (E,), is at the target or better, up to `ROUNDING`, (E,) bool.

        A mean of values that are all at the target may be smaller in its last bit.
        """
        slack = ROUNDING * abs(target)
        return values >= target - slack if self.higher_is_better else values <= target + slack

    def best(self, values: Sequence[float] | np.ndarray) -> float:
        return float(np.max(values) if self.higher_is_better else np.min(values))

    def worst(self, values: Sequence[float] | np.ndarray) -> float:
        return float(np.min(values) if self.higher_is_better else np.max(values))


CRITERIA = (
    Criterion("test_accuracy", "test accuracy", higher_is_better=True),
    Criterion("test_loss", "test loss", higher_is_better=False),
    Criterion("train_loss", "training loss of all clients", higher_is_better=False),
    Criterion("local_loss", "loss of the cohort's local training", higher_is_better=False),
)


def choose_criterion(runs: Sequence[Run], metric: str | None = None) -> Criterion:
    """Return the criterion of a metric on the test set; `metric` is its name in recipes.

    Where recipes do not say which values are better, ``:max`` or ``:min`` follows the name.

    If `metric` is None, return the first of `CRITERIA` that a run recorded: regression has no accuracy, and some data
    no test set.

    Raises:
        InputError: no run recorded the metric as a number, or runs do not say, or disagree, whether higher is better.
    """
    if metric is not None:
        return _criterion_of(metric, runs)
    recorded = (item for item in CRITERIA if any(np.isfinite(run.column(item.column)).any() for run in runs))
    return next(recorded, CRITERIA[-1])


def _criterion_of(given: str, runs: Sequence[Run]) -> Criterion:
    metric, colon, direction = given.partition(":")
    column = f"test_{metric}"
    known = next((item for item in CRITERIA if item.column == column), None)
    with_it = [run for run in runs if np.isfinite(run.column(column)).any()]
    if not with_it:
        measured = {name for run in runs for name in run.record.columns[run.record.notna().any()]}
        names = sorted(name.removeprefix("test_") for name in measured if name.startswith("test_"))
        asked = [entry for run in runs if (entry := _in_recipe(run, metric)) is not None]
        if asked:
            what = "is a matrix, which is not compared" if all(map(is_matrix, asked)) else "has no value in any run"
            raise InputError(f"metric {metric!r} {what}", remedy=f"use {' or '.join(names)}" if names else "")
        remedy = "add it to evaluate.metrics" if metric in BUILT_IN else nearest(metric, names)
        raise InputError("metric", expected="one that a run recorded on its test set", got=repr(metric), remedy=remedy)
    recorded = {run.larger_is_better(metric) for run in with_it} - {None}
    if known is not None:
        recorded = {known.higher_is_better}
    if len(recorded) > 1:
        remedy = "compare runs whose evaluate.metrics agree"
        raise InputError(f"metric {metric!r}: better in two directions", remedy=remedy)
    allowed = [f"{metric}:{word}" for word, larger in DIRECTIONS.items() if recorded <= {larger}]
    if not colon and not recorded:
        remedy = f"say it by --metric {' or '.join(allowed)}"
        raise InputError(f"metric {metric!r}: without a better direction", remedy=remedy)
    if colon and given not in allowed:
        raise InputError("metric", expected=" or ".join(allowed), got=repr(given))
    is_larger = bool(recorded.pop()) if recorded else DIRECTIONS[direction]
    return known or Criterion(column, f"test {metric}", is_larger, unit_of(column, with_it))


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None for a single value) of `count` values."""

    mean: float
    std: float | None
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """Return the spread of the finite values, 0 if they are equal up to `ROUNDING`; None if no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    if len(finite) > 1 and np.ptp(finite) <= ROUNDING * np.abs(finite).max():
        return Spread(float(finite[0]), 0.0, len(finite))
    return Spread(float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else None, len(finite))


def moving(values: np.ndarray, window: int) -> np.ndarray:
    """Return the moving averages, (T,), of `values`, (T,), one per round; nan stands for a value that is not recorded.

    Entry t is the mean of the last `window` values recorded up to t; nan if t has no value, or if fewer than `window`
    values are recorded up to t.
    """
    recorded = np.flatnonzero(np.isfinite(values))
    means = np.full(len(values), np.nan)
    if len(recorded) >= window:
        kernel = np.full(window, 1 / window)
        means[recorded[window - 1 :]] = np.convolve(values[recorded], kernel, mode="valid")
    return means


def final(run: Run, column: str, window: int = 1) -> float:
    """Return the mean of a column's last `window` recorded values, or of all if there are fewer; nan without any.

    It is nan, too, if the value of the last round was not finite or undefined (`lacks_score`).
    """
    values = run.column(column)
    if len(values) and lacks_score(column, values[-1], len(values), run.recipe):
        return math.nan
    finite = values[np.isfinite(values)][-window:]
    return float(finite.mean()) if len(finite) else math.nan


def best(run: Run, criterion: Criterion, window: int = 1) -> float:
    """Return the best mean of `window` consecutive recorded values of the criterion; nan if fewer are recorded."""
    means = moving(run.column(criterion.column), window)
    finite = means[np.isfinite(means)]
    return criterion.best(finite) if len(finite) else math.nan


def core_hours(runs: Sequence[Run]) -> float:
    """Return the core-hours of the runs' rounds, ranks × threads × time; nan if any factor was not recorded.

    All rounds of a resumed run are counted with the ranks and threads of its last session.
    """
    hours = [_cores(run) * run.column("seconds.total").sum() / 3600 for run in runs]
    return float(sum(hours))


def _cores(run: Run) -> float:
    ranks, threads = (run.environment.get(key) for key in ("ranks", "threads_per_rank"))
    return float(ranks * threads) if isinstance(ranks, int) and isinstance(threads, int) else math.nan


def mean_seconds(runs: Sequence[Run], timer: str) -> float:
    """Return the mean seconds of a timer, such as ``local``, over all rounds of `runs`; nan if not recorded."""
    measured = spread(np.concatenate([run.column(f"seconds.{timer}") for run in runs]))
    return measured.mean if measured else math.nan


def round_reached(run: Run, criterion: Criterion, target: float, window: int = 1) -> int | None:
    """Return the first round at which the mean of the last `window` evaluations reaches the target; None if never."""
    reached = np.flatnonzero(criterion.reaches(moving(run.column(criterion.column), window), target))
    return int(reached[0]) + 1 if len(reached) else None


ENDED = ("finished", "stopped")
"""Status of the runs by whose last values a default target is chosen."""
SPENT = {"rounds": "round", **{name: name for name in ("params", "bytes_up", "bytes_down", "gradients", "seconds")}}
"""Cost of reaching a target → the column that holds it."""


@dataclass(frozen=True)
class Reach:
    """Cost of reaching a target in a group of runs.

    Attributes:
        target: the value to reach.
        reached: number of runs that reached the target.
        runs: number of runs in the group.
        spent: key of `SPENT` → spread of this cost over the runs that reached the target; None if none did, or if it
            was not recorded.
    """

    target: float
    reached: int
    runs: int
    spent: Mapping[str, Spread | None]


def reach(group: Group, criterion: Criterion, target: float, window: int = 1) -> Reach:
    """Return the cost of reaching a target, counted in each run up to the round in which the run reached it."""
    rounds = [(run, round_reached(run, criterion, target, window)) for run in group.runs]
    arrived = [(run, number) for run, number in rounds if number is not None]
    spent = {name: spread(run.column(column)[number - 1] for run, number in arrived) for name, column in SPENT.items()}
    return Reach(target, len(arrived), len(group.runs), spent)


def default_target(groups: Sequence[Group], criterion: Criterion, window: int = 1) -> float | None:
    """Return a default target: the worst run's final mean of `window` values, rounded so that every run reaches it.

    Only finished and stopped runs count, or all runs if there are none of these. A fraction is rounded down to a whole
    percent; losses and other metrics are rounded towards the worse, to two significant digits. None if no value is
    recorded, or if the worst is a fraction below 1 % or a loss that is not positive.
    """
    runs = [run for group in groups for run in group.runs]
    finished = [run for run in runs if run.status in ENDED]
    finals = [final(run, criterion.column, window) for run in finished or runs]
    finals = [value for value in finals if math.isfinite(value)]
    if not finals:
        return None
    worst = criterion.worst(finals)
    if criterion.is_fraction:
        return math.floor(round(worst * 100, 9)) / 100 or None
    if criterion.is_loss and worst <= 0:
        return None
    towards_worse = Context(prec=2, rounding=ROUND_FLOOR if criterion.higher_is_better else ROUND_CEILING)
    return float(towards_worse.create_decimal(f"{worst:.11g}")) + 0.0  # no -0


@dataclass(frozen=True)
class Curve:
    """A group's means at the E rounds that all its runs recorded; `tails` has the later values of longer runs."""

    x: np.ndarray  # (E,), mean over runs of the column on the horizontal axis
    mean: np.ndarray  # (E,), mean over runs of the column on the vertical axis
    std: np.ndarray  # (E,), its sample standard deviation; zero for a single run
    tails: tuple[tuple[np.ndarray, np.ndarray], ...]  # (x, y) of the longer runs, after the last shared round

    def __bool__(self) -> bool:
        return len(self.x) > 0 or len(self.tails) > 0


def curve(group: Group, column: str, against: str, window: int = 1) -> Curve:
    """Return a group's curve of `column` against the column `against` (``round``, ``params``, …).

    Each run's values are first averaged over `window` evaluations (see `moving`), but at most a fifth of those of
    the run with the fewest. The curve's rounds are those in which all runs have both values.
    """
    shared = min(run.num_rounds for run in group.runs)
    evaluations = min(np.isfinite(run.column(column)).sum() for run in group.runs)
    window = max(1, min(window, evaluations // 5))
    courses = [moving(run.column(column), window) for run in group.runs]
    x = np.stack([run.column(against)[:shared] for run in group.runs])  # (R, shared) for R runs
    y = np.stack([course[:shared] for course in courses])
    common = np.flatnonzero(np.isfinite(x).all(axis=0) & np.isfinite(y).all(axis=0))
    x, y = x[:, common], y[:, common]
    start = common[-1] if len(common) else 0
    tails = [
        _tail(run.column(against)[start:], course[start:]) for run, course in zip(group.runs, courses, strict=True)
    ]
    std = y.std(axis=0, ddof=1) if len(group.runs) > 1 else np.zeros(len(common))
    num_shared = 1 if len(common) else 0  # a tail begins with the last shared point
    return Curve(x.mean(axis=0), y.mean(axis=0), std, tuple(tail for tail in tails if len(tail[0]) > num_shared))


def _tail(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    recorded = np.isfinite(x) & np.isfinite(y)
    return x[recorded], y[recorded]
