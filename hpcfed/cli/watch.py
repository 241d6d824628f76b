"""``hpcfed watch``: running or finished runs, shown in the terminal."""

from __future__ import annotations

import glob
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcfed.cli.options import Finite
from hpcfed.io.pace import QUIET_SECONDS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hpcfed.io.console import Console
    from hpcfed.lab.watch.follow import Watch


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show how things stand and leave.")
@click.option(
    "--every",
    default=1.0,
    show_default=True,
    type=Finite(min=0.1),
    help="Seconds between looks at the folders.",
)
def command(runs: tuple[Path, ...], once: bool, every: float) -> None:
    """Show curves, progress, imbalance and the time left of running or finished runs.

    RUN is the output folder of a run or of a sweep, or a folder of such folders; a folder that does not exist yet is
    waited for. The command only reads; Ctrl-C leaves, and the runs go on. If the output is no terminal, it prints a
    line a run, at most every ten seconds.
    """
    from hpcfed.io.console import Console
    from hpcfed.lab.watch.follow import Watch

    watch = Watch(runs)
    console = Console(highlight=False, markup=False)
    try:
        if not once:
            _wait(watch, every)
        if console.is_terminal and console.encoding.startswith("utf"):
            _draw(watch, console, once=once, every=every)
        else:
            _follow(watch, once=once, every=every)
    except KeyboardInterrupt:
        return


def _wait(watch: Watch, every: float) -> None:
    """Wait until a folder holds a run; print the awaited folders and the logs of jobs beside them once."""
    from hpcfed.lab.watch.follow import is_awaited

    if awaited := [str(folder) for folder in watch.folders if is_awaited(folder)]:
        click.echo(f"waiting for a run in {', '.join(awaited)}; Ctrl-C leaves")
    told: set[Path] = set()
    while all(is_awaited(folder) for folder in watch.folders):
        for folder in watch.folders:
            logs = folder.parent.glob(f"{glob.escape(folder.name)}-*.log")
            latest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
            if latest and latest not in told:  # a job whose start fails leaves nothing else
                click.echo(f"its job writes to {latest}")
                told.add(latest)
        time.sleep(every)


def _draw(watch: Watch, console: Console, *, once: bool, every: float) -> None:
    from rich.live import Live

    from hpcfed.lab.watch.view import view

    watch.look(waits=not once)
    if once:
        console.print(view(watch.runs, console.width, console.height, scrolls=True))
        return

    def shown() -> RenderableType:
        return view(watch.runs, console.width, console.height, scrolls=watch.is_over)  # the last one stays

    with Live(shown(), console=console, auto_refresh=False) as live:
        while not watch.is_over:
            time.sleep(every)
            watch.look(waits=True)
            live.update(shown(), refresh=True)


def _follow(watch: Watch, *, once: bool, every: float) -> None:
    """Print a line per run: at once when its status changes, else at most every ten seconds if rounds were added."""
    from hpcfed.lab.watch.view import plain

    printed: dict[Path, tuple[int, str, float]] = {}
    while True:
        watch.look(waits=not once)
        for run in watch.runs:
            done, status, at = printed.get(run.folder, (-1, "", 0.0))
            news = run.status != status or (run.done != done and time.monotonic() - at >= QUIET_SECONDS)
            if news:
                printed[run.folder] = run.done, run.status, time.monotonic()
                click.echo(plain(run))
        if once or watch.is_over:
            return
        time.sleep(every)
