"""Ranking of configurations by a rule, as papers do: a column's mean over the last K rounds, then over seeds.

train_accuracy:last10        FedExP, appendix D.3: of 50 rounds
train_loss:last100           GeL, after Reddi et al., "Adaptive federated optimization"
test_auroc:last1             the direction of accuracies, losses and built-in metrics is known
server_lr:last1:max          any other column, also one that a method of your own reports, method.norm:last1:min
clients.global.test.accuracy.worst_decile:last1:max         with evaluate.clients and clients' own test samples
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcfed.config.metrics import ALWAYS_MEASURED, direction_of_column, is_matrix, is_percentage
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted, nearest
from hpcfed.lab.report.read import mixed_code
from hpcfed.lab.sweep.plan import Plan, Unit
from hpcfed.run_folder.private import NOT_COVERED
from hpcfed.run_folder.rounds import COLUMNS, interval_of, lacks_score

if TYPE_CHECKING:
    import pandas as pd

RULE = re.compile(r"([\w.-]+?)(?::last([0-9]{1,18}))?(?::(max|min))?")
LAST = 10
"""Default number of rounds to average."""
REPORTED = "method."
"""Prefix of the columns that a server rule reports; their names are known only after a round."""
ROUNDING = 1e-12
"""Relative difference up to which two means are tied: the same counts, in another order, differ by rounding alone."""
MOST_TIED = 5
"""Most configurations that the remark on ties names."""
DEFAULT_COLUMNS = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "local_loss")
"""Columns of the default rule: the first that any run recorded."""


@dataclass(frozen=True)
class Rule:
    """Rule that ranks configurations by the mean of `column` over the `last` rounds; `largest`: the largest is best."""

    column: str
    last: int
    largest: bool
    is_percentage: bool = False  # whether figures show the column in percent

    def __str__(self) -> str:
        return f"{'largest' if self.largest else 'smallest'} {self.mean}"

    @property
    def mean(self) -> str:
        """The compared number in words: ``mean test_loss over the last 10 rounds``."""
        rounds = "the last round" if self.last == 1 else f"the last {self.last} rounds"
        return f"mean {self.column} over {rounds}"

    def score(self, record: pd.DataFrame, recipe: Mapping[str, Any]) -> float:
        """Return a run's score, the column's mean over the last rounds; nan if none of them recorded the column.

        It is nan, too, if the value of the last round was not finite or undefined (`lacks_score`). `recipe` is the
        run's, as plain data.
        """
        if self.column not in record:
            return math.nan
        numbers = record[self.column].tail(self.last)
        if lacks_score(self.column, numbers.iloc[-1], len(record), recipe):
            return math.nan
        found = numbers.dropna()
        return statistics.fmean(found) if len(found) else math.nan

    def lacks(self, record: pd.DataFrame, evaluate: Mapping[str, Any]) -> bool:
        """Return whether one of a run's last rounds has no value though `evaluate`, the recipe's section, names it."""
        last = record.tail(self.last)
        due = last[last.index % interval_of(self.column, evaluate) == 0]
        return self.column in due and bool(due[self.column].isna().any())

    def better(self, first: float, second: float) -> bool:
        """Return whether the score `first` is better than `second`, and not `tied` with it."""
        return not tied(first, second) and (first > second if self.largest else first < second)


def tied(first: float, second: float) -> bool:
    """Return whether two means are equal up to `ROUNDING`."""
    return math.isclose(first, second, rel_tol=ROUNDING)


@dataclass(frozen=True)
class Row:
    """A run's row in the table of runs: status, recorded rounds, their seconds, last value of each metric, score.

    The score is nan if the run did not finish or `Rule.score` is nan; `message` is the error message, "" without an
    error; `code` is file → hash of the user's code; `lacks` is `Rule.lacks` of a run that finished; `left_out` is why
    rounds left out updates, as text, "" if none did.
    """

    unit: Unit
    status: str
    rounds: int
    seconds: float
    metrics: Mapping[str, float]
    score: float
    message: str
    code: Mapping[str, str] = field(default_factory=dict)  # the user's files with their hashes
    lacks: bool = False
    left_out: str = ""


@dataclass(frozen=True)
class Candidate:
    """One configuration: its runs (`rows`), and mean and standard deviation of their scores over seeds.

    Both are nan and the rank is None unless all runs finished with a finite score; with one run, the deviation is nan.
    Rank 1 is the best.
    """

    point: int
    rows: tuple[Row, ...]
    mean: float
    std: float
    rank: int | None = None

    @property
    def status(self) -> str:
        """``finished``, or the reason for having no rank: ``1 of 5 diverged``."""
        others = [row.status for row in self.rows if row.status != "finished"]
        if not others:
            return "finished" if math.isfinite(self.mean) else "no score"
        worst = max(dict.fromkeys(others), key=others.count)
        return worst if len(others) == len(self.rows) else f"{others.count(worst)} of {len(self.rows)} {worst}"


def parse_rule(text: str, plan: Plan, option: str = "--select") -> Rule:
    """Parse a rule, and check that the plan's runs record its column; errors name the command's `option`.

    Raises:
        InputError: the text is not a rule, or the runs do not record the column.
    """
    match, where = RULE.fullmatch(text), f"{option} {text}"
    if match is None:
        raise InputError("a rule", where=where, expected="column:lastK, such as train_loss:last10", got=repr(text))
    column, last, direction = match.groups()
    first = plan.units[0].recipe
    known = [*COLUMNS, *_own_columns(first)]
    if column not in known and not column.startswith(REPORTED):
        raise InputError(f"no column {column!r}", where=where, remedy=nearest(column, known))
    if column.startswith("clients.") and column.split(".")[2] == "test":
        with Federation.open(first.data) as federation:
            if federation.test_offsets is None:
                what = "clients of this federation have no test samples of their own"
                raise InputError(f"{column} is not recorded", where=where, got=what, remedy="use its column of 'train'")
    known_direction = direction_of_column(column, first.evaluate.metrics)
    if direction is None and known_direction is None:
        raise InputError("a rule", where=where, expected=f"a direction, {text}:max or {text}:min", got=repr(text))
    for unit in plan.units:
        evaluate = unit.recipe.evaluate
        every = {"test": evaluate.every, "train": evaluate.train.every}.get(column.partition("_")[0], 1)
        if every == 0:
            key = "evaluate.every" if column.startswith("test_") else "evaluate.train.every"
            raise InputError(f"{column} is not recorded", where=where, remedy=f"set {key}=1")
    fewest = min(unit.recipe.rounds for unit in plan.units)
    if last is not None and not 1 <= int(last) <= fewest:
        raise InputError("a rule", where=where, expected=f"the last 1 to {fewest} rounds", got=last)
    largest = direction == "max" if direction else bool(known_direction)
    return Rule(column, int(last or min(LAST, fewest)), largest, is_percentage(column, first.evaluate.metrics))


def _own_columns(recipe: Recipe) -> Iterator[str]:
    """Yield the names of the columns of the recipe's own metrics, and of statistics over clients."""
    metrics = [name for name, metric in recipe.evaluate.metrics.items() if not is_matrix(metric)]
    yield from (f"{part}_{name}" for part in ("test", "train") for name in metrics)
    measures = (*ALWAYS_MEASURED, *metrics)
    over_clients = (recipe.evaluate.clients.models, ("train", "test"), measures, ("mean", "worst_decile", "variance"))
    if recipe.evaluate.clients.every:
        yield from (f"clients.{'.'.join(parts)}" for parts in itertools.product(*over_clients))


def usual_rule(plan: Plan, records: Iterable[pd.DataFrame]) -> Rule:
    """Return the default rule: the mean of a column over the last rounds, at most `LAST`.

    The column is the first of `DEFAULT_COLUMNS` that any run recorded. If runs may stop early by their scores, only the
    last round counts, since a mean over the few rounds of a short run would include poor first ones.
    """
    recorded = {column for one in records for column in one.columns[one.tail(1).notna().any()]}
    column = next((column for column in DEFAULT_COLUMNS if column in recorded), DEFAULT_COLUMNS[-1])
    by_scores = any(unit.recipe.stop.by_scores for unit in plan.units)
    last = 1 if by_scores else min(LAST, *(unit.recipe.rounds for unit in plan.units))
    return Rule(column, last, bool(direction_of_column(column, {})), is_percentage(column))


def candidates(plan: Plan, rows: Sequence[Row], rule: Rule) -> list[Candidate]:
    """Return the configurations, the best first, unranked ones last; ties share a rank and keep the grid's order."""
    found, by_point = [], defaultdict[int, list[Row]](list)
    for row in rows:
        by_point[row.unit.point].append(row)
    for number in range(len(plan.points)):
        own = tuple(by_point[number])
        scores = [row.score for row in own if row.status == "finished" and math.isfinite(row.score)]
        whole = len(scores) == len(own)
        mean = statistics.fmean(scores) if whole else math.nan
        std = statistics.stdev(scores) if whole and len(scores) > 1 else math.nan
        found.append(Candidate(number, own, mean, std))
    scored = [candidate for candidate in found if math.isfinite(candidate.mean)]
    means = sorted((one.mean for one in scored), reverse=not rule.largest)  # the best last
    worse_or_tied = (bisect_left(means, True, key=partial(_is_better, rule, one.mean)) for one in scored)
    ranks = [1 + len(means) - count for count in worse_or_tied]
    ranked = [replace(one, rank=rank) for one, rank in zip(scored, ranks, strict=True)]
    return sorted(ranked, key=lambda one: one.rank or 0) + [
        candidate for candidate in found if not math.isfinite(candidate.mean)
    ]


def _is_better(rule: Rule, mean: float, other: float) -> bool:
    return rule.better(other, mean)


def _measured_on_others(plan: Plan, rule: Rule) -> bool:
    """Whether the rule's scores are of other clients' samples in some runs than in others."""
    sections = (unit.recipe.cohort.without for unit in plan.units)
    left_out = {frozenset(map(str, one.clients if one and one.evaluate == "others" else ())) for one in sections}
    if len(left_out) < 2 or not rule.column.startswith(("test_", "train_", "clients.")):
        return False
    with Federation.open(plan.units[0].recipe.data) as federation:
        return not rule.column.startswith("test_") or federation.test_offsets is not None


def remarks(plan: Plan, ranked: Sequence[Candidate], rule: Rule) -> list[str]:
    """Return warnings on a selection: ties, a best value at its grid's edge, missing or shorter results, other samples,
    left-out updates, privacy, other code.
    """
    best = [candidate for candidate in ranked if candidate.rank == 1]
    said = []
    if len(best) > 1:
        others = [plan.points[candidate.point].label for candidate in best[1:]]
        more = f"; and {len(others) - MOST_TIED:,} more" if len(others) > MOST_TIED else ""
        said.append(f"tied with {'; '.join(others[:MOST_TIED])}{more}: the first in the grid's order is chosen")
    for index, grid in enumerate(plan.grids if best else ()):
        numbers, chosen = grid.numbers, plan.points[best[0].point].values[index].number
        if numbers is not None and chosen is not None and len(numbers) > 2 and chosen in (min(numbers), max(numbers)):
            said.append(f"{grid.key} is best at the edge of its grid, {chosen:g}: a wider one may hold a better value")
    finished = [row for one in ranked for row in one.rows if row.status == "finished"]
    shortest = min((row.rounds for row in finished), default=rule.last)
    if shortest < rule.last:
        some = f"a run ended after {counted(shortest, 'round')}, and its mean is over these"
        said.append(f"{some}; --select {rule.column}:last1 compares the last round of each")
    if lacking := sum(row.lacks for row in finished):
        have = "run has" if lacking == 1 else "runs have"
        is_withheld = rule.column == "local_loss" and all("epsilon" in row.metrics for row in finished if row.lacks)
        why = "since private runs withhold it" if is_withheld else "since it was measured in others or is not finite"
        said.append(f"{lacking} {have} no {rule.column} in some of these rounds, {why}: the mean is over the rest")
    if _measured_on_others(plan, rule):
        what = "configurations are measured on the samples of different clients, those that cohort.without leaves"
        said.append(f"{what}; cohort.without.evaluate=all measures each on all clients'")
    for why, count in Counter(row.left_out for row in finished if row.left_out).items():
        said.append(f"{why}, in {count} of {counted(len(finished), 'finished run')}: 'hpcfed report' says whose")
    if private := [row.metrics["epsilon"] for row in finished if "epsilon" in row.metrics]:
        said.append(f"ε of a run is {max(private):.4g} at most (epsilon in results.csv). {NOT_COVERED}")
    of_seeds = (mixed_code(row.code for row in one.rows if row.status == "finished") for one in ranked)
    if mixed := next(filter(None, of_seeds), ""):
        said.append(f"seeds of one configuration had different code, {mixed}: see `code` in results.csv")
    elif mixed := mixed_code(row.code for row in finished):
        said.append(f"configurations had different code, {mixed}: scores of one are not comparable with another's")
    waiting = sum(row.status not in ("finished", "diverged") for candidate in ranked for row in candidate.rows)
    if waiting:
        said.append(f"{waiting} of {len(plan.units)} runs have no result, which may change the choice")
    return said
