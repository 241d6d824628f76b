"""``hpcfed prepare``: from a source of data to a federation file."""

from __future__ import annotations

import inspect
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
from data_prep.synthetic import feddyn, leaf, linear_regression, toy2d
from data_prep.write import write
from hpcfed.data.format import Federation
from hpcfed.data.picture import describe_partition
from hpcfed.errors import InputError, nearest


@dataclass(frozen=True)
class Source:
    """One name a user can type.

    Attributes:
        load: makes the data. Its parameters say what it takes: `raw`, the folder of the source's files; `seed`; and, by
            keyword only, options of its own.
        seed: where the user names none.
    """

    load: Callable[..., Dataset]
    seed: int = 0

    def takes(self, what: str) -> bool:
        """Tell whether `load` has a parameter of that name."""
        return what in inspect.signature(self.load).parameters


SOURCES = {
    "mnist": Source(lambda raw: idx.load(raw, idx.MNIST)),
    "fashion-mnist": Source(lambda raw: idx.load(raw, idx.FASHION_MNIST)),
    "digits": Source(digits.load),
    "linear-regression": Source(linear_regression.generate),
    "toy2d": Source(toy2d.generate),
    feddyn.NAME: Source(feddyn.generate),
    leaf.NAME: Source(leaf.generate, seed=leaf.SEED),
}
# The options of sources; all others are those of partitions, but for the number of clients, which is both.
OF_SOURCES = ("type", "gamma", "dimension", "classes")
NUM_CLIENTS = 100


@click.command(name="prepare")
@click.argument("source", metavar=f"[{'|'.join(SOURCES)}]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The federation file to write.")
@click.option("--raw", type=click.Path(path_type=Path), help="Folder with the raw files (mnist, fashion-mnist).")
@click.option("--partition", "scheme", metavar=f"[{'|'.join(partition.SCHEMES)}]",
              help="How samples go to clients [default: iid; natural where the source comes split].")  # fmt: skip
@click.option("--clients", type=click.IntRange(min=1),
              help=f"Number of clients [default: {NUM_CLIENTS}; {feddyn.NAME}: 20, {leaf.NAME}: 1000].")  # fmt: skip
@click.option("--alpha", type=float, help="Concentration of the Dirichlet schemes [default: 0.3].")
@click.option("--sizes", metavar="[equal|lognormal]", help="Client sizes of iid and dirichlet-client [default: equal].")
@click.option("--sigma", type=float, help="Spread of lognormal sizes [default: 1.0].")
@click.option(
    "--min-samples", type=click.IntRange(min=0), help="Fewest samples of a client in dirichlet-class [default: 1]."
)
@click.option("--type", type=int,
              help=f"Heterogeneity of {feddyn.NAME}: 0 none, 1 models, 2 features, 3 sizes [default: 0].")  # fmt: skip
@click.option("--gamma", type=float, help=f"Strength of {feddyn.NAME}'s heterogeneity [default: 1.0].")
@click.option("--dimension", type=click.IntRange(min=1),
              help=f"Features of the synthetic sources [default: {feddyn.NAME}: 30, {leaf.NAME}: 60].")  # fmt: skip
@click.option("--classes", type=click.IntRange(min=2), help="Classes of the same [default: 5].")
@click.option("--seed", type=click.IntRange(min=0),
              help=f"Seed of every random choice [default: 0; {leaf.NAME}: {leaf.SEED}].")  # fmt: skip
@click.option("--name", default="", help="Name of the federation [default: that of the source].")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
def command(
    source: str,
    output: Path,
    raw: Path | None,
    scheme: str | None,
    clients: int | None,
    seed: int | None,
    name: str,
    overwrite: bool,
    **options: Any,
) -> None:
    """Turn raw data into a federation file: the same bytes from the same seed."""
    started = time.perf_counter()
    if source not in SOURCES:
        raise InputError(f"unknown source {source!r}", remedy=nearest(source, SOURCES))
    seed = SOURCES[source].seed if seed is None else seed
    given = {key: value for key, value in options.items() if value is not None}
    of_source = {key: given.pop(key) for key in OF_SOURCES if key in given}
    dataset = _load(source, raw, seed, clients, of_source)
    num_test = 0 if dataset.test_x is None else len(dataset.test_x)
    shape = " × ".join(map(str, dataset.x.shape[1:]))
    click.echo(
        f"read     {dataset.name}: {len(dataset.x):,} samples of {shape} {dataset.x.dtype}, {num_test:,} to test"
    )
    for remark in dataset.remarks:
        click.echo(f"         {remark}")
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


def _load(name: str, raw: Path | None, seed: int, clients: int | None, options: dict[str, Any]) -> Dataset:
    source = SOURCES[name]
    if source.takes("raw") and raw is None:
        raise InputError(f"{name} is read from files", remedy="name their folder by --raw")
    if raw is not None and not source.takes("raw"):
        raise InputError(f"{name} is not read from files", remedy="leave --raw out")
    _refuse({key: value for key, value in options.items() if not source.takes(key)}, name)
    arguments = {"raw": raw, "seed": seed, "clients": clients, **options}
    return source.load(**{key: value for key, value in arguments.items() if source.takes(key) and value is not None})


def _split(
    dataset: Dataset, scheme: str | None, clients: int | None, seed: int, given: dict[str, Any]
) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Return the client of each sample, the number of clients, and the record of how that came about."""
    if scheme is None and dataset.owner is not None:
        num_clients = int(dataset.owner.max()) + 1
        asked = {} if clients in (None, num_clients) else {"clients": clients}
        _refuse({**asked, **given}, f"{dataset.name}, which comes split")
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
