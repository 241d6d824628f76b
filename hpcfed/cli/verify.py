"""``hpcfed verify``: a run folder, checked by its files and by its rounds computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpcfed.cli.documents import JSON, printer
from hpcfed.cli.options import Finite, asked_on_terminal, given


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    help="Rounds to compute again, drawn at random from those that a kept state is near.",
)
@click.option("--all", "every", is_flag=True, help="Compute all rounds again.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the draw; default: a new one, which is printed.")
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that the recipe names.")
@click.option(
    "--signers",
    type=click.Path(path_type=Path),
    help='"Allowed signers" of ssh-keygen: one of them must have signed the certificate.',
)
@click.option(
    "--run-code",
    is_flag=True,
    help="Run code of the user's from the run's own record, where it is nowhere else, and calls of installed packages.",
)
@click.option(
    "--tolerance",
    type=Finite(min=0, min_open=True),
    help="Relative difference of single rounds where this machine computes other bits; default: measured here.",
)
@JSON
def command(rounds: int, every: bool, seed: int | None, run_code: bool, as_json: bool, **asked: Any) -> int:
    """Check that RUN, the folder of a run, is what its recipe gives: alone, or on any number of ranks under mpirun.

    First the files, the data and the signature are compared with the certificate, then rounds are computed again and
    compared with the record, bit for bit. Exit code 0: it is; 1: it differs; 2: that cannot be checked here; 5: what
    was checked is right, but not all can be, or the run is not finished, or this machine computes other bits.
    """
    import secrets

    from hpcfed.errors import InputError
    from hpcfed.provenance.code_of_rounds import RUN_CODE, Permission
    from hpcfed.provenance.verify.verify import Verification, check_count, judged
    from hpcfed.ranks.world import connect

    world = connect()
    check_count(rounds)
    if every and (unread := given("rounds", "seed")):
        raise InputError(f"{' and '.join(unread)} with --all: no round is drawn", remedy="leave one of them out")
    permission = Permission(run_code, None if as_json else asked_on_terminal(), RUN_CODE)
    lines: list[str] = []
    emit = printer("verify", asked=as_json)
    with world.united():
        drawn = world.broadcast(secrets.randbits(32) if seed is None else seed)
        request = Verification(rounds=None if every else rounds, seed=drawn, permission=permission, **asked)

        def say(text: str) -> None:
            if world.is_root:
                lines.append(text)
                click.echo(text)

        if seed is None and not every:
            say(f"rounds are drawn with --seed {drawn}")
        found = judged(request, world, say)
        if emit is not None:
            from hpcfed.cli.documents.verify import verify_document

            draw = None if every else drawn
            world.on_root(lambda: emit(verify_document(request.run, found, draw, world.size, lines)))
        return found.code
