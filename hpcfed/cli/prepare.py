"""``hpcfed prepare``: from a source of data to a federation file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from data_prep import partition
from data_prep.dataset import Dataset
from data_prep.sources import digits, idx
from data_prep.streams import stream
from data_prep.synthetic import linear_regression, toy2d
from data_prep.write import write
from hpcfed.data.format import Federation
from hpcfed.data.picture import describe_partition
from hpcfed.errors import InputError, nearest


@dataclass(frozen=True)
class Source:
    """One name a user can type: how its data come about, and whether from a folder of raw files."""

    load: Callable[[Path, int], Dataset]
    raw: bool = False


SOURCES = {
    "mnist": Source(lambda raw, seed: idx.load(raw, idx.MNIST), raw=True),
    "fashion-mnist": Source(lambda raw, seed: idx.load(raw, idx.FASHION_MNIST), raw=True),
    "digits": Source(lambda raw, seed: digits.load(seed)),
    "linear-regression": Source(lambda raw, seed: linear_regression.generate(seed)),
    "toy2d": Source(lambda raw, seed: toy2d.generate()),
}
NUM_CLIENTS = 100


@click.command(name="prepare")
@click.argument("source", metavar=f"[{'|'.join(SOURCES)}]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The federation file to write.")
@click.option("--raw", type=click.Path(path_type=Path), help="Folder with the raw files (mnist, fashion-mnist).")
@click.option("--partition", "scheme", metavar=f"[{'|'.join(partition.SCHEMES)}]",
              help="How samples go to clients [default: iid; natural where the source comes split].")  # fmt: skip
@click.option("--clients", type=click.IntRange(min=1), help=f"Number of clients [default: {NUM_CLIENTS}].")
@click.option("--alpha", type=float, help="Concentration of the Dirichlet schemes [default: 0.3].")
@click.option("--sizes", metavar="[equal|lognormal]", help="Client sizes of iid and dirichlet-client [default: equal].")
@click.option("--sigma", type=float, help="Spread of lognormal sizes [default: 1.0].")
@click.option(
    "--min-samples", type=click.IntRange(min=0), help="Fewest samples of a client in dirichlet-class [default: 1]."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of every random choice.")
@click.option("--name", default="", help="Name of the federation [default: that of the source].")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
def command(
    source: str,
    output: Path,
    raw: Path | None,
    scheme: str | None,
    clients: int | None,
    seed: int,
    name: str,
    overwrite: bool,
    **options: Any,
) -> None:
    """Turn raw data into a federation file: the same bytes from the same seed."""
    started = time.perf_counter()
    dataset = _load(source, raw, seed)
    num_test = 0 if dataset.test_x is None else len(dataset.test_x)
    shape = " × ".join(map(str, dataset.x.shape[1:]))
    click.echo(
        f"read     {dataset.name}: {len(dataset.x):,} samples of {shape} {dataset.x.dtype}, {num_test:,} to test"
    )
    for remark in dataset.remarks:
        click.echo(f"         {remark}")
    given = {key: value for key, value in options.items() if value is not None}
    owner, num_clients, record = _split(dataset, scheme, clients, seed, given)
    write(output, dataset, owner, num_clients, partition=record, name=name, overwrite=overwrite)
    with Federation.open(output) as federation:
        sizes = federation.sizes
        click.echo(f"split    {describe_partition(federation)}")
        click.echo(
            f"clients  {num_clients:,} with {sizes.min():,} to {sizes.max():,} samples, median {np.median(sizes):,.10g}"
        )
        click.echo(f"content  {federation.content}")
    megabytes, seconds = output.stat().st_size / 1e6, time.perf_counter() - started
    click.echo(f"wrote    {output} ({megabytes:.1f} MB) in {seconds:.1f} s")


def _load(source: str, raw: Path | None, seed: int) -> Dataset:
    if source not in SOURCES:
        raise InputError(f"unknown source {source!r}", remedy=nearest(source, SOURCES))
    if SOURCES[source].raw and raw is None:
        raise InputError(f"{source} is read from files", remedy="name their folder by --raw")
    if raw is not None and not SOURCES[source].raw:
        raise InputError(f"{source} is not read from files", remedy="leave --raw out")
    return SOURCES[source].load(raw or Path(), seed)


def _split(
    dataset: Dataset, scheme: str | None, clients: int | None, seed: int, given: dict[str, Any]
) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Return the client of each sample, the number of clients, and the record of how that came about."""
    if scheme is None and dataset.owner is not None:
        _refuse(given if clients is None else {"clients": clients, **given}, f"{dataset.name}, which comes split")
        num_clients = int(dataset.owner.max()) + 1
        return dataset.owner, num_clients, {"scheme": "natural", "clients": num_clients}
    scheme = scheme or "iid"
    if scheme not in partition.SCHEMES:
        raise InputError(f"unknown partition {scheme!r}", remedy=nearest(scheme, partition.SCHEMES))
    if scheme != "iid" and dataset.num_classes is None:
        raise InputError(f"{scheme} needs classes, and {dataset.name} has none", remedy="use --partition iid")
    assign = partition.SCHEMES[scheme]
    settings = partition.options(assign)
    _refuse({key: value for key, value in given.items() if key not in settings}, f"--partition {scheme}")
    settings.update(given)
    if settings.get("sizes") == "equal":
        _refuse({key: value for key, value in given.items() if key == "sigma"}, "--sizes equal")
        del settings["sigma"]
    num_clients = clients or NUM_CLIENTS
    owner = assign(dataset.y, num_clients, stream(seed, f"partition: {scheme}"), **settings)
    return owner, num_clients, {"scheme": scheme, "clients": num_clients, **settings, "seed": seed}


def _refuse(options: dict[str, Any], what: str) -> None:
    """Refuse options that were given and would do nothing: their user believes that they do."""
    if options:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in options)
        raise InputError(f"{names} has no effect with {what}", remedy="leave it out")
