"""``hpcfed contributions``: what each client of a run brings to its result, and takes from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hpcfed.lab.whatif.coalitions import Coalitions


@click.command("contributions")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--metric",
    metavar="RULE",
    help="v(S), as a sweep's --select: test_auroc:last1. Default: test accuracy, else test loss, of the last round.",
)
@click.option("--seeds", metavar="N|LIST", help="5 (the seeds 0 to 4), or a list: 0,7. Default: the run's.")
@click.option(
    "--permutations",
    type=click.IntRange(0),
    help="Random orders of the clients to sample Shapley values from; 0: leave-one-out alone. Default: all subsets.",
)
@click.option(
    "--cohorts",
    type=click.Choice(["empty", "redrawn"]),
    default="empty",
    show_default=True,
    help="Leave the places of clients that are left out empty, or draw among the others.",
)
@click.option("--groups", type=click.IntRange(1), help="Groups of ranks, a run each at a time. Default: one a rank.")
@click.option("--output", type=click.Path(path_type=Path), help="The folder. Default: RUN-contributions.")
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that the recipe names.")
@click.option("--retry", is_flag=True, help="Try again what was refused or failed.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while it runs.")
def command(seeds: str | None, groups: int | None, retry: bool, quiet: bool, **asked: Any) -> None:
    """Train the recipe of RUN on subsets of its clients; compute leave-one-out and Shapley values of each.

    \b
    mpirun -n 4 hpcfed contributions runs/fedexp --seeds 5

    Groups of ranks take subsets until none is left. After a stop or a kill the same command goes on; when all is done,
    it only reports: contributions.csv, values.csv, and contributions.html, what each client brings and takes.
    """
    from hpcfed.lab.sweep.grid import parse_seeds
    from hpcfed.lab.sweep.run import Redo
    from hpcfed.lab.whatif.coalitions import Contributions, plan_coalitions, run_coalitions
    from hpcfed.ranks.world import connect

    def plan_it() -> Coalitions:
        return plan_coalitions(Contributions(**asked, seeds=parse_seeds(seeds) if seeds else []))

    world = connect()
    coalitions = world.on_root(plan_it)
    stopped = run_coalitions(coalitions, world, groups, quiet=quiet, redo=Redo(retry=retry))
    world.on_root(lambda: _report(coalitions, stopped))


def _report(coalitions: Coalitions, stopped: bool) -> None:
    """Write and show the contributions.

    Raises:
        Stopped: runs are left, and the same command goes on.
        InputError, EnvironmentFailure, Diverged: runs have no result.
    """
    from hpcfed.cli.report import print_table
    from hpcfed.errors import Stopped, counted
    from hpcfed.lab.report.tables import Table
    from hpcfed.lab.whatif.coalitions import num_left
    from hpcfed.lab.whatif.values import contributed, table, write_contributions

    if stopped:
        raise Stopped(f"{coalitions.plan.folder} stopped", remedy="the same command goes on from there")
    left, held = num_left(coalitions)
    runs = counted(len(coalitions.plan.units), "run")
    if left > held:
        raise Stopped(f"{left - held} of {runs} left", remedy="the same command goes on from there")
    if left:
        click.echo(f"{left} of {runs} still going on in other jobs: the last of them writes the contributions")
        return
    found = contributed(coalitions)
    page = write_contributions(found)
    head, rows = table(found)
    print_table(Table("", head, tuple(rows)))
    click.echo("\n".join([*found.notes, str(page)]))
