"""``hpcfed sweep``: a recipe over a grid of settings × seeds, on all ranks of one job, or as an array of jobs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.cli.array import array_options, is_asked_for, submit_array
from hpcfed.cli.documents import JSON, Printer, printer
from hpcfed.cli.options import OVERRIDES

if TYPE_CHECKING:
    from hpcfed.lab.sweep.plan import Plan
    from hpcfed.lab.sweep.select import Rule


@click.command("sweep")
@click.argument("recipe", type=click.Path())
@OVERRIDES
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
@JSON
@array_options
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
    as_json: bool,
    array: int | None,
    **job: Any,
) -> None:
    """Run RECIPE for every combination of the grids' values and seeds, compare, and draw.

    \b
    mpirun -n 4 hpcfed sweep r.yaml -g "local.lr=10**-2:10**0:5" -g algorithm.eps=1e-3,1e-2 --seeds 5

    Groups of ranks take runs until none is left. After a stop or a kill the same command goes on; when all is done, it
    only reports. With --array, N SLURM jobs share the runs, each of the size that the options listed after it set.
    """
    from hpcfed.io.pace import nobody
    from hpcfed.lab.sweep.grid import parse_grids, parse_seeds
    from hpcfed.lab.sweep.plan import make_plan
    from hpcfed.lab.sweep.run import Redo, run_sweep
    from hpcfed.lab.sweep.select import parse_rule
    from hpcfed.ranks.world import connect

    def plan_it() -> tuple[Plan, Rule | None]:
        say = nobody if quiet else partial(click.echo, err=True)
        plan = make_plan(recipe, overrides, parse_grids(grids), parse_seeds(seeds) if seeds else [], output, say)
        return plan, None if select is None else parse_rule(select, plan)

    world, emit = connect(), printer("sweep", asked=as_json)
    plan, rule = world.on_root(plan_it)
    redo = Redo(retry, fresh, accept_code)
    if is_asked_for(array, job):
        own = [text for text in overrides if not text.startswith("output=")]
        words = ["sweep", str(Path(recipe).resolve()), *own, *(f"--grid={text}" for text in grids)]
        words += [f"--{name}={value}" for name, value in (("seeds", seeds), ("select", select)) if value is not None]
        words += [f"--groups={groups}"] * (groups is not None) + ["--parquet"] * parquet + [f"--output={plan.folder}"]
        world.on_root(lambda: submit_array(plan.units[0].recipe, plan.folder, lambda: plan, words, array, redo, job))
        return
    stopped = run_sweep(plan, world, groups, quiet=quiet, redo=redo)
    world.on_root(lambda: _report(plan, rule, stopped, parquet, emit))


def _report(plan: Plan, rule: Rule | None, stopped: bool, parquet: bool, emit: Printer | None) -> None:
    """Write the results so far, and show them or `emit` their document.

    Raises:
        Stopped: runs are left, and the same command goes on.
        InputError, EnvironmentFailure, Diverged: see `RankedSweep.raise_if_failed`.
    """
    from hpcfed.cli.report import print_table
    from hpcfed.errors import Stopped
    from hpcfed.lab.report.tables import Table
    from hpcfed.lab.sweep.claims import DECIDED
    from hpcfed.lab.sweep.report import report_sweep

    outcome = report_sweep(plan, rule, parquet=parquet)
    if emit is None:
        head, rows = outcome.table
        print_table(Table(f"{plan.name}: {plan}", head, tuple(rows)))
        click.echo("\n".join([*outcome.notes, str(plan.folder)]))
    else:
        from hpcfed.cli.documents.sweep import sweep_document

        emit(sweep_document(outcome, stopped=stopped))
    if stopped:
        done = sum(row.status in DECIDED for row in outcome.rows)
        raise Stopped(
            f"{plan.name} stopped, {done} of {len(plan.units)} runs done", remedy="the same command goes on from there"
        )
    outcome.raise_if_failed()
