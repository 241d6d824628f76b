"""``hpcfed reproduce``: a paper's experiment, from its data to its table with ours beside it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hpcfed.report.tables import Table
    from hpcfed.reproduce.experiment import Experiment
    from hpcfed.reproduce.inputs import Places
    from hpcfed.reproduce.plan import Layout
    from hpcfed.world import World


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="small: the protocol on smaller data, in minutes on two cores.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), help="Start this many MPI ranks here; else as mpirun or srun did.")
@click.option("--list", "listed", is_flag=True, help="Print all experiments: cost, and what data they wait for.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/reproduce"), show_default=True,
              help="Folder of the data, runs, tables and figures of all experiments.")  # fmt: skip
@click.option("--raw", type=click.Path(path_type=Path), envvar="HPCFED_RAW",
              help="Folder with a folder of raw files for each data set: mnist, cifar10, … [$HPCFED_RAW].")  # fmt: skip
@click.option("--case", "cases", multiple=True, help="Only this case of the experiment; repeatable.")
@click.option("--rounds", type=click.IntRange(1), help="At most so many rounds now; a later call goes on to more.")
@click.option("--seeds", type=click.IntRange(1), help="At most so many seeds now.")
@click.option("--groups", type=click.IntRange(1), help="Groups of ranks, a run each at a time. Default: one a rank.")
@click.option("--table", is_flag=True, help="Run nothing; print what there is.")
@click.option("--retry", is_flag=True, help="Try again what was refused or failed.")
def command(
    name: str | None,
    scale: str,
    ranks: int | None,
    listed: bool,
    output: Path,
    raw: Path | None,
    cases: tuple[str, ...],
    rounds: int | None,
    seeds: int | None,
    groups: int | None,
    table: bool,
    retry: bool,
) -> None:
    """Run the experiment NAME of a paper, and print its table with ours beside it: fedexp-table1, feddyn-figure8.

    It prepares the data, runs what has not run yet, and draws the figures. Stopped or killed, the same command goes on,
    and several jobs may share one experiment.
    """
    from hpcfed.reproduce.inputs import Places

    places = Places(output.absolute(), raw)
    if listed:
        _list(places)
        return
    if name is None:
        raise click.UsageError("no NAME: --list shows all", click.get_current_context())
    wanted = _chosen(name, scale, cases, seeds)
    if ranks is not None and not table:
        _start(ranks)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # outside of runs it must not end the process
    from hpcfed.world import connect

    world = connect()
    stopped = False
    for experiment in wanted:
        stopped = stopped or _reproduce(experiment, scale, places, world, rounds, groups, runs=not table, retry=retry)
    if stopped:
        from hpcfed.errors import Stopped

        raise Stopped(f"{name} stopped, runs are left", remedy="the same command goes on from there")


def _list(places: Places) -> None:
    from hpcfed.reproduce.catalogue import experiments
    from hpcfed.reproduce.inputs import lacking

    for one in experiments().values():
        waits = list(dict.fromkeys(lacking(one, places).values()))
        click.echo(f"{one.name:<24} {one.title}")
        click.echo(f"{'':<24} shows   {', '.join(f'{one.paper}-{item}' for item in one.shows)}")
        click.echo(f"{'':<24} full    {one.cost.full}")
        if one.small:
            click.echo(f"{'':<24} small   {one.cost.small}: {one.small.says}")
        click.echo(f"{'':<24} data    {'waits for ' + ', '.join(waits) if waits else 'there, or made from a seed'}")
        click.echo("")


def _chosen(name: str, scale: str, cases: Sequence[str], seeds: int | None) -> list[Experiment]:
    """Return what is to be run.

    Raises:
        InputError: a name is unknown, or there is no small variant.
    """
    from hpcfed.errors import InputError, nearest
    from hpcfed.reproduce.catalogue import find

    found = [experiment.at(scale) for experiment in find(name)]
    known = [case for experiment in found for case in experiment.cases]
    for case in cases:
        if case not in known:
            raise InputError(f"{name} has no case {case!r}", remedy=nearest(case, known))
    limited = [experiment.limited(list(cases)) for experiment in found]
    kept = [experiment for experiment in limited if experiment.cases]
    return [one.model_copy(update={"seeds": min(one.seeds, seeds or one.seeds)}) for one in kept]


def _start(ranks: int) -> None:
    """Become mpirun with this very command on so many ranks."""
    from hpcfed.errors import InputError

    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        raise InputError("--ranks", expected="mpirun on the PATH", got="none", remedy="leave --ranks out")
    words = [word for word in sys.argv[1:] if not word.startswith("--ranks=")]
    if "--ranks" in words:
        place = words.index("--ranks")
        del words[place : place + 2]
    os.execv(launcher, [launcher, "-n", str(ranks), sys.executable, "-m", "hpcfed", *words])


def _reproduce(
    experiment: Experiment,
    scale: str,
    places: Places,
    world: World,
    rounds: int | None,
    groups: int | None,
    *,
    runs: bool,
    retry: bool,
) -> bool:
    """Prepare, run and report one experiment; return whether it was stopped early.

    Raises:
        InputError: none of its data is there.
    """
    from hpcfed.reproduce.plan import lay_out
    from hpcfed.sweep.run import run_sweep

    kept = world.on_root(lambda: _prepare(experiment, places, runs=runs))
    if not kept.methods:
        world.on_root(lambda: _show_classes(kept, scale, places))
        return False
    layout = world.on_root(lambda: lay_out(kept, scale, places, rounds))
    stopped = run_sweep(layout.plan, world, groups, retry=retry) if runs else False
    world.on_root(lambda: _show(kept, layout, scale, places))
    return stopped


def _prepare(experiment: Experiment, places: Places, *, runs: bool) -> Experiment:
    """Return the experiment with the cases whose data is there, prepared.

    Raises:
        InputError: there is none.
    """
    from hpcfed.errors import InputError
    from hpcfed.reproduce.inputs import is_prepared, lacking, prepare

    waiting = lacking(experiment, places)
    for case, words in waiting.items():
        click.echo(f"{experiment.name}: {experiment.cases[case].title} waits for {words}")
    kept = [case for case in experiment.cases if case not in waiting]
    if not runs:
        kept = [case for case in kept if is_prepared(experiment, case, places)]
    if not kept:
        what = "no data" if runs else "nothing has been run"
        raise InputError(what, where=experiment.name, remedy="see --list, and name the raw data's folder by --raw")
    for case in kept if runs else ():
        for seed in range(experiment.seeds):
            for line in prepare(experiment.cases[case].data, seed, places):
                click.echo(line)
    return experiment.limited(kept)


def _show(experiment: Experiment, layout: Layout, scale: str, places: Places) -> None:
    """Print the table, and leave it and the figures in the experiment's folder."""
    from hpcfed.reproduce.figures import draw
    from hpcfed.reproduce.measure import read_settings
    from hpcfed.reproduce.plan import folder_of
    from hpcfed.reproduce.table import make_table

    measured = read_settings(experiment, layout)
    folder = folder_of(experiment, scale, places)
    _write(make_table(experiment, measured), folder, draw(experiment, measured, folder / "figures"))


def _show_classes(experiment: Experiment, scale: str, places: Places) -> None:
    from hpcfed.reproduce.classes import compare_classes
    from hpcfed.reproduce.plan import folder_of

    folder = folder_of(experiment, scale, places)
    table, pictures = compare_classes(experiment, places, folder / "figures")
    _write(table, folder, pictures)


def _write(table: Table, folder: Path, pictures: Sequence[Path]) -> None:
    from hpcfed.cli.report import print_table
    from hpcfed.errors import EnvironmentFailure
    from hpcfed.files import write_whole
    from hpcfed.reproduce.table import markdown

    try:
        write_whole(folder / "table.md", markdown(table))
    except OSError as error:
        raise EnvironmentFailure("cannot be written", where=str(folder), got=error.strerror or "") from None
    print_table(table)
    click.echo("\n".join(map(str, [folder / "table.md", *pictures])))
