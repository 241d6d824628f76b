"""The document of ``hpcfed report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfed.cli.documents._parts import MeanDifference, MeanOverRuns, as_difference, over_runs
from hpcfed.lab.report.measure import best, final, mean_seconds, reach, spread
from hpcfed.lab.report.paired import paired_differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcfed.lab.report.comparison import Comparison
    from hpcfed.lab.report.group import Group
    from hpcfed.lab.report.measure import Reach
    from hpcfed.lab.report.read import Run


@dataclass(frozen=True)
class MetricFacts:
    """What results, targets and differences are of."""

    column: str
    """Column of the record."""
    title: str
    """The same in words."""
    higher_is_better: bool
    """Its direction."""
    unit: str
    """fraction (of 1), loss or number."""


@dataclass(frozen=True)
class ReportedRun:
    """One run."""

    folder: str
    """Its folder."""
    seed: str
    """Its seed in words."""
    status: str
    """finished, stopped, diverged, failed or unfinished."""
    rounds: int
    """Recorded rounds."""
    final: float | None
    """The metric at the end: mean of the last `window` evaluations."""
    best: float | None
    """Its best mean of `window` evaluations in a row."""
    params: float | None
    """Parameters sent up and down."""
    bytes_up: float | None
    """Bytes sent up."""
    bytes_down: float | None
    """Bytes sent down."""
    gradients: float | None
    """Minibatch gradients of all clients, as the record counts them."""
    seconds_per_round: float | None
    """Mean wall time of a round."""


@dataclass(frozen=True)
class ReportedMethod:
    """Runs that differ only in their seed."""

    label: str
    """Its name in the report."""
    runs: list[ReportedRun]
    """A run a seed."""
    left_out: list[str]
    """Folders of further runs of the same seeds."""
    final: MeanOverRuns | None
    """The metric at the end."""
    best: MeanOverRuns | None
    """Its best value."""


@dataclass(frozen=True)
class TargetCost:
    """What a method spent to reach a target; means over the runs that reached it."""

    method: str
    """Its label."""
    target: float
    """Value of the metric."""
    reached: int
    """Runs that reached it."""
    of: int
    """All runs of the method."""
    rounds: MeanOverRuns | None
    """First evaluated round at the target."""
    params: MeanOverRuns | None
    """Parameters sent up and down until then."""
    bytes_up: MeanOverRuns | None
    """Bytes sent up until then."""
    bytes_down: MeanOverRuns | None
    """Bytes sent down until then."""
    gradients: MeanOverRuns | None
    """Minibatch gradients of all clients until then."""
    seconds: MeanOverRuns | None
    """Time of the rounds until then."""


@dataclass(frozen=True)
class MethodDifference:
    """A method minus the baseline, seed by seed."""

    method: str
    """Its label."""
    seeds: list[str]
    """Seeds that both have."""
    final: MeanDifference | None
    """Of the metric at the end."""
    rounds: list[MeanDifference | None]
    """Of the rounds to each target, in the order of `targets`."""
    why_not: str
    """Why there is no difference: other samples; else ""."""


@dataclass(frozen=True)
class ReportDocument:
    """A report of runs, written."""

    page: str
    """The HTML page."""
    figures: str | None
    """Folder of the figures, PNG and PDF; null without."""
    tables: str | None
    """Folder of the tables, CSV and LaTeX; null with --page-only."""
    metric: MetricFacts
    """The metric of results."""
    window: int
    """Evaluations in a row whose mean counts."""
    targets: list[float]
    """Targets: --target, or the report's own."""
    baseline: str
    """Label of the method that others are held against."""
    methods: list[ReportedMethod]
    """All methods, in the report's order."""
    costs: list[TargetCost]
    """Cost of each target, by method."""
    differences: list[MethodDifference]
    """Of all other methods that share a seed with the baseline."""
    remarks: list[str]
    """What must be known before methods are compared."""
    waiting: list[str]
    """Run folders left out, which have no round yet."""


DOCUMENT = ReportDocument


def report_document(comparison: Comparison, page: Path, made: Sequence[Path], remarks: Sequence[str]) -> ReportDocument:
    """Return the document of a report; `made`: its folders of figures and of tables, as far as they are there."""
    folders = {place.name: str(place) for place in made}
    criterion, groups, window = comparison.criterion, comparison.groups, comparison.window
    apart = paired_differences(groups, comparison.baseline, criterion, comparison.targets, window)
    return ReportDocument(
        page=str(page),
        figures=folders.get("figures"),
        tables=folders.get("tables"),
        metric=MetricFacts(criterion.column, criterion.title, criterion.higher_is_better, str(criterion.unit)),
        window=window,
        targets=[*comparison.targets],
        baseline=comparison.baseline.label,
        methods=[_method(group, comparison) for group in groups],
        costs=[
            _cost(group, reach(group, criterion, target, window)) for target in comparison.targets for group in groups
        ],
        differences=[
            MethodDifference(
                one.group.label, one.seeds, as_difference(one.final), [*map(as_difference, one.rounds)], one.why_not
            )
            for one in apart
        ],
        remarks=[*remarks],
        waiting=[*map(str, comparison.waiting)],
    )


def _method(group: Group, comparison: Comparison) -> ReportedMethod:
    criterion, window = comparison.criterion, comparison.window

    def mean(value: Callable[[Run], float]) -> MeanOverRuns | None:
        return over_runs(spread(value(run) for run in group.runs))

    return ReportedMethod(
        label=group.label,
        runs=[
            ReportedRun(
                folder=str(run.folder),
                seed=run.seed,
                status=run.status,
                rounds=run.num_rounds,
                final=final(run, criterion.column, window),
                best=best(run, criterion, window),
                params=final(run, "params"),
                bytes_up=final(run, "bytes_up"),
                bytes_down=final(run, "bytes_down"),
                gradients=final(run, "gradients"),
                seconds_per_round=mean_seconds([run], "total"),
            )
            for run in group.runs
        ],
        left_out=[str(run.folder) for run in group.repeats],
        final=mean(lambda run: final(run, criterion.column, window)),
        best=mean(lambda run: best(run, criterion, window)),
    )


def _cost(group: Group, cost: Reach) -> TargetCost:
    spent = {name: over_runs(found) for name, found in cost.spent.items()}
    return TargetCost(group.label, cost.target, cost.reached, cost.runs, **spent)
