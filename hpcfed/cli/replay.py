"""``hpcfed replay``: one client of one round of a run, step by step."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpcfed.cli.options import asked_on_terminal
from hpcfed.errors import counted


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--round", "number", required=True, type=click.IntRange(min=1), help="Round, counted from 1.")
@click.option("--client", required=True, help="Name of a client of that round's cohort, or else its number.")
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that the recipe names.")
@click.option("--run-code", is_flag=True, help="Run the run's recorded code, and calls of installed packages.")
@click.option("--picture", type=click.Path(path_type=Path), help="Also draw the steps into this PNG, PDF or SVG.")
def command(
    run: Path, number: int, client: str, data: Path | None, code: Path | None, run_code: bool, picture: Path | None
) -> int:
    """Train one client of one round of RUN again, in this process, to the same bits; show its steps.

    It begins from the nearest checkpoint, and computes the rounds in between. Exit code 1: the update is not the
    recorded one. From Python: hpcfed.replay(run, round, client).
    """
    from hpcfed.data.picture import check_picture
    from hpcfed.io.console import PIPED_WIDTH, Console
    from hpcfed.provenance.replay.replay import replay
    from hpcfed.provenance.replay.show import draw, lines, table

    check_picture(picture)
    ask = asked_on_terminal()
    found = replay(run, number, client, data=data, code=code, run_code=run_code, ask=ask, say=click.echo)
    click.echo(f"{run}, round {number}, client {found.client} ({found.name}): {counted(found.reported.steps, 'step')}")
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False)
    console.print(table(found))
    for line in lines(found):
        click.echo(line)
    if picture is not None:
        draw(found, picture)
        click.echo(f"picture: {picture}")
    return 0 if found.agrees else 1
