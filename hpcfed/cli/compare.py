"""``hpcfed compare``: where two runs part."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", metavar="RUN RUN", nargs=2, type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file of both.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that both recipes name.")
def command(runs: tuple[Path, Path], data: Path | None, code: Path | None) -> int:
    """Find where two runs part: the first round, its clients, and by replay the first client's step.

    It prints the difference of their recipes, environments and code before. Exit code 0: the same model, bit for bit,
    in all rounds that both have; 1: they part; 2: that cannot be said.
    """
    from hpcfed.provenance.compare import compare

    return compare(runs, data, code, click.echo)
