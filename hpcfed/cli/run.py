"""``hpcfed run``: a recipe, alone or under mpirun or srun."""

from __future__ import annotations

import signal

import click


@click.command("run")
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while it runs.")
def command(recipe: str, overrides: tuple[str, ...], quiet: bool) -> None:
    """Run RECIPE, with single values overridden: hpcfed run r.yaml local.lr=0.03 rounds=50.

    Alone it uses one core or GPU; under mpirun -n P or srun it uses P, with the same result.
    """
    # Outside of training it asks for nothing, and must not end the process: SLURM's may come as the run ends by itself.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from hpcfed.api import run_seeds

    run_seeds(recipe, overrides, quiet=quiet)
