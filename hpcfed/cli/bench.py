"""``hpcfed bench``: what a round costs beside the bare loop, in the same run."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hpcfed.bench.timing import Timing, bare, in_turn, ours, own
from hpcfed.bench.workloads import WORKLOADS, write_workload
from hpcfed.errors import InputError, nearest
from hpcfed.files import write_whole


@click.command("bench")
@click.argument("workloads", nargs=-1, metavar=f"[{'|'.join(WORKLOADS)}]...")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each contender.")
@click.option("--rounds", type=click.IntRange(min=1, max=300), default=25, show_default=True, help="Rounds of a turn.")
@click.option("--warm-up", type=click.IntRange(min=0, max=99), default=5, show_default=True, help="Rounds not counted.")
@click.option("--ranks", type=click.IntRange(min=1), multiple=True, default=(1,), show_default=True, help="Repeatable.")
@click.option(
    "--own", "own_loop", metavar="COMMAND", help='Your own loop; its last line is a JSON object with "ms_med".'
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def command(
    workloads: tuple[str, ...],
    repeats: int,
    rounds: int,
    warm_up: int,
    ranks: tuple[int, ...],
    own_loop: str | None,
    json_file: Path | None,
) -> None:
    """Time rounds of WORKLOADS (default: all) beside a bare PyTorch loop on one thread.

    Each contender is a process of its own with the default environment; they take turns, and ratios are taken turn by
    turn. Sampling, data, reduction, server step and record are included, evaluation and start-up are not.
    """
    console = Console()
    results = {}
    for name in workloads or tuple(WORKLOADS):
        if name not in WORKLOADS:
            raise InputError(f"unknown workload {name!r}", remedy=nearest(name, WORKLOADS))
        work = WORKLOADS[name]
        console.print(f"{work.letter}: {work.title}, {work.clients} clients × {work.samples}, cohort {work.cohort}")
        with tempfile.TemporaryDirectory(prefix="hpcfed-bench-") as scratch:
            folder = Path(scratch)
            write_workload(name, folder)
            contenders = [bare(name, folder, rounds, warm_up)]
            contenders += [ours(folder, rounds, warm_up, count) for count in ranks]
            if own_loop is not None:
                contenders.append(own("own loop", shlex.split(own_loop)))
            timings = in_turn(contenders, repeats, lambda line: console.print(line, highlight=False))
        console.print(_table(timings))
        results[name] = {timing.name: timing.milliseconds for timing in timings}
    if json_file is not None:
        write_whole(json_file, json.dumps(results, indent=1) + "\n")


def _table(timings: list[Timing]) -> Table:
    """Milliseconds and ratios to the bare loop, and to one rank where several were timed."""
    table = Table(box=None, pad_edge=False)
    for heading in ("contender", "ms a round", "over bare", "(least … largest)", "over the first of ours"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    base, first = timings[0], timings[1]
    for timing in timings:
        least, middle, largest = timing.over(base)
        own_ratio = f"{timing.over(first)[1]:.3f}" if timing.name.startswith("hpcfed") else ""
        table.add_row(timing.name, f"{timing.median:.2f}", f"{middle:.3f}", f"({least:.3f} … {largest:.3f})", own_ratio)
    return table
