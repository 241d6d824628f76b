"""``hpcfed sweep``: a recipe over a grid of settings × seeds, on all ranks of one job, or as an array of jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.cli.submit import TIME, job_options

if TYPE_CHECKING:
    from hpcfed.sweep.plan import Plan
    from hpcfed.sweep.run import Redo
    from hpcfed.sweep.select import Rule


@click.command("sweep")
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--grid", "-g", "grids", multiple=True, metavar="KEY=VALUES",
    help="Values of a key: a,b,c; or low:high:count, logarithmic as 10**-2:10**0:5. Repeatable: all combinations.",
)  # fmt: skip
@click.option("--seeds", metavar="N|LIST", help="5 (the seeds 0 to 4), or a list: 0,7. Default: the recipe's.")
@click.option("--groups", type=click.IntRange(1), help="Groups of ranks, a run each at a time. Default: one a rank.")
@click.option("--select", metavar="RULE", help="column[:lastK][:max|min], such as train_loss:last100.")
@click.option("--output", type=click.Path(path_type=Path), help="The sweep's folder. Default: <output>-sweep.")
@click.option("--parquet", is_flag=True, help="Write results.parquet beside results.csv.")
@click.option("--retry", is_flag=True, help="Try again what was refused or failed.")
@click.option(
    "--fresh", is_flag=True, help="Start runs of another recipe or other code anew; the old ones are kept aside."
)
@click.option("--accept-code", is_flag=True, help="Go on although your own code has changed; both are recorded.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while it runs.")
@click.option("--array", type=click.IntRange(1), metavar="N", help="Submit to SLURM as N jobs that share the runs.")
@click.option("--time", help=TIME)
@job_options
def command(
    recipe: str,
    overrides: tuple[str, ...],
    grids: tuple[str, ...],
    seeds: str | None,
    groups: int | None,
    select: str | None,
    output: Path | None,
    parquet: bool,
    retry: bool,
    fresh: bool,
    accept_code: bool,
    quiet: bool,
    array: int | None,
    **job: Any,
) -> None:
    """Run RECIPE for every combination of the grids' values and seeds, compare, and draw.

    \b
    mpirun -n 4 hpcfed sweep r.yaml -g "local.lr=10**-2:10**0:5" -g algorithm.eps=1e-3,1e-2 --seeds 5

    Groups of ranks take runs until none is left. After a stop or a kill the same command goes on; when all is done, it
    only reports. With --array, N SLURM jobs share the runs, each of the size that the options listed after it set.
    """
    from hpcfed.ranks.world import connect
    from hpcfed.sweep.grid import parse_grids, parse_seeds
    from hpcfed.sweep.plan import make_plan
    from hpcfed.sweep.run import Redo, run_sweep
    from hpcfed.sweep.select import parse_rule
    from hpcfed.sweep.table import check_parquet

    def plan_it() -> tuple[Plan, Rule | None]:
        plan = make_plan(recipe, overrides, parse_grids(grids), parse_seeds(seeds) if seeds else [], output)
        if parquet:
            check_parquet()
        return plan, None if select is None else parse_rule(select, plan)

    world = connect()
    plan, rule = world.on_root(plan_it)
    redo = Redo(retry, fresh, accept_code)
    if array is not None or job["time"] is not None or job["dry_run"]:
        own = [text for text in overrides if not text.startswith("output=")]
        words = ["sweep", str(Path(recipe).resolve()), *own, *(f"--grid={text}" for text in grids)]
        words += [f"--{name}={value}" for name, value in (("seeds", seeds), ("select", select)) if value is not None]
        words += [f"--groups={groups}"] * (groups is not None) + ["--parquet"] * parquet + [f"--output={plan.folder}"]
        world.on_root(lambda: _submit(plan, words, array, redo, job))
        return
    stopped = run_sweep(plan, world, groups, quiet=quiet, redo=redo)
    world.on_root(lambda: _report(plan, rule, stopped, parquet))


def _submit(plan: Plan, words: Sequence[str], array: int | None, redo: Redo, job: Mapping[str, Any]) -> None:
    """Submit the sweep as an array of jobs that share its folder."""
    from hpcfed.cli.submit import submit_job
    from hpcfed.errors import InputError
    from hpcfed.sweep.claims import Claims
    from hpcfed.sweep.run import prepare, stand

    if array is None or job["time"] is None:
        raise InputError("an array of jobs", expected="--array and --time", remedy="give both, or neither to run here")
    claims = Claims(plan.folder, "submit")

    def is_done() -> bool:
        prepare(plan, claims, redo)
        return all(one.decided for one in stand(plan, claims).values())

    submit_job(plan.units[0].recipe, plan.folder, words, is_done, array=array, **job)


def _report(plan: Plan, rule: Rule | None, stopped: bool, parquet: bool) -> None:
    """Write and show the results so far.

    Raises:
        Stopped: runs are left, and the same command goes on.
        EnvironmentFailure, Diverged: see `Outcome.raise_if_failed`.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from hpcfed.errors import Stopped
    from hpcfed.io.console import Console
    from hpcfed.sweep.claims import DECIDED
    from hpcfed.sweep.report import report_sweep

    outcome = report_sweep(plan, rule, parquet=parquet)
    head, rows = outcome.table
    table = Table(box=box.SIMPLE_HEAD, title=f"{plan.name}: {plan}", title_justify="left", pad_edge=False)
    for name in head:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)  # a file has no width to fit
    click.echo("\n".join([*outcome.notes, str(plan.folder)]))
    if stopped:
        done = sum(row.status in DECIDED for row in outcome.rows)
        raise Stopped(
            f"{plan.name} stopped, {done} of {len(plan.units)} runs done", remedy="the same command goes on from there"
        )
    outcome.raise_if_failed()
