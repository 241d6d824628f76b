"""``hpcfed reproduce``: a paper's experiment, from its data to its table with ours beside it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.cli.array import ArrayJobFacts, array_options, is_asked_for, submit_array
from hpcfed.cli.options import given

if TYPE_CHECKING:
    from hpcfed.errors import InputError
    from hpcfed.lab.reproduce.experiment import Experiment
    from hpcfed.lab.reproduce.inputs import Places
    from hpcfed.lab.reproduce.session import ReproduceSession
    from hpcfed.ranks.signals import Signals


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="small: the protocol on smaller data, in minutes on two cores.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), help="Start this many MPI ranks here; else as mpirun or srun did.")
@click.option("--list", "listed", is_flag=True, help="Print all experiments, or those of NAME or of a paper: "
              "cost, and what data they wait for.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/reproduce"), show_default=True,
              help="Folder of the data, runs, tables and figures of all experiments.")  # fmt: skip
@click.option("--raw", type=click.Path(path_type=Path, exists=True, file_okay=False), envvar="HPCFED_RAW",
              help="Folder with a folder of raw files for each data set: mnist, cifar10, … [$HPCFED_RAW].")  # fmt: skip
@click.option("--case", "cases", multiple=True, help="Only this case of the experiment; repeatable.")
@click.option("--method", "methods", multiple=True, help="Run only this method; repeatable. The table shows all.")
@click.option("--rounds", type=click.IntRange(1), help="At most so many rounds now; a later call goes on to more.")
@click.option("--to-targets", is_flag=True, help="End each run at its hardest target; its figures end there, too.")
@click.option("--seeds", help="At most so many seeds now, or others than the experiment's: 5,6,7 (5, is seed 5 alone).")
@click.option("--groups", type=click.IntRange(1), help="Groups of ranks, a run each at a time. Default: one a rank.")
@click.option("--table", is_flag=True, help="Run nothing; print what there is.")
@click.option("--retry", is_flag=True, help="Try again what was refused or failed.")
@click.option(
    "--fresh", is_flag=True, help="Start runs of another recipe or other code anew; the old ones are kept aside."
)
@click.option("--accept-code", is_flag=True, help="Go on although your own code has changed; both are recorded.")
@array_options
def command(
    name: str | None,
    scale: str,
    ranks: int | None,
    listed: bool,
    output: Path,
    raw: Path | None,
    cases: tuple[str, ...],
    methods: tuple[str, ...],
    rounds: int | None,
    to_targets: bool,
    seeds: str | None,
    groups: int | None,
    table: bool,
    retry: bool,
    fresh: bool,
    accept_code: bool,
    array: int | None,
    **job: Any,
) -> None:
    """Run the experiment NAME of a paper, and print the results beside the paper's: fedexp-table1, feddyn-figure8, or
    a file of your own like those in jobs/recipes.

    It prepares the data, does the missing runs, and draws the figures. After a stop or a kill the same command goes
    on, and several jobs may share one experiment. With --array the data are prepared here, and N SLURM jobs share the
    runs, each of the size that the options listed after it set.
    """
    from hpcfed.lab.reproduce.experiment import TRAINED_FOR_THE_TABLE
    from hpcfed.lab.reproduce.inputs import Places

    places = Places(output.absolute(), raw)
    if listed:
        _list(places, name)
        return
    if name is None:
        raise click.UsageError("no NAME: --list shows all", click.get_current_context())
    wanted = _chosen(name, scale, cases, methods, seeds, places)
    if table and any(one.measure.kind in TRAINED_FOR_THE_TABLE for one in wanted):
        raise click.UsageError(f"--table: {name} trains for its table", click.get_current_context())
    if table and (unread := given("ranks", "groups", "retry", "fresh", "accept_code")):
        raise click.UsageError(f"--table runs nothing, and reads no {', '.join(unread)}", click.get_current_context())
    submits = is_asked_for(array, job)
    if submits and (ranks is not None or table):
        what = "--table" if table else "--ranks"
        raise click.UsageError(f"{what} does not go with --array", click.get_current_context())
    if ranks is not None:
        _start(ranks)
    from hpcfed.lab.reproduce.session import ReproduceSession
    from hpcfed.lab.sweep.run import Redo
    from hpcfed.ranks.signals import catch_signals
    from hpcfed.ranks.world import connect

    redo = Redo(retry, fresh, accept_code)
    session = ReproduceSession(connect(), places, scale, rounds, to_targets, methods, groups, redo)
    world = session.world
    present = world.on_root(lambda: session.available(wanted, prepared=table))
    if submits:
        words = _words(click.get_current_context().params)
        world.on_root(lambda: _submit(session, present, words, array, job))
    elif table:
        for experiment in present:
            world.on_root(partial(_show, session, experiment))
    else:
        with catch_signals(world) as caught:  # of all its runs, and of what is between them
            _run_each(session, present, name, caught)


def _run_each(session: ReproduceSession, present: Sequence[Experiment], name: str, caught: Signals) -> None:
    """Prepare, run and show one experiment after another, on all ranks; those without data are named and left out.

    Raises:
        InputError: none can be prepared, or a recipe cannot be run.
        EnvironmentFailure: runs failed or were lost.
        Stopped: a signal has ended it.
    """
    from hpcfed.errors import InputError, Stopped

    world, left_out = session.world, []
    stopped = Stopped(f"{name} stopped, runs are left", remedy="the same command goes on from there")
    for experiment in present:
        if any(world.gather(caught.name is not None)):  # which experiments without runs do not heed
            raise stopped
        try:
            ready = world.on_root(partial(session.prepare, experiment))
        except InputError as error:
            left_out.append(error)
            if len(present) > 1:
                world.on_root(partial(click.echo, f"{experiment.name} is left out: {error}"))
            continue
        is_stopped = session.run(ready)
        world.on_root(partial(_show, session, ready))
        if is_stopped:
            raise stopped
    if len(left_out) == len(present):
        raise left_out[0]


def _list(places: Places, name: str | None) -> None:
    from hpcfed.lab.reproduce.catalogue import experiments, find
    from hpcfed.lab.reproduce.inputs import lacking

    listed = [one for one in experiments().values() if name in (None, one.paper)]
    for one in listed or find(str(name)):
        waits = list(dict.fromkeys(lacking(one, places).values()))
        click.echo(f"{one.name:<24} {one.title}")
        if one.shows:
            click.echo(f"{'':<24} shows   {', '.join(f'{one.paper}-{item}' for item in one.shows)}")
        click.echo(f"{'':<24} full    {one.cost.full}")
        if one.small:
            click.echo(f"{'':<24} small   {one.cost.small}: {one.small.says}")
            if one.small.images:
                click.echo(f"{'':<24}         where CIFAR-10 is there: {one.small.images.says}")
        click.echo(f"{'':<24} data    {'waits for ' + ', '.join(waits) if waits else 'there, or made from a seed'}")
        click.echo("")
    click.echo("Costs are expectations. NAME is an experiment, or one of the tables and figures that it shows.")


def _chosen(
    name: str, scale: str, cases: Sequence[str], methods: Sequence[str], seeds: str | None, places: Places
) -> list[Experiment]:
    """Return the experiments to run.

    Raises:
        InputError: a name is unknown, or there is no small variant.
    """
    from hpcfed.errors import InputError
    from hpcfed.lab.reproduce.catalogue import find
    from hpcfed.lab.reproduce.inputs import lacking

    found = find(name, scale, images=lambda variant: not lacking(variant, places))
    if cases and any(one.measure.kind == "sites" for one in found):
        raise InputError(f"--case: the table of {name} is of all its cases", remedy="choose by --method")
    if methods and not any(one.trains for one in found):
        raise InputError(f"--method: the table of {name} is of all its methods", remedy="choose by --case")
    limited = [experiment.limited(list(cases)) for experiment in found]
    kept = [experiment for experiment in limited if experiment.cases]
    known = [case for experiment in found for case in experiment.cases]
    for word in cases:
        if word not in known:
            others = [case for one in find(name) for case in one.cases]  # of the full experiment
            raise _unknown(name, "case", word, known, others, "the small variant")
    known = [method for one in kept for case in one.cases.values() for method in one.methods_of(case)]
    for word in methods:
        if word not in known:
            others = [method for one in found for method in one.methods]
            chosen = f"case {' and '.join(cases)}" if cases else f"the {scale} variant"
            raise _unknown(name, "method", word, known, others, chosen)
    return [_with_seeds(one, seeds) for one in kept]


def _with_seeds(experiment: Experiment, text: str | None) -> Experiment:
    """Return the experiment with as many of its seeds as a number says, or with those of a list."""
    from hpcfed.lab.sweep.grid import parse_seeds

    if text is None:
        return experiment
    numbers = parse_seeds(text)
    return experiment.with_seeds(numbers if "," in text else numbers[: experiment.seeds])


def _unknown(name: str, what: str, word: str, known: Sequence[str], others: Sequence[str], chosen: str) -> InputError:
    """Return the error for an unknown case or method, or for one of the experiment's `others`, left out by `chosen`."""
    from hpcfed.errors import InputError, nearest

    known = list(dict.fromkeys(known))
    if word in others:
        return InputError(f"{name}: no {what} {word!r} here", remedy=f"{chosen} has only {', '.join(known)}")
    return InputError(f"{name} has no {what} {word!r}", remedy=nearest(word, known))


def _start(ranks: int) -> None:
    """Replace this process by mpirun with the same command on `ranks` ranks."""
    from hpcfed.errors import InputError
    from hpcfed.ranks.code import python_options

    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        raise InputError("--ranks", expected="mpirun on the PATH", got="none", remedy="leave --ranks out")
    words = [word for word in sys.argv[1:] if not word.startswith("--ranks=")]
    if "--ranks" in words:
        place = words.index("--ranks")
        del words[place : place + 2]
    own = [sys.executable, *python_options(), "-m", "hpcfed"]
    os.execv(launcher, [launcher, "-n", str(ranks), *own, *words])


def _words(asked: Mapping[str, Any]) -> list[str]:
    """Return the command of every job of an array, as ``hpcfed`` takes it, from this command's parameters."""
    name, output = asked["name"], asked["output"].absolute()
    own = name.endswith((".yaml", ".yml"))
    words = ["reproduce", str(Path(name).resolve()) if own else name, f"--scale={asked['scale']}", f"--output={output}"]
    words += [f"--raw={asked['raw'].resolve()}"] if asked["raw"] else []
    words += [f"--{key}={word}" for key in ("case", "method") for word in asked[f"{key}s"]]
    words += [f"--{key}={asked[key]}" for key in ("rounds", "seeds", "groups") if asked[key] is not None]
    return words + ["--to-targets"] * asked["to_targets"]


def _submit(
    session: ReproduceSession,
    present: Sequence[Experiment],
    words: Sequence[str],
    array: int | None,
    job: Mapping[str, Any],
) -> None:
    """Submit an experiment as an array of jobs, its data prepared before."""
    from hpcfed.errors import InputError

    training = [experiment for experiment in present if experiment.trains]
    if len(training) != 1:
        names, what = ", ".join(one.name for one in training or present), f"--array: {words[1]}"
        if not training:
            raise InputError(f"{what} trains nothing", got=names, remedy="leave --array out")
        raise InputError(what, expected="one experiment", got=names, remedy="submit one after another")
    (experiment,) = training
    parts = list(experiment.recipe_parts())
    threads = max(int(part.get("threads", 1)) for part in parts)
    device = next((str(part["device"]) for part in parts if "device" in part), "auto")
    facts = ArrayJobFacts(experiment.name, threads, device)
    folder = session.folder(experiment)
    submit_array(facts, folder, lambda: session.plan(session.prepare(experiment)), words, array, session.redo, job)


def _show(session: ReproduceSession, experiment: Experiment) -> None:
    from hpcfed.cli.report import print_table

    shown = session.show(experiment)
    print_table(shown.table)
    click.echo("\n".join(map(str, shown.files)))
