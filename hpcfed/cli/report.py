"""``hpcfed report``: one HTML page, figures and tables from run folders, and a summary on the terminal."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcfed.cli.documents import JSON, printer
from hpcfed.errors import counted

if TYPE_CHECKING:
    from hpcfed.lab.report.tables import Table

PLACES = ("figures", "tables")
"""Folders beside the page."""
MOST_ROWS = 60
"""Largest number of rows of a table that the terminal shows."""


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--metric",
    help="What results, targets and differences are of, on the test set: loss, or one of evaluate.metrics; KEY:max "
    "or KEY:min of one whose recipe does not say which values are better. "
    "Default: accuracy, or the loss of runs without one.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=float,
    help="A value of the metric (0.9 is 90 % of accuracy); repeatable. Default: what even the worst run ended with.",
)
@click.option(
    "--window",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Evaluations in a row whose mean counts: a moving average in tables, targets and figures.",
)
@click.option(
    "--baseline", help="What the others are held against, as the report calls it, or by its name. Default: FedAvg."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of report.html, figures/ and tables/. Default: the run's own folder; for several runs, report/.",
)
@click.option("--page-only", is_flag=True, help="Leave out figures/ and tables/, the files for a paper.")
@JSON
def command(
    runs: tuple[Path, ...],
    metric: str | None,
    targets: tuple[float, ...],
    window: int,
    baseline: str | None,
    output: Path | None,
    page_only: bool,
    as_json: bool,
) -> None:
    """Draw figures and one HTML page from finished or running runs.

    RUN is the output folder of a run, of a sweep, or a folder of such folders. Runs that differ only in their seed are
    averaged; each is labelled by its method, or by its `name` if names distinguish the runs.
    """
    from hpcfed.lab.report.comparison import compare, write_comparison
    from hpcfed.lab.report.page import left_out, warnings

    emit, say = printer("report", asked=as_json), partial(click.echo, err=True)
    comparison = compare(runs, targets, window, baseline, metric, say)
    page = write_comparison(comparison, output, figures=not page_only, say=say)
    remarks = [*warnings(comparison.groups), *left_out(comparison.waiting)]
    made = [] if page_only else [place for name in PLACES if (place := page.parent / name).is_dir()]
    if emit is not None:
        from hpcfed.cli.documents.report import report_document

        emit(report_document(comparison, page, made, remarks))
        return
    for table in (*comparison.results, comparison.differences):
        if table is not None:
            print_table(table)
    for note in remarks:
        click.echo(note)
    click.echo("\n".join(map(str, [page, *made])))


def print_table(table: Table) -> None:
    """Print a table of a report on the terminal: its first `MOST_ROWS` rows, and how many more there are."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    from hpcfed.io.console import Console

    grid = Grid(box=box.SIMPLE_HEAD, title=table.title, title_justify="left", title_style="bold", pad_edge=False)
    for name in table.header:
        grid.add_column(Text(name))
    for number, row in enumerate(table.rows[:MOST_ROWS]):
        grid.add_row(
            *(Text(cell, "bold" if (number, column) in table.strong else "") for column, cell in enumerate(row))
        )
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)  # a file has no width to fit
    console.print(grid)
    if len(table.rows) > MOST_ROWS:
        console.print(f"and {counted(len(table.rows) - MOST_ROWS, 'more row')}, which the files have")
    if table.note:
        console.print(Text(table.note), style="dim")
