"""``hpcfed without``: a run as it would have been without some clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command("without")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--client", "clients", multiple=True, required=True, help="Name of a client, or else its number; repeatable."
)
@click.option(
    "--cohorts",
    type=click.Choice(["empty", "redrawn"]),
    help="Leave its places in the drawn cohorts empty (default), or draw among the others.",
)
@click.option(
    "--evaluate",
    type=click.Choice(["others", "all"]),
    help="Evaluate on the others' data, its test set apart (default), or on all clients' as the run did.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the new run. Default: RUN-without-CLIENT.")
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that the recipe names.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while it runs.")
def command(quiet: bool, **asked: Any) -> None:
    """Run RUN, the folder of a run, as if a client had never taken part: alone, or on any number of ranks.

    The others keep their numbers, the initial model and their random streams; weights and N are theirs alone. It
    begins from the last kept state before the first round that is another. After a kill the same command goes on.
    """
    from hpcfed.lab.whatif.without import WithoutRequest, run_without
    from hpcfed.ranks.world import connect

    run_without(WithoutRequest(**asked), connect(), lambda text: None if quiet else click.echo(text), quiet=quiet)
