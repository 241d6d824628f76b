"""``hpcfed watch``: runs in the terminal, while they go on or afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcfed.progress import QUIET_SECONDS

if TYPE_CHECKING:
    from hpcfed.console import Console
    from hpcfed.watch.follow import Followed


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show how things stand and leave.")
@click.option(
    "--every",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds between looks at the folders.",
)
def command(runs: tuple[Path, ...], once: bool, every: float) -> None:
    """Show curves, progress, imbalance and the time left of runs that go on, or have ended.

    RUN is the output folder of a run, or a folder of such folders. It only reads; Ctrl-C leaves, and the runs go on.
    Where the output is no terminal it says a line a run, at most every ten seconds.
    """
    from hpcfed.console import Console
    from hpcfed.watch.follow import find_runs

    followed = find_runs(runs)
    console = Console(highlight=False, markup=False)
    try:
        if console.is_terminal and console.encoding.startswith("utf"):
            _draw(followed, console, once=once, every=every)
        else:
            _tell(followed, once=once, every=every)
    except KeyboardInterrupt:
        return


def _draw(runs: Sequence[Followed], console: Console, *, once: bool, every: float) -> None:
    from rich.live import Live

    from hpcfed.watch.view import view

    _look(runs)
    if once:
        console.print(view(runs, console.width, console.height))
        return
    with Live(view(runs, console.width, console.height), console=console, auto_refresh=False) as live:
        while not all(run.is_over for run in runs):
            time.sleep(every)
            _look(runs)
            live.update(view(runs, console.width, console.height), refresh=True)


def _tell(runs: Sequence[Followed], *, once: bool, every: float) -> None:
    """Say a line a run whenever it has changed, but for its end not more often than every ten seconds."""
    from hpcfed.watch.view import plain

    told: dict[str, tuple[int, str, float]] = {}
    while True:
        _look(runs)
        for run in runs:
            done, status, at = told.get(run.name, (-1, "", 0.0))
            news = run.status != status or (run.done != done and time.monotonic() - at >= QUIET_SECONDS)
            if news:
                told[run.name] = run.done, run.status, time.monotonic()
                click.echo(plain(run))
        if once or all(run.is_over for run in runs):
            return
        time.sleep(every)


def _look(runs: Sequence[Followed]) -> None:
    for run in runs:
        run.look()
