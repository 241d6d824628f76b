"""``hpcfed vectors``: small trajectories of every method, written or checked."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--check", is_flag=True, help="Compare FILE, of hpcfed or of another framework, with what is computed here."
)
def command(file: Path, check: bool) -> int:
    """Write small trajectories of every method to FILE, as JSON: problem, cohorts, minibatches, w after each round.

    With --check compare a file with them: exit code 1 if a trajectory is farther than 1e-12, relative.
    """
    import json

    from hpcfed.io.atomic import write_whole, writing
    from hpcfed.provenance.vectors.check import agreements
    from hpcfed.provenance.vectors.trajectory import vectors

    if not check:
        content = vectors()
        with writing(file):
            write_whole(file, json.dumps(content) + "\n")
        click.echo(f"{file}: {len(content['methods'])} methods, {len(content['cases'])} cases")
        return 0
    found = list(agreements(file))
    for one in found:
        where = f", in round {one.round}" if one.round else ""
        click.echo(f"{one.method}: {'agrees' if one.holds else 'differs'} ({one.difference:.1e}{where})")
    return 0 if all(one.holds for one in found) else 1
