"""The document of ``hpcfed sweep``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.cli.documents._parts import MeanOverRuns, over_runs
from hpcfed.lab.report.measure import spread
from hpcfed.lab.sweep.table import settings_of

if TYPE_CHECKING:
    from hpcfed.lab.sweep.plan import Plan
    from hpcfed.lab.sweep.report import RankedSweep
    from hpcfed.lab.sweep.select import Candidate, Row


@dataclass(frozen=True)
class SelectionRule:
    """How configurations are ranked."""

    column: str
    """Column of the record."""
    last: int
    """Rounds at the end whose mean counts."""
    largest: bool
    """Whether the largest mean is the best."""


@dataclass(frozen=True)
class SweptConfiguration:
    """One combination of the grids' values."""

    rank: int | None
    """1 is the best; null unless all its runs have a finite score."""
    values: dict[str, float | str | None]
    """Key → value."""
    status: str
    """finished, or why it has no rank."""
    score: MeanOverRuns | None
    """By the rule, over seeds; null without a rank."""
    metrics: dict[str, MeanOverRuns]
    """Column → its last value, over the finished runs."""


@dataclass(frozen=True)
class SweptRun:
    """One run."""

    folder: str
    """Its folder."""
    values: dict[str, float | str | None]
    """Key → value of the grids."""
    seed: str
    """Its seed in words."""
    status: str
    """finished, diverged, refused, failed, lost, stopped, running or waiting."""
    rounds: int
    """Recorded rounds; 0 until it has ended."""
    score: float | None
    """By the rule; null unless finished."""
    metrics: dict[str, float]
    """Column → its last value."""
    seconds: float
    """Time of its rounds."""
    message: str
    """Error of a run without result, else ""."""


@dataclass(frozen=True)
class SweepDocument:
    """Results of a sweep so far."""

    name: str
    """Name of the recipe."""
    folder: str
    """The sweep's folder, with results.csv, summary.csv and figures/."""
    stopped: bool
    """Whether runs are left, and the same command goes on (exit code 75)."""
    rule: SelectionRule
    """How configurations are ranked."""
    configurations: list[SweptConfiguration]
    """All configurations, the best first."""
    runs: list[SweptRun]
    """All runs."""
    remarks: list[str]
    """What must be known of the ranking."""


DOCUMENT = SweepDocument


def sweep_document(outcome: RankedSweep, *, stopped: bool) -> SweepDocument:
    """Return the document of a sweep's results."""
    plan, rule = outcome.plan, outcome.rule
    return SweepDocument(
        name=plan.name,
        folder=str(plan.folder),
        stopped=stopped,
        rule=SelectionRule(rule.column, rule.last, rule.largest),
        configurations=[_configuration(plan, candidate) for candidate in outcome.ranked],
        runs=[_run(plan, row) for row in outcome.rows],
        remarks=outcome.remarks,
    )


def _configuration(plan: Plan, candidate: Candidate) -> SweptConfiguration:
    done = [row for row in candidate.rows if row.status == "finished"]
    names = dict.fromkeys(name for row in done for name in row.metrics)
    over = {name: over_runs(spread(row.metrics[name] for row in done if name in row.metrics)) for name in names}
    return SweptConfiguration(
        rank=candidate.rank,
        values=settings_of(plan, candidate.point),
        status=candidate.status,
        score=over_runs(spread(row.score for row in done)) if candidate.rank else None,
        metrics={name: mean for name, mean in over.items() if mean is not None},
    )


def _run(plan: Plan, row: Row) -> SweptRun:
    return SweptRun(
        folder=str(row.unit.recipe.output),
        values=settings_of(plan, row.unit.point),
        seed=row.unit.seed,
        status=row.status,
        rounds=row.rounds,
        score=row.score,
        metrics={name: float(value) for name, value in row.metrics.items()},
        seconds=row.seconds,
        message=row.message,
    )
