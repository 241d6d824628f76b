"""Tables of numbers with a header: CSV, or Parquet where pyarrow is installed, read a block of rows at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.errors import InputError, nearest

TABLES = (".csv", ".parquet")
BLOCK_ROWS = 4096
MOST_NAMES = 100_000
"""Distinct classes; more are taken for a target that is no class."""
Block = dict[str, np.ndarray]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are: `targets` are y, `client` names the client, all others are x."""

    targets: tuple[str, ...]
    client: str | None = None


def blocks(path: Path) -> Iterator[Block]:
    """Yield a table in pieces: column → values (m,), text as it stands in a CSV.

    Raises:
        InputError: the file is damaged, or pyarrow is needed and absent.
    """
    try:
        yield from _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except OSError as error:  # pyarrow reports damage as OSError, too
        raise InputError("can't be read", where=str(path), got=(error.strerror or str(error))[:80]) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError("no table of text", where=str(path), got=str(error)[:80]) from error


def columns_of(paths: Sequence[Path], target: str | None, client: str | None) -> Columns:
    """Return the roles of columns, which all tables share: the target is ``y`` or else the last column by default.

    Raises:
        InputError: a column that was named is not there, or tables differ.
    """
    headers = {path: list(next(blocks(path))) for path in paths}
    first, names = next(iter(headers.items()))
    for path, header in headers.items():
        if header != names:
            expected, got = f"the columns of {first.name}", ", ".join(header)[:80]
            raise InputError("other columns", where=str(path), expected=expected, got=got)
    default = "y" if "y" in names else next((name for name in reversed(names) if name != client), "")
    targets = tuple(target.split(",")) if target else (default,)
    for name in (*targets, *([client] if client else [])):
        if name not in names:
            raise InputError(f"no column {name!r}", where=str(first), remedy=nearest(name, names))
    return Columns(targets, client)


def class_names(paths: Iterable[Path], columns: Columns) -> list[str] | None:
    """Return the classes' names in order, or None where labels are numbers.

    Raises:
        InputError: there are more than classes can be.
    """
    found: set[str] = set()
    for path in paths:
        for block in blocks(path):
            found.update(map(str, block[columns.targets[0]].tolist()))
            if len(found) > MOST_NAMES:
                what = f"more than {MOST_NAMES:,} classes in column {columns.targets[0]!r}"
                raise InputError(what, where=str(path), remedy="use --task regression, or name another --target")
    return None if all(_is_whole(name) for name in found) else sorted(found)


def samples(path: Path, block: Block, columns: Columns, classes: list[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return x (m, columns) float32 and y: labels (m,) int64 by `classes`, or targets (m,) or (m, targets) as numbers.

    Raises:
        InputError: a value that is no number.
    """
    features = [name for name in block if name not in (*columns.targets, columns.client)]
    if not features:
        raise InputError("no column is left for x", where=str(path), got=", ".join(block))
    x = np.stack([_numbers(path, name, block[name]) for name in features], axis=1).astype(np.float32)
    if classes is not None:
        number = {name: k for k, name in enumerate(classes)}
        return x, np.array([number[str(value)] for value in block[columns.targets[0]].tolist()], np.int64)
    y = np.stack([_numbers(path, name, block[name]) for name in columns.targets], axis=1)
    return x, y[:, 0] if len(columns.targets) == 1 else y


def _csv(path: Path) -> Iterator[Block]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        if not header or len(set(header)) < len(header):
            got = ", ".join(header)[:80] or "none"
            raise InputError("no header", where=str(path), expected="a first line of different names", got=got)
        rows: list[list[str]] = []
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                where = f"{path}:{reader.line_num}"
                raise InputError("columns", where=where, expected=str(len(header)), got=str(len(row)))
            rows.append(row)
            if len(rows) == BLOCK_ROWS:
                yield dict(zip(header, np.array(rows).T, strict=True))
                rows = []
        values = np.array(rows).T if rows else np.empty((len(header), 0), "U1")
        yield dict(zip(header, values, strict=True))


def _parquet(path: Path) -> Iterator[Block]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise InputError("Parquet needs pyarrow", where=str(path), remedy="pip install 'hpcfed[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            yield {name: np.empty(0) for name in names}
            for batch in table.iter_batches(BLOCK_ROWS):
                yield {name: column.to_numpy(zero_copy_only=False) for name, column in zip(names, batch, strict=True)}
    except pyarrow.ArrowException as error:
        raise InputError("no Parquet file, or damaged", where=str(path), got=str(error)[:80]) from error


def _numbers(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError) as error:
        remedy = "give numbers, or drop the column"
        raise InputError(
            f"column {name!r}", where=str(path), expected="numbers", got=str(error), remedy=remedy
        ) from error


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return False
