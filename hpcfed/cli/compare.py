"""``hpcfed compare``: where two runs part."""

from __future__ import annotations

from pathlib import Path

import click

from hpcfed.cli.documents import JSON, printer
from hpcfed.cli.options import asked_on_terminal


@click.command()
@click.argument("runs", metavar="RUN RUN", nargs=2, type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Present place of the federation file of both.")
@click.option("--code", type=click.Path(path_type=Path), help="Present folder of the code that both recipes name.")
@click.option("--run-code", is_flag=True, help="Run the runs' recorded code, and calls of installed packages.")
@JSON
def command(runs: tuple[Path, Path], data: Path | None, code: Path | None, run_code: bool, as_json: bool) -> int:
    """Find where two runs part: the first round, its clients, and by replay the first client's step.

    It prints the difference of their recipes, environments and code before. Exit code 0: the same model, bit for bit,
    in all rounds that both have; 1: they part; 2: that cannot be said.
    """
    from hpcfed.provenance.code_of_rounds import RUN_CODE, Permission
    from hpcfed.provenance.compare import parting

    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        click.echo(text)

    permission = Permission(run_code, None if as_json else asked_on_terminal(), RUN_CODE)
    emit = printer("compare", asked=as_json)
    found = parting(runs, data, code, say, permission)
    if emit is not None:
        from hpcfed.cli.documents.compare import compare_document

        emit(compare_document(runs, found, lines))
    return found.code
