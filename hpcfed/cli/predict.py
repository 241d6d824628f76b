"""``hpcfed predict``: a run's model on the rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("rows", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A CSV file for the predictions [default: printed]."
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--site", help="Name of a client, or else its number, whose scaling, and private parts or personal model, are used."
)
@click.option("--data", type=click.Path(path_type=Path), help="The federation file, if it has moved.")
@click.option("--accept-code", is_flag=True, help="Build the model by your present code, though it has changed.")
@click.option("--run-code", is_flag=True, help="Build the model by the code that the run has recorded.")
def command(output: Path | None, overwrite: bool, **asked: Any) -> None:
    """Predict the rows of a table (.csv, .tsv, .parquet) by the evaluated model of RUN.

    Cells are filled, encoded and scaled by what the federation file records of the run's own training rows.
    """
    from hpcfed.errors import InputError
    from hpcfed.io.atomic import write_whole, writing
    from hpcfed.lab.predict import predict

    rows: Path = asked["rows"]
    if output is not None and output.exists():
        if rows.exists() and output.samefile(rows):
            raise InputError("--output", where=str(output), got="the table of the rows", remedy="name another file")
        if not overwrite:
            raise InputError("exists", where=str(output), remedy="choose another --output, or add --overwrite")
    text = predict(**asked).to_csv(index=False)
    if output is None:
        click.echo(text, nl=False)
        return
    with writing(output):
        write_whole(output, text)
    click.echo(f"wrote {output}")
