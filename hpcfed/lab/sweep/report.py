"""The results of a sweep: tables, figures, and a summary for the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcfed.errors import Diverged, InputError
from hpcfed.io.atomic import write_files
from hpcfed.lab.report.files import latex_of_table
from hpcfed.lab.report.tables import Table
from hpcfed.lab.sweep.claims import Claim, Claims
from hpcfed.lab.sweep.failures import raise_if_failed
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.run import states_until_stable
from hpcfed.lab.sweep.select import Candidate, Row, Rule, candidates, remarks
from hpcfed.lab.sweep.table import read_results, result_records, summary_records, write_tables

MAX_SHOWN = 10
"""Maximum number of configurations shown in the terminal."""


@dataclass(frozen=True)
class RankedSweep:
    """A sweep's runs (`rows`), and its configurations ranked by the rule (`ranked`, the best first)."""

    plan: Plan
    rows: tuple[Row, ...]
    ranked: tuple[Candidate, ...]
    rule: Rule

    @property
    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and first `MAX_SHOWN` rows of the table of configurations, as text."""
        head, rows = self.whole_table
        return head, rows[:MAX_SHOWN]

    @property
    def whole_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and all rows of the table of configurations, as text."""
        head = ("rank", *(grid.key for grid in self.plan.grids), self.rule.column, "±", "runs")
        return head, [self._row(candidate) for candidate in self.ranked]

    @property
    def notes(self) -> list[str]:
        """The lines below the table: the rule, the number of rows not shown, and `remarks`."""
        said = [f"{self.rule}, ± one standard deviation over seeds"]
        if len(self.ranked) > MAX_SHOWN:
            said.append(f"{len(self.ranked) - MAX_SHOWN} more in summary.csv")
        return [*said, *self.remarks]

    @property
    def remarks(self) -> list[str]:
        """Warnings about the ranking: ties, values at the edge of a grid, missing or shorter results, other code."""
        return remarks(self.plan, self.ranked, self.rule)

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        labels = [value.label for value in self.plan.points[candidate.point].values]
        mean, std = ("" if math.isnan(value) else f"{value:.4g}" for value in (candidate.mean, candidate.std))
        return str(candidate.rank or "–"), *labels, mean, std, candidate.status

    def raise_if_failed(self, *, takes_fresh: bool = True) -> None:
        """Raise an error if runs ended without a result; `takes_fresh`: whether the command has ``--fresh``.

        Raises:
            InputError: some runs were refused, and none failed or was lost.
            EnvironmentFailure: some runs failed or were lost.
            Diverged: all runs diverged.
        """
        ended = {row.unit.name: Claim(ending=row.status, message=row.message) for row in self.rows}
        raise_if_failed(self.plan, ended, takes_fresh=takes_fresh)
        if all(row.status == "diverged" for row in self.rows):
            raise Diverged("every run of the sweep diverged", where=self.plan.name, remedy="sweep smaller step sizes")


def report_sweep(plan: Plan, rule: Rule | None = None, *, parquet: bool = False) -> RankedSweep:
    """Write tables and figures of a sweep's results so far; return the ranked sweep. Called on one rank only.

    If `rule` is None, the default rule ranks (`usual_rule`). `parquet` adds the file ``results.parquet``.

    Raises:
        InputError: a run's record is damaged, or no run recorded the rule's column.
        EnvironmentFailure: the disk refuses.
    """
    from hpcfed.lab.sweep.figures import draw

    for states in states_until_stable(plan, Claims(plan.folder, "report")):
        rows, chosen = read_results(plan, states, rule)
        done = [row for row in rows if row.status == "finished"]
        if rule is not None and done and not any(rule.column in row.metrics for row in done):
            raise InputError(
                f"no run recorded {rule.column}", where=str(plan.folder), remedy="select by another column"
            )
        ranked = candidates(plan, rows, chosen)
        write_tables(plan, result_records(plan, rows, chosen), summary_records(plan, ranked), parquet=parquet)
    outcome = RankedSweep(plan, tuple(rows), tuple(ranked), chosen)
    head, cells = outcome.whole_table
    table = Table(f"{plan.name}: {plan}", head, tuple(cells))
    write_files(plan.folder, {"summary.tex": latex_of_table(table)})
    write_files(plan.folder / "figures", draw(plan, ranked, chosen))
    return outcome
