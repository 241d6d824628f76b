"""``hpcfed inspect``: the contents of a federation file, as tables and as a picture of clients × classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import h5py
import numpy as np
from rich.table import Table

from hpcfed.data.content import content_hash
from hpcfed.data.federation import Federation
from hpcfed.data.picture import (
    FIGURE_TYPES,
    class_counts,
    classes_for_share,
    describe_partition,
    save_figure,
    text_heat_map,
)
from hpcfed.errors import InputError
from hpcfed.io.console import Console

PIPED_WIDTH = 120
FEW = 12


@click.command(name="inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Also draw classes, sizes and samples into this PNG, PDF or SVG.",
)
@click.option("--verify", is_flag=True, help="Read all data and compare its hash with the one the file names.")
def command(file: Path, picture: Path | None, verify: bool) -> None:
    """Show the contents of a federation file: clients, samples, classes, sizes, provenance."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    if picture is not None and picture.suffix not in FIGURE_TYPES:
        got = picture.suffix or "no ending"
        raise InputError("unknown type of picture", where=str(picture), expected=", ".join(FIGURE_TYPES), got=got)
    with Federation.open(file) as federation:
        counts = class_counts(federation) if federation.task == "classification" else None
        if picture is not None:
            _draw(federation, counts, picture)
        console.print(_facts(federation, counts))
        if verify:
            console.print(_verified(federation))
        if counts is not None:
            for line in text_heat_map(counts):
                console.print(line, no_wrap=True, overflow="ignore", crop=False)
        if picture is not None:
            console.print(f"picture: {picture}", soft_wrap=True)


def _facts(federation: Federation, counts: np.ndarray | None) -> Table:
    """Return the table of the file's properties."""
    sizes = federation.sizes
    table = Table(title=f"{federation.name} ({federation.path})", show_header=False, title_justify="left", box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("task", federation.task)
    table.add_row("clients", f"{federation.num_clients:,}")
    table.add_row("samples", f"{federation.num_samples:,} to train on, {federation.num_test:,} in the test set")
    table.add_row("sizes", f"min {sizes.min():,}, median {np.median(sizes):,.10g}, max {sizes.max():,}")
    if (sizes == 0).any():
        empty = np.flatnonzero(sizes == 0)
        names = ", ".join(federation.client_name(k) for k in empty[:FEW].tolist())
        more = f" and {len(empty) - FEW:,} more" if len(empty) > FEW else ""
        table.add_row("", f"{len(empty):,} clients without samples: {names}{more}")
    if federation.num_classes is not None:
        table.add_row("classes", f"{federation.num_classes:,}")
    if counts is not None:
        spread = classes_for_share(counts[sizes > 0]).mean() if sizes.any() else 0.0
        table.add_row("", f"80 % of a client's samples lie in {spread:.2f} classes on average")
        table.add_row("per class", " ".join(f"{total:,}" for total in counts.sum(axis=0)))
    table.add_row("x", f"{federation.x_dtype} {_shape(federation.feature_shape)}")
    table.add_row("y", f"{federation.y_dtype} {_shape(federation.target_shape)}")
    if federation.normalization is not None:
        mean, std = (_few(values) for values in vars(federation.normalization).values())
        table.add_row("normalization", f"mean {mean}, std {std}")
    table.add_row("partition", describe_partition(federation))
    for key, value in federation.source.items():
        for entry in value if isinstance(value, list) else [value]:
            text = ", ".join(f"{k} {v}" for k, v in entry.items()) if isinstance(entry, dict) else str(entry)
            table.add_row(f"source {key}", text)
    table.add_row("content", federation.content or "not recorded")
    return table


def _few(values: Sequence[float]) -> str:
    more = f" and {len(values) - FEW} more" if len(values) > FEW else ""
    return " ".join(f"{v:g}" for v in values[:FEW]) + more


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def _verified(federation: Federation) -> str:
    """Return the verdict on the content hash.

    Raises:
        InputError: the data have changed since the file was written.
    """
    with h5py.File(federation.path, "r", locking=False) as file:
        found = content_hash(file)
    if federation.content and found != federation.content:
        what = "the data changed since the file was written"
        remedy = "copy or prepare it again"
        raise InputError(what, where=str(federation.path), expected=federation.content, got=found, remedy=remedy)
    return "verified: the data have this hash" if federation.content else f"the data have the hash {found}"


def _draw(federation: Federation, counts: np.ndarray | None, picture: Path) -> None:
    try:
        save_figure(federation, counts, picture)
    except OSError as error:
        what = f"can't write the picture ({error.strerror})"
        raise InputError(what, where=str(picture), remedy="choose another place") from error
