"""``hpcfed export``: a trained model for other programs, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

KINDS = ("safetensors", "state_dict", "torchscript")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True,
              help="Tensors by name; the same by torch.save; or a traced module.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="The model's file [default: the run's name]; its card and .input.json go beside it.")  # fmt: skip
@click.option(
    "--site", help="Name of a client, or else its number, whose private parts, or personal model, are exported."
)
@click.option("--data", type=click.Path(path_type=Path), help="The federation file, if it has moved.")
@click.option("--accept-code", is_flag=True, help="Build the model by your present code, though it has changed.")
@click.option("--run-code", is_flag=True, help="Build the model by the code that the run has recorded.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def command(**asked: Any) -> None:
    """Write the evaluated model of RUN as one file, and beside it a model card and how its input is prepared.

    The card (.md) has data, sites with sizes and metrics, method, recipe, digests, certificate and references. The
    preparation (.input.json) has the features in their order, categories, fill values, means and deviations, classes.
    """
    from hpcfed.lab.export import export

    for path in export(**asked):
        click.echo(f"wrote {path}")
