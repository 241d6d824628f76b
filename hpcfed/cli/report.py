"""``hpcfed report``: figures and one HTML page from run folders, and a summary on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=float,
    help="Test accuracy (0.9 is 90 %), or loss if there is none; repeatable. Default: what even the worst run reached.",
)
@click.option(
    "--window",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Evaluations averaged before they are held against a target.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of report.html and figures/. Default: the run's own folder; for several runs, report/.",
)
def command(runs: tuple[Path, ...], targets: tuple[float, ...], window: int, output: Path | None) -> None:
    """Draw figures and one HTML page from finished or running runs.

    RUN is the output folder of a run, or a folder of such folders. Runs that differ only in their seed are averaged.
    """
    from hpcfed.report import compare, write_comparison

    comparison = compare(runs, targets, window)
    page = write_comparison(comparison, output)
    for table in comparison.results:
        _print_table(table.title, table.header, table.rows, table.note)
    click.echo(f"{page}\n{page.parent / 'figures'}")


def _print_table(title: str, header: tuple[str, ...], rows: tuple[tuple[str, ...], ...], note: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in header:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)  # a file has no width to fit
    console.print(table)
    if note:
        console.print(Text(note), style="dim")
