"""``hpcfed cite``: BibTeX of a run's method, data, model and software."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Print BibTeX for exactly what RUN used: method, guess, data set, partition, model, and hpcfed itself."""
    from hpcfed.lab.cite import bibtex

    click.echo(bibtex(run))
