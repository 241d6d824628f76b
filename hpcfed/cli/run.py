"""``hpcfed run``: a recipe, alone or under mpirun or srun."""

from __future__ import annotations

import os

import click

from hpcfed.cli.options import OVERRIDES


@click.command("run")
@click.argument("recipe", type=click.Path())
@OVERRIDES
@click.option("--fresh", is_flag=True, help="Start anew; the run that is there is kept under previous-1, then -2, ….")
@click.option("--accept-code", is_flag=True, help="Go on although your own code has changed; both are recorded.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while it runs.")
def command(recipe: str, overrides: tuple[str, ...], fresh: bool, accept_code: bool, quiet: bool) -> None:
    """Run RECIPE, with single values overridden: hpcfed run r.yaml local.lr=0.03 rounds=50.

    Alone it uses one core or GPU; under mpirun -n P or srun it uses P, with the same result.
    """
    from hpcfed.errors import Stopped
    from hpcfed.ranks.platform.collector import uncollected

    with uncollected():
        from hpcfed.api import run_seeds

    began_before = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"  # SLURM requeues a job with the same --fresh
    try:
        run_seeds(recipe, overrides, quiet=quiet, fresh=fresh and not began_before, accept_code=accept_code)
    except Stopped as stopped:
        again = "the same command without --fresh" if fresh else "the same command"
        raise Stopped(str(stopped).replace("the same command", again)) from None
