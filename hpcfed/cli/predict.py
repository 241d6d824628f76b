"""``hpcfed predict``: a run's model on the rows of a table."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("rows", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A CSV file for the predictions [default: printed]."
)
@click.option("--site", help="Name of a client, or else its number, whose scaling and private parts are used.")
@click.option("--data", type=click.Path(path_type=Path), help="The federation file, if it has moved.")
@click.option("--accept-code", is_flag=True, help="Build the model by your present code, though it has changed.")
@click.option("--run-code", is_flag=True, help="Build the model by the code that the run has recorded.")
def command(
    run: Path, rows: Path, output: Path | None, site: str | None, data: Path | None, accept_code: bool, run_code: bool
) -> None:
    """Predict the rows of a table (.csv, .tsv, .parquet) by the evaluated model of RUN.

    Cells are filled, encoded and scaled by what the federation file records of the run's own training rows.
    """
    from hpcfed.errors import EnvironmentFailure
    from hpcfed.io.atomic import write_whole
    from hpcfed.lab.predict import predict

    text = predict(run, rows, site=site, data=data, accept_code=accept_code, run_code=run_code).to_csv(index=False)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        write_whole(output, text)
    except OSError as error:
        raise EnvironmentFailure("cannot be written", where=str(output), got=error.strerror or str(error)) from error
    click.echo(f"wrote {output}")
