"""``hpcfed inspect``: the contents of a federation file, as tables and as a picture of clients × classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from rich.table import Table

from hpcfed.cli.documents import JSON, printer
from hpcfed.cli.documents.inspect import inspect_document
from hpcfed.data.content import content_hash
from hpcfed.data.federation import Federation
from hpcfed.data.picture import (
    check_picture,
    classes_for_share,
    describe_partition,
    save_figure,
    text_heat_map,
)
from hpcfed.data.sites import (
    LARGE,
    MOST_LABELS,
    MOST_SITES,
    Labels,
    absences,
    feature_names,
    first_named,
    labels_of,
    mean_differences,
    missing_shares,
    site_names,
    target_statistics,
)
from hpcfed.data.skew import skew_of
from hpcfed.data.storage import open_hdf5
from hpcfed.errors import EnvironmentFailure, InputError, counted, first_of
from hpcfed.io.console import PIPED_WIDTH, Console

MAX_LISTED = 12
MOST_CLASSES = 100


@click.command(name="inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Also draw classes, sizes and samples into this PNG, PDF or SVG.",
)
@click.option("--verify", is_flag=True, help="Read all data and compare its hash with the one the file names.")
@JSON
def command(file: Path, picture: Path | None, verify: bool, as_json: bool) -> None:
    """Show the contents of a federation file: clients, samples, classes, sizes, provenance."""
    check_picture(picture)
    emit = printer("inspect", asked=as_json)
    with Federation.open(file) as federation:
        labels = labels_of(federation)
        if picture is not None:
            _draw(federation, labels, picture)
        if emit is None:
            _show(federation, labels, picture, verify=verify)
            return
        if verify:
            _verified(federation)
        verified = True if verify and federation.content else None
        emit(inspect_document(federation, labels, picture, verified=verified))


def _show(federation: Federation, labels: Labels | None, picture: Path | None, *, verify: bool) -> None:
    """Print the tables, and the verdict on the content hash if it is to be verified."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    targets = target_statistics(federation)
    console.print(_facts(federation, labels, targets))
    if verify:
        console.print(_verified(federation))
    few = 1 < federation.num_clients <= MOST_SITES
    if few:
        console.print(_sites(federation, labels, targets))
    if labels is not None and not _listed(federation, labels):
        for line in text_heat_map(labels.counts, site_names(federation), labels.names):
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    for absence in absences(federation, labels) if labels is not None else ():
        console.print(absence, soft_wrap=True)
    for table, note in (*_missing(federation), *_shifts(federation)) if few else ():
        console.print(table)
        console.print(note, soft_wrap=True)
    if picture is not None:
        console.print(f"picture: {picture}", soft_wrap=True)


def _listed(federation: Federation, labels: Labels | None) -> bool:
    """Whether the table of sites has the share of each label."""
    return labels is not None and federation.num_clients <= MOST_SITES and len(labels.names) <= MOST_LABELS


def _sites(federation: Federation, labels: Labels | None, targets: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of sites: samples, the share of each label among those to train on, statistics of targets."""
    table = Table(title="Sites", title_justify="left", box=None)
    table.add_column("client", overflow="fold")
    tests = None if federation.test_offsets is None else np.diff(federation.test_offsets)
    shown = labels if labels is not None and _listed(federation, labels) else None
    for name in ("train", *(("test",) if tests is not None else ()), *(shown.names if shown else ()), *targets):
        table.add_column(name, justify="right", overflow="fold")
    for k, name in enumerate(site_names(federation)):
        row = [name, f"{federation.sizes[k]:,}"] + ([] if tests is None else [f"{tests[k]:,}"])
        if shown is not None:
            row += [f"{100 * count / max(federation.sizes[k], 1):.0f} %" if count else "–" for count in shown.counts[k]]
        table.add_row(*row, *(values[1 + k] for values in targets.values()))
    return table


def _by_site(title: str, federation: Federation) -> Table:
    """Return a table without rows: features by site."""
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("feature", overflow="fold")
    for name in site_names(federation):
        table.add_column(name, justify="right", overflow="fold")
    return table


def _missing(federation: Federation) -> Iterator[tuple[Table, str]]:
    """Yield the table of the columns with most missing values at a site, and a line on it; nothing without any."""
    shares = missing_shares(federation)
    if not shares:
        return
    table = _by_site("Missing values", federation)
    for column in sorted(shares, key=lambda column: -shares[column].max())[:MAX_LISTED]:
        table.add_row(column, *map(_percent, shares[column].tolist()))
    more = f"; {len(shares) - MAX_LISTED:,} more columns have some" if len(shares) > MAX_LISTED else ""
    yield table, f"of a site's training samples; they have been filled{more}"


def _percent(share: float) -> str:
    """Return a share in percent; only 0 is –, and only 1 is 100 %."""
    if 0 < share < 0.01 or 0.99 < share < 1:
        return "< 1 %" if share < 0.01 else "> 99 %"
    return f"{100 * share:.0f} %" if share else "–"


def _shifts(federation: Federation) -> Iterator[tuple[Table, str]]:
    """Yield the table of the features that differ most between sites, and a line on it; nothing without features."""
    found = mean_differences(federation)
    if found is None:
        return
    largest = np.nan_to_num(np.abs(found), nan=0.0).max(axis=0)
    order = np.argsort(-largest, kind="stable")[:MAX_LISTED]
    table, names = _by_site("Standardised mean differences", federation), feature_names(federation)
    for feature in order.tolist():
        cells = (f"{value:+.2f}".replace("-", "−") if np.isfinite(value) else "–" for value in found[:, feature])
        table.add_row(names[feature], *cells)
    large = int((largest >= LARGE).sum())
    line = f"of a site's training samples from all others'; from {LARGE} large: {large} of {len(largest)} features"
    yield table, line if federation.filled("train") is None else f"{line}; filled cells are left out"


def _facts(federation: Federation, labels: Labels | None, targets: Mapping[str, Sequence[str]]) -> Table:
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
        empty = counted((sizes == 0).sum(), "client")
        table.add_row("", f"{empty} without samples: {first_named(federation, sizes == 0, MAX_LISTED)}")
    if federation.num_classes is not None:
        table.add_row("classes", f"{federation.num_classes:,}")
    if labels is not None and federation.task == "classification":
        spread = classes_for_share(labels.counts[sizes > 0]).mean() if sizes.any() else 0.0
        table.add_row("", f"80 % of a client's samples lie in {spread:.2f} classes on average")
    if labels is not None:
        totals = zip(labels.names, labels.counts.sum(axis=0), strict=True)
        named = labels.names != [str(k) for k in range(len(labels.names))]
        each = [f"{name} {n:,}" if named else f"{n:,}" for name, n in totals]
        more = f" and {len(each) - MOST_CLASSES:,} more" if len(each) > MOST_CLASSES else ""
        table.add_row("per class", (", " if named else " ").join(each[:MOST_CLASSES]) + more)
    if federation.num_clients > 1:
        table.add_row("skew", str(skew_of(sizes, None if labels is None else labels.counts)))
    for name, values in targets.items():
        table.add_row("target", f"{name}: {values[0]}")
    if federation.features is not None:
        table.add_row("features", first_of(federation.features, MAX_LISTED))
    table.add_row("x", f"{federation.x_dtype} {_shape(federation.feature_shape)}")
    table.add_row("y", f"{federation.y_dtype} {_shape(federation.target_shape)}")
    if federation.normalization is not None:
        mean, std = (_few(values) for values in vars(federation.normalization).values())
        table.add_row("normalization", f"mean {mean}, std {std}")
    table.add_row("partition", describe_partition(federation))
    for key, value in federation.source.items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries[:MAX_LISTED]:
            text = ", ".join(f"{k} {v}" for k, v in entry.items()) if isinstance(entry, dict) else str(entry)
            table.add_row(f"source {key}", text)
        if len(entries) > MAX_LISTED:
            table.add_row(f"source {key}", f"and {len(entries) - MAX_LISTED:,} more")
    table.add_row("content", federation.content or "not recorded")
    return table


def _few(values: Sequence[float]) -> str:
    more = f" and {len(values) - MAX_LISTED} more" if len(values) > MAX_LISTED else ""
    return " ".join(f"{v:g}" for v in values[:MAX_LISTED]) + more


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def _verified(federation: Federation) -> str:
    """Return the verdict on the content hash.

    Raises:
        InputError: the data have changed since the file was written.
    """
    with open_hdf5(federation.path) as file:
        found = content_hash(file)
    if federation.content and found != federation.content:
        what = "the data changed since the file was written"
        remedy = "copy or prepare it again"
        raise InputError(what, where=str(federation.path), expected=federation.content, got=found, remedy=remedy)
    return "verified: the data have this hash" if federation.content else f"the data have the hash {found}"


def _draw(federation: Federation, labels: Labels | None, picture: Path) -> None:
    """Draw the picture.

    Raises:
        InputError: the place cannot be written.
        EnvironmentFailure: the disk is full or failed.
    """
    try:
        save_figure(federation, labels, picture)
    except OSError as error:
        is_place = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError)
        what, remedy = f"can't write the picture ({error.strerror})", "choose another place"
        raise (InputError if is_place else EnvironmentFailure)(what, where=str(picture), remedy=remedy) from error
