"""``hpcfed scale``: strong or weak scaling of a recipe, measured on some numbers of ranks and predicted for others."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.cli.options import MOST_RANKS, OVERRIDES, given
from hpcfed.cli.submit import TIME, job_options

if TYPE_CHECKING:
    from hpcfed.config.recipe import Recipe
    from hpcfed.lab.scaling.measure import RankTimes
    from hpcfed.lab.scaling.network import Network

OVERSUBSCRIBED, LEAST = 4, 8
"""Ranks a core that may be measured here, and the number of ranks that always may."""
SHARING = {"exclusive", "oversubscribe"}
"""Options of sbatch that say whether a job shares its nodes."""


def _numbers(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Read ``1,2,4`` as increasing numbers of ranks."""
    try:
        numbers = {int(word) for word in (text or "").split(",") if word.strip()}
    except ValueError:
        raise click.BadParameter(f"{text!r} is not numbers separated by commas") from None
    if any(number < 1 for number in numbers):
        raise click.BadParameter("numbers of ranks are at least 1")
    if any(number > MOST_RANKS for number in numbers):
        raise click.BadParameter(f"numbers of ranks are at most {MOST_RANKS:,}")
    return tuple(sorted(numbers))


@click.command("scale")
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--ranks", callback=_numbers, default="1,2", show_default=True, help="Numbers of ranks to measure.")
@click.option("--mode", type=click.Choice(("strong", "weak")), default="strong", show_default=True,
              help="The same cohort on all, or one that grows with the ranks.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(3), default=20, show_default=True, help="Rounds of each measurement.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder; default: runs/<name>-<mode>.")
@click.option("--predict", callback=_numbers, help="Numbers of ranks to predict: 64,1024,4096.")
@click.option("--cohort", type=click.IntRange(1), help="Cohort of the predictions.  [default: as measured]")
@click.option("--clients", type=click.IntRange(1), help="Clients of the predictions.  [default: the recipe's]")
@click.option("--network", metavar="LATENCY,BANDWIDTH|FILE",
              help="Of the predictions: 20us,10Gbit/s, or a file of hpcfed doctor --json.")  # fmt: skip
@click.option("--here", is_flag=True, help="Measure on the ranks of this very job, for scripts of your own.")
@click.option("--slurm", is_flag=True, help="Submit what is not measured yet as SLURM jobs, and show the rest.")
@click.option("--time", help=f"With --slurm. {TIME}")
@partial(job_options, nodes=False)
def command(
    recipe: Path,
    overrides: tuple[str, ...],
    ranks: tuple[int, ...],
    mode: str,
    rounds: int,
    output: Path | None,
    predict: tuple[int, ...],
    cohort: int | None,
    clients: int | None,
    network: str | None,
    here: bool,
    slurm: bool,
    **job: Any,
) -> None:
    """Time rounds of RECIPE on several numbers of ranks, and predict others by a cost model.

    The output folder gets scaling.json, scaling.png and scaling.pdf, and the measurements, which later calls reuse.
    Each number of ranks also trains smaller cohorts, to fit the model and to test it. Nothing is evaluated.
    """
    from hpcfed.assembly import resolve
    from hpcfed.config.load import load_recipe
    from hpcfed.errors import InputError
    from hpcfed.lab.scaling.measure import measure_here
    from hpcfed.lab.scaling.network import parse_network

    _check_read(here=here, slurm=slurm, predicts=bool(predict), job=job)
    other = parse_network(network) if network else None
    loaded = load_recipe(recipe, overrides)
    folder = (output or Path("runs") / f"{loaded.name}-{mode}").resolve()
    if here:
        from hpcfed.ranks.world import connect

        measure_here(recipe, overrides, mode, rounds, folder, connect())
        return
    resolved = resolve(loaded)
    if slurm and not job["time"]:
        raise InputError("--slurm", expected="--time, the limit of each job", got="none")
    sizes = _checked(resolved, mode, ranks)
    found = _found(resolved, mode, rounds, folder, ranks)
    words = ["scale", str(recipe.resolve()), *overrides, "--here", "--mode", mode, "--rounds", str(rounds)]
    words += ["--output", str(folder)]
    left = [count for count in ranks if count not in found]
    if slurm:
        sizes_of = {count: _size(count, **job) for count in left}  # all are checked before the first is submitted
    else:
        _check_fits(left)
    for count in left:
        if slurm:
            _submit(resolved, folder, count, words, **{**job, **sizes_of[count]})
        else:
            _measure(words, count, folder)
    found = _found(resolved, mode, rounds, folder, ranks)
    missing = [str(count) for count in ranks if count not in found]
    if missing:
        click.echo(f"not measured yet: {', '.join(missing)} ranks; call this again when the jobs are done")
    if found:
        _report(resolved, mode, list(found.values()), sizes, folder, predict, cohort, clients, other)


def _check_read(*, here: bool, slurm: bool, predicts: bool, job: Iterable[str]) -> None:
    """Refuse options that this call would not read.

    Raises:
        InputError: there are some.
    """
    from hpcfed.errors import InputError

    of_predictions, of_jobs = given("cohort", "clients", "network"), given(*job)
    if here and (unread := [*given("ranks", "predict", "slurm"), *of_predictions, *of_jobs]):
        raise InputError("--here", expected="measurements alone", got=", ".join(unread), remedy="leave it out")
    if of_jobs and not slurm:
        remedy = "add it, or leave them out to measure here"
        raise InputError("options of a job", expected="--slurm beside them", got=", ".join(of_jobs), remedy=remedy)
    if of_predictions and not predicts:
        got = ", ".join(of_predictions)
        raise InputError("options of predictions", expected="--predict beside them", got=got, remedy="leave them out")


def _checked(recipe: Recipe, mode: str, ranks: Sequence[int]) -> Any:
    """Return the clients' sizes, (N,), after making sure that every measurement can be made."""
    from hpcfed.data.federation import Federation
    from hpcfed.lab.scaling.plan import settings

    with Federation.open(recipe.data) as federation:
        for count in ranks:
            settings(recipe, federation.num_clients, mode, count)
        return federation.sizes


def _found(recipe: Recipe, mode: str, rounds: int, folder: Path, ranks: Sequence[int]) -> dict[int, RankTimes]:
    """Return the measurements that exist, by number of ranks.

    Raises:
        InputError: one is of another recipe, mode or number of rounds.
    """
    from hpcfed.errors import InputError
    from hpcfed.lab.scaling.measure import identity, path_of, read

    found, asked = {}, (identity(recipe), mode, rounds)
    for count in ranks:
        measured = read(folder, count)
        if measured is None:
            continue
        if (measured.recipe, measured.mode, measured.rounds) != asked:
            expected, where = "a measurement of this recipe, mode and rounds", str(path_of(folder, count))
            raise InputError("scale", where=where, expected=expected, got="another", remedy="choose another --output")
        found[count] = measured
    return found


def _check_fits(ranks: Sequence[int]) -> None:
    """Refuse more ranks than this machine, or the nodes of this SLURM allocation, can sensibly hold."""
    from hpcfed.errors import InputError
    from hpcfed.ranks.cpu import cores

    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    here = len(cores())
    most = max(OVERSUBSCRIBED * here, LEAST) * (int(nodes) if nodes.isdigit() else 1)
    if ranks and max(ranks) > most:
        expected = f"at most {most} ranks on the {here} cores here"
        remedy = "--slurm submits a job for each number of ranks, --predict computes"
        raise InputError("--ranks", expected=expected, got=str(max(ranks)), remedy=remedy)


def _measure(words: Sequence[str], count: int, folder: Path) -> None:
    """Measure on ranks of this machine.

    Raises:
        InputError: the ranks refused the recipe.
        EnvironmentFailure: they failed otherwise, or left no measurement.
    """
    from hpcfed.errors import EnvironmentFailure
    from hpcfed.lab.bench.timing import mpirun, run_to_end
    from hpcfed.lab.scaling.measure import path_of
    from hpcfed.ranks.code import python_options

    launch = [mpirun(), "-n", str(count)] if count > 1 else []
    name = f"{count} rank{'s' if count > 1 else ''}"
    done = run_to_end(f"scale on {name}", [*launch, sys.executable, *python_options(), "-m", "hpcfed", *words])
    if not path_of(folder, count).exists():
        raise EnvironmentFailure(f"scale on {name} ended without a measurement", remedy="does mpirun start that many?")
    click.echo(f"{name}: measured in {done.seconds:.0f} s")


def _size(
    count: int,
    *,
    ranks_per_node: int | None,
    gpus_per_node: int | None,
    site: str | None,
    more: Sequence[str],
    **_: Any,
) -> dict[str, Any]:
    """Return the options of a job for a measurement on `count` ranks, on as few nodes as hold them.

    It has its nodes to itself, unless an option says otherwise: neighbours' work would be measured, too.

    Raises:
        InputError: they fill no whole nodes.
    """
    from hpcfed.cli.submit import options_of
    from hpcfed.cluster.submit.gpus import ranks_of_gpus
    from hpcfed.errors import InputError

    asked = options_of(site, gpus_per_node, more)
    each = ranks_per_node or ranks_of_gpus(asked, nodes=1) or count
    if count > each and count % each:
        raise InputError("--ranks-per-node", expected=f"a number that divides {count} ranks", got=str(each))
    alone = () if SHARING & set(asked) else ("exclusive",)
    return {"nodes": max(1, count // each), "ranks_per_node": min(each, count), "more": (*more, *alone)}


def _submit(recipe: Recipe, folder: Path, count: int, words: Sequence[str], **job: Any) -> None:
    """Submit the measurement on `count` ranks."""
    from hpcfed.cli.submit import submit_job
    from hpcfed.lab.scaling.measure import path_of

    is_done: Callable[[], bool] = path_of(folder, count).exists
    submit_job(recipe, folder / f"ranks-{count}", words, is_done, chain=1, **job)  # an interrupted one is not requeued


def _report(
    recipe: Recipe,
    mode: str,
    measured: Sequence[RankTimes],
    sizes: Any,
    folder: Path,
    predict: Sequence[int],
    cohort: int | None,
    clients: int | None,
    network: Network | None,
) -> None:
    """Print the study, and write it beside the measurements."""
    from hpcfed.io.atomic import write_whole, writing
    from hpcfed.io.console import Console
    from hpcfed.lab.scaling.figure import draw
    from hpcfed.lab.scaling.result import study
    from hpcfed.lab.scaling.tables import shown

    result = study(recipe, mode, measured, sizes, predict, cohort, clients, network)
    Console(width=140).print(shown(result))
    with writing(folder):
        write_whole(folder / "scaling.json", json.dumps(result.plain(), indent=1) + "\n")
        for suffix, content in draw(result).items():
            write_whole(folder / f"scaling{suffix}", content)
    click.echo(f"\nsee {shlex.quote(str(folder))}: scaling.json, scaling.png, scaling.pdf")
