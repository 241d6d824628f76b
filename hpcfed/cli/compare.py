"""``hpcfed compare``: where two runs part."""

from __future__ import annotations

from pathlib import Path

import click

from hpcfed.cli.options import asked_on_terminal


@click.command()
@click.argument("runs", metavar="RUN RUN", nargs=2, type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file of both.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that both recipes name.")
@click.option("--run-code", is_flag=True, help="Run code of the user's from the runs' own records.")
def command(runs: tuple[Path, Path], data: Path | None, code: Path | None, run_code: bool) -> int:
    """Find where two runs part: the first round, its clients, and by replay the first client's step.

    It prints the difference of their recipes, environments and code before. Exit code 0: the same model, bit for bit,
    in all rounds that both have; 1: they part; 2: that cannot be said.
    """
    from hpcfed.provenance.code_of_rounds import RUN_CODE, Permission
    from hpcfed.provenance.compare import compare

    return compare(runs, data, code, click.echo, Permission(run_code, asked_on_terminal(), RUN_CODE))
