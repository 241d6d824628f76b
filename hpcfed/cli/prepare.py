"""``hpcfed prepare``: raw data to a federation file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.filesize import decimal

from data_prep import partition, progress
from data_prep.catalogue import SOURCES, listing
from data_prep.coverage import coverage
from data_prep.dataset import Dataset
from data_prep.finish import finish
from data_prep.sources.files import reading
from data_prep.sources.own import TEST
from data_prep.split import NATURAL, NUM_CLIENTS, check_scheme, refuse, split
from data_prep.synthetic import feddyn, fedprox, leaf
from data_prep.tables import standardize
from data_prep.write import check_output, write
from hpcfed.cli.documents import JSON, printer
from hpcfed.cli.documents._parts import federation_facts
from hpcfed.cli.documents.prepare import PrepareDocument
from hpcfed.data.federation import Federation
from hpcfed.data.picture import describe_partition
from hpcfed.data.sites import first_named
from hpcfed.errors import InputError, counted, cut, nearest, visible

NAMES = {"client_column": "client"}
MAX_LISTED = 8
OWN_DATA_HELP = """\b
Own data, by `hpcfed prepare own --raw ...`:
  FOLDER/CLIENT.csv (.tsv, .parquet)  a table a client; FOLDER/test.csv for testing;
                                      text also packed: .csv.gz, .bz2 or .xz
  TABLE.csv --client COLUMN           one table of all clients
  TABLE.csv --partition SCHEME        one table, dealt to clients
  FOLDER/CLIENT.npz                   arrays x and y; or CLIENT.x.npy and CLIENT.y.npy
  FOLDER/CLIENT/CLASS/*.png           images; or FOLDER/CLASS/*.png with --partition
Columns of tables are found by name, in any order; words are one-hot; True and False
are 1 and 0; cells that are empty, NA, NaN, null or ? are missing, others that are by
--missing-codes; separators are , ; tab or |."""


def _list(context: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the origin of each source's files, and exit."""
    if asked:
        for line in listing():
            click.echo(line)
        context.exit()


@click.command(name="prepare", epilog=OWN_DATA_HELP)
@click.argument("source", metavar="SOURCE")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list,
              help="Print all sources: where their files come from, names, sizes and checksums.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The federation file to write.")
@click.option("--raw", type=click.Path(path_type=Path), help="Folder or file with the raw data; see --list.")
@click.option("--partition", "scheme", metavar=f"[{'|'.join([*partition.SCHEMES, NATURAL])}]",
              help="How samples go to clients [default: iid; natural where the source comes split].")  # fmt: skip
@click.option("--clients", type=click.IntRange(min=1),
              help=f"Number of clients [default: {NUM_CLIENTS}; {feddyn.NAME}: 20, {fedprox.NAME}: 30, "
              f"{leaf.NAME}: 1000; natural: all, or so many of them at random].")  # fmt: skip
@click.option("--alpha", type=float,
              help="Concentration of the Dirichlet schemes [default: 0.3; quantity 0.5]; "
              f"{fedprox.NAME}: α [1].")  # fmt: skip
@click.option("--sizes", metavar="[equal|lognormal]", help="Client sizes of iid and dirichlet-client [default: equal].")
@click.option(
    "--sigma", type=float, help="Spread of lognormal sizes: standard deviation of their logarithms [default: 0.3]."
)
@click.option("--shards", type=int, help="Shards of a client in the scheme of that name [default: 2].")
@click.option(
    "--per-client", type=click.IntRange(min=1), help="Classes of a client in the scheme 'classes' [default: 2]."
)
@click.option("--capped", is_flag=True, default=None,
              help="dirichlet-class: a client with n/N samples gets no more, as in NIID-Bench.")  # fmt: skip
@click.option("--min-samples", type=click.IntRange(min=0),
              help="Fewest samples of a client; natural: clients with fewer are left out "
              "[default: 1 for iid and Dirichlet, else none].")  # fmt: skip
@click.option(
    "--test-fraction",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of its samples that each client keeps for its own test set, in place of the common one.",
)
@click.option("--type", type=int,
              help=f"Heterogeneity of {feddyn.NAME}: 0 none, 1 models, 2 features, 3 sizes [default: 0].")  # fmt: skip
@click.option("--gamma", type=float, help=f"Strength of {feddyn.NAME}'s heterogeneity [default: 1.0].")
@click.option("--beta", type=float, help=f"β of {fedprox.NAME}: spread of the clients' features [default: 1].")
@click.option("--iid", is_flag=True, default=None, help=f"{fedprox.NAME} with one law for all clients.")
@click.option("--dimension", type=click.IntRange(min=1),
              help=f"Features of the synthetic sources [default: {feddyn.NAME}: 30, linear-regression: 1000, "
              "others: 60].")  # fmt: skip
@click.option("--classes", type=click.IntRange(min=2),
              help=f"Classes of the same [default: {fedprox.NAME}: 10, others: 5]; letters: the first.")  # fmt: skip
@click.option("--normalization", metavar="[feddyn|fedexp|sites|pooled|own|none]",
              help="As whose code: cifar100 feddyn or fedexp [default: feddyn]; emnist-letters none or feddyn "
              "[default: none]; mnist, fashion-mnist own or none [default: own]; flamby-heart-disease each of its "
              "sites or pooled [default: sites].")  # fmt: skip
@click.option("--crop", type=click.IntRange(min=1),
              help="Samples in a row that each natural client keeps, from a random place; clients with fewer "
              "are left out.")  # fmt: skip
@click.option("--test-crop", type=click.IntRange(min=1), help="The same of each client's own test samples.")
@click.option("--deal", type=click.IntRange(min=1),
              help="Deal the samples of the natural clients that are kept to so many at random.")  # fmt: skip
@click.option("--shuffle", is_flag=True, default=None,
              help="Exchange the samples of all natural clients at random first, as many to each as before: "
              "IID clients.")  # fmt: skip
@click.option("--valid", is_flag=True, default=None, help="cinic10: train on the part 'valid' too.")
@click.option("--incomplete", is_flag=True, default=None,
              help="cifar10, cifar100, flamby-camelyon16: take the files that are there.")  # fmt: skip
@click.option("--first", type=click.IntRange(min=4),
              help="mnist, fashion-mnist: the first so many images to train on; cifar10: and a quarter of that "
              "to test.")  # fmt: skip
@click.option("--interleaved", is_flag=True, default=None,
              help="cifar10: take an image's bytes in threes, as pfl-research's benchmark does.")  # fmt: skip
@click.option("--tiles", type=click.IntRange(min=1),
              help="flamby-camelyon16: tiles of a slide [default: 10000].")  # fmt: skip
@click.option("--task", metavar="[classification|multi-label|regression|survival|next-token]",
              help="What own data are for [default: the first]; survival: --target EVENT,TIME.")  # fmt: skip
@click.option("--target", help="Column of y in own tables, several with commas between "
              "[default: the one named y, target, label, class or outcome].")  # fmt: skip
@click.option("--positive", metavar="LABEL",
              help="Positive one of two classes in own data: class 1, whose ranking average precision measures "
              "[default: the last in order].")  # fmt: skip
@click.option("--client", "--client-column", "client_column", metavar="COLUMN",
              help="Column that names the client, in one own table of all clients.")  # fmt: skip
@click.option("--group", metavar="COLUMN",
              help="Column, or array, of own data that names a sample's patient or other group; of images a regular "
              "expression for it in a file's name ('^[^_]+'); test sets split none.")  # fmt: skip
@click.option("--categorical", metavar="COLUMNS",
              help="Columns of own tables that are one-hot though they hold numbers; words always are.")  # fmt: skip
@click.option("--exclude", metavar="COLUMNS", help="Columns of own tables to leave out, with commas between.")
@click.option("--missing", metavar="[refuse|drop|mean|median]",
              help="Missing values in own data: refuse them, drop their rows, or fill them by the mean or median of "
              "the training rows, categories by their most frequent level [default: refuse].")  # fmt: skip
@click.option("--missing-codes", metavar="CODES",
              help="Further texts and numbers of missing cells in own tables, with commas between, such as "
              "'.,missing,#VALUE!,-999'.")  # fmt: skip
@click.option("--standardize", "scale", metavar="[client|pooled|none]",
              help="Scale features to mean 0 and deviation 1 over the training rows of each client, or of all "
              "[default: none, and a line on columns that look unscaled].")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0),
              help=f"Seed of every random choice [default: 0; {leaf.NAME}: {leaf.SEED}].")  # fmt: skip
@click.option("--name", default="", help="Name of the federation [default: that of the source].")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@JSON
def command(as_json: bool, **options: Any) -> None:
    """Turn raw data into a federation file: the same bytes from the same seed."""
    emit = printer("prepare", asked=as_json)
    written = _prepare(**options)
    if emit is not None:
        emit(written)


def _prepare(
    source: str,
    output: Path,
    raw: Path | None,
    scheme: str | None,
    clients: int | None,
    seed: int | None,
    name: str,
    overwrite: bool,
    scale: str | None,
    **options: Any,
) -> PrepareDocument:
    """Write the file, printing what is read, found and written."""
    said: list[str] = []

    def remark(text: str) -> None:
        said.append(text)
        click.echo(f"         {text}")

    started = time.perf_counter()
    source = source.lower()
    if source not in SOURCES:
        raise InputError(f"unknown source {source!r}", remedy=nearest(source, SOURCES))
    check_scheme(scheme)
    standardize.check_way(scale or standardize.NONE)
    check_output(output, overwrite)
    seed = SOURCES[source].seed if seed is None else seed
    of_source, of_partition = _by_taker(source, options)
    with reading(raw or Path()), progress.shown(_tell):
        dataset = _load(source, raw, seed, clients, {**of_source, "partition": scheme})
    num_test = 0 if dataset.test_x is None else len(dataset.test_x)
    click.echo(f"read     {_what_was_read(dataset, num_test)}")
    for text in dataset.remarks:
        remark(_in_line(text))
    done = split(dataset, scheme, clients, seed, of_partition)
    if done.held is not None and num_test:
        unused = f"its test set ({counted(num_test, 'sample')}) is not used"
        remark(f"{unused}: --test-fraction takes another in its place")
    finished = finish(dataset, done, scale or standardize.NONE)
    for text in (*finished.remarks[len(dataset.remarks) :], *coverage(finished, done)):
        remark(_in_line(text))
    if is_own := source == "own" and finished.features is None and finished.task != "next-token":
        remark(standardize.range_of(finished))
    if scale is None and (finished.features or is_own) and (unscaled := standardize.unscaled(finished, done)):
        remark(unscaled)
    with progress.shown(_tell):
        write(output, finished, **vars(done), name=name, overwrite=overwrite)
    with Federation.open(output) as federation:
        for line in _summary(federation, is_natural=done.partition["scheme"] == NATURAL, is_own=source == "own"):
            if line.startswith(" "):
                said.append(line.strip())
            click.echo(line)
        facts = federation_facts(federation)
    seconds, size = time.perf_counter() - started, output.stat().st_size
    click.echo(f"wrote    {output} ({decimal(size)}) in {seconds:.1f} s")
    return PrepareDocument(facts, source, size, seconds, said)


def _by_taker(source: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that were given: the source's, and those of the partition.

    Of the partition are the number of clients, and alpha where the source takes none.
    """
    given = {key: value for key, value in options.items() if value is not None}
    of_sources = {key for one in SOURCES.values() for key in one.options} - {"clients", "partition"}
    if not SOURCES[source].takes("alpha"):
        of_sources.discard("alpha")
    return {key: given.pop(key) for key in sorted(of_sources) if key in given}, given


def _what_was_read(dataset: Dataset, num_test: int) -> str:
    """Return a source's name and its samples, in words."""
    shape = " × ".join(map(str, dataset.x.shape[1:]))
    tests = f", {num_test:,} in its test set" if num_test else ""
    return f"{dataset.name}: {counted(len(dataset.x), 'sample')} of {shape} {dataset.x.dtype}{tests}"


def _summary(federation: Federation, *, is_natural: bool, is_own: bool) -> Iterator[str]:
    """Yield the lines on a federation as written: its split, clients, test set and content hash."""
    sizes = federation.sizes
    spread = f"{sizes.min():,} to {counted(sizes.max(), 'sample')}, median {np.median(sizes):,.10g}"
    yield f"split    {describe_partition(federation)}"
    yield f"clients  {federation.num_clients:,} with {spread}"
    if empty := first_named(federation, sizes == 0, MAX_LISTED):
        remedy = "; --min-samples 1 leaves such clients out" if is_natural else ""
        yield f"         without a sample to train on: {empty}{remedy}"
    yield f"test     {_tests(federation)}"
    tests = federation.test_offsets
    if tests is not None and (untested := first_named(federation, (np.diff(tests) == 0) & (sizes > 0), MAX_LISTED)):
        yield f"         without a sample to test on: {untested}"
    if not federation.num_test:
        also = f"name one {TEST!r}, or " if is_own else ""
        remedy = f"{also}hold samples of each client back by --test-fraction 0.2"
        yield f"         no test set: runs measure no test loss or accuracy; {remedy}"
    yield f"content  {federation.content}"


def _tell(line: str) -> None:
    """Print a line on progress, which is no result."""
    click.echo(f"         {_in_line(line)}", err=True)


def _in_line(remark: str) -> str:
    """Return a remark in one line, cut; words of tables may have line breaks."""
    return cut(visible("⏎".join(remark.splitlines())))


def _tests(federation: Federation) -> str:
    """Return the number of test samples as written, in words."""
    if not federation.num_test:
        return "no samples"
    if federation.test_offsets is None:
        return f"{counted(federation.num_test, 'sample')} for all clients"
    counts = np.diff(federation.test_offsets)
    return f"{counted(federation.num_test, 'sample')}, {counts.min():,} to {counts.max():,} a client"


def _load(name: str, raw: Path | None, seed: int, clients: int | None, options: dict[str, Any]) -> Dataset:
    source = SOURCES[name]
    if source.takes("raw") and raw is None:
        raise InputError(f"{name} is read from files", remedy="name their folder by --raw; see --list")
    if raw is not None and not source.takes("raw"):
        raise InputError(f"{name} is not read from files", remedy="leave --raw out")
    useless = {key: value for key, value in options.items() if key != "partition" and not source.takes(key)}
    refuse({NAMES.get(key, key): value for key, value in useless.items()}, name)
    arguments = {"raw": raw, "seed": seed, "clients": clients, **options}
    return source.load(**{key: value for key, value in arguments.items() if source.takes(key) and value is not None})
