"""Tables in blocks of rows, read by pyarrow: CSV with any usual separator, packed or not, and Parquet.

Text is trimmed and in Unicode's form NFC, and missing cells are nulls, however the file writes them (`MISSING`).
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data_prep.progress import step
from data_prep.sources.files import AGAIN, reading
from data_prep.tables import cells
from hpcfed.errors import InputError, first_of

if TYPE_CHECKING:
    import pyarrow

PACKED: Mapping[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Endings of packed text, and what opens it."""
OF_TEXT = (".csv", ".tsv")
TABLES = (*OF_TEXT, *(f"{text}{packed}" for text in OF_TEXT for packed in PACKED), ".parquet")
SEPARATORS = (",", ";", "\t", "|")
NAN = tuple(map("".join, product(("", "+", "-"), "nN", "aA", "nN")))
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", *NAN, "null", "NULL", "?")
"""Texts of a missing cell; "None" is not among them, as it may be an answer, nor "." and codes such as -999, which are
named by --missing-codes."""
REMEDY_UTF_8 = "save {} as CSV UTF-8"
MOST_NAMED = 20
CACHED = 64
"""Tables of which the first lines are kept."""
BLOCK_BYTES, MOST_BYTES = 8 << 20, 128 << 20
"""Bytes of text per block: usually, and at most, for rows so wide that the usual block would hold few."""
BLOCK_ROWS, BLOCK_IMAGES = 4096, 64
LONGEST_HEADER = 16 << 20


@dataclass(frozen=True)
class Block:
    """Some rows of a table.

    Attributes:
        path: the file.
        start: number of the first row, from 0.
        columns: name → its cells, all columns of one length: text (trimmed), numbers, or other types of Parquet.
        decimal_comma: whether 1,5 is a number: in files whose separator is a semicolon.
    """

    path: Path
    start: int
    columns: dict[str, pyarrow.Array]
    decimal_comma: bool = False

    def place(self, row: int) -> str:
        """Return the place of a row of this block, for messages; a CSV's header is row 1, as in a spreadsheet."""
        return f"{self.path}: row {self.start + row + (1 if is_parquet(self.path) else 2)}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class NotUtf8(InputError):
    """A table's text is in another encoding."""


@contextmanager
def all_encodings_told(paths: Iterable[Path]) -> Iterator[None]:
    """Name all of these tables that are not UTF-8 where one is met, so that they can be saved anew in one go."""
    try:
        yield
    except NotUtf8 as error:
        others = [path for path in paths if not is_parquet(path) and not _is_utf8(path)]
        if len(others) < 2:
            raise
        what, names = f"{len(others)} tables are not UTF-8", first_of([path.name for path in others], MOST_NAMED)
        raise InputError(what, where=str(others[0].parent), got=names, remedy=REMEDY_UTF_8.format("each")) from error


def _is_utf8(path: Path) -> bool:
    try:
        with opened(path) as binary, io.TextIOWrapper(binary, "utf-8") as text:
            while text.read(BLOCK_BYTES):
                pass
    except UnicodeDecodeError:
        return False
    except (OSError, EOFError, zlib.error, lzma.LZMAError):  # told when its turn comes
        return True
    return True


def header(path: Path) -> list[str]:
    """Return the names of a table's columns.

    Raises:
        InputError: the file can't be read or is damaged, or a name is missing or repeated.
    """
    return [*_header(path, _stamp(path))]


@lru_cache(maxsize=CACHED)
def _header(path: Path, _: tuple[int, int]) -> list[str]:
    with _one_line(path):
        if is_parquet(path):
            with _parquet(path) as table:
                names = list(table.schema_arrow.names)
        else:
            names = _split(_heading(path), separator(path))
            _refuse_preamble(path, names)
    names = [cells.composed(name.strip()) for name in names]
    if "" in names:
        remedy = "give it a name, or write the table without its index (pandas: index=False)"
        raise InputError(f"column {names.index('') + 1} has no name", where=str(path), remedy=remedy)
    if len(set(names)) < len(names):
        twice, count = Counter(names).most_common(1)[0]
        what, got = f"the header has {twice!r} {count} times", ", ".join(names)[:80]
        raise InputError(what, where=str(path), expected="a first line of different names", got=got)
    if not names:
        raise InputError("no header", where=str(path), expected="a first line of different names", got="none")
    return names


def _refuse_preamble(path: Path, names: list[str]) -> None:
    """Refuse a first line with fewer cells than the second, such as a title.

    Raises:
        InputError: it is one.
    """
    lines = [line for line in _first_lines(path) if line]
    if len(lines) < 2:
        return
    if lines[0].lower().startswith("sep="):
        what, remedy = "the first line is Excel's, and no header", "remove it: the separator is found without"
        raise InputError(what, where=str(path), expected="names of columns", got=repr(lines[0]), remedy=remedy)
    counts = [len(_split(lines[1], mark)) for mark in SEPARATORS]
    if max(counts) > len(names) and len(names) == 1:
        what, got = "the first line is no header", f"{names[0][:40]!r}, before a row of {max(counts)} cells"
        remedy = "remove what stands before the header"
        raise InputError(what, where=str(path), expected="names of columns", got=got, remedy=remedy)


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes with a file's content, so that its first lines are read once."""
    with _one_line(path):
        state = path.stat()
    if stat.S_ISFIFO(state.st_mode):
        remedy = "save it to a file first: a table is read more than once"
        raise InputError("a pipe", where=str(path), expected="a file", remedy=remedy)
    return state.st_mtime_ns, state.st_size


def opened(path: Path) -> IO[bytes]:
    """Open a table's file, unpacked."""
    unpack = PACKED.get(path.suffix.lower())
    return path.open("rb") if unpack is None else unpack(path)


def _heading(path: Path) -> str:
    """Return the first line of a CSV; refuse one that ends inside quotes."""
    line = _first_lines(path)[0]
    try:
        next(csv.reader([line], delimiter=separator(path), strict=True), None)
    except csv.Error as error:
        if "end of data" not in str(error):
            return line
        what, remedy = "the header has a line break in quotes", "write each name in one line"
        raise InputError(what, where=str(path), got=line[:80], remedy=remedy) from None
    return line


def separator(path: Path) -> str:
    """Return the separator of a CSV: the one that cuts its header into most cells, and its first row into as many."""
    lines = _first_lines(path)

    def cut_by(mark: str) -> tuple[bool, int]:
        counts = [len(_split(line, mark)) for line in lines]
        return counts[0] > 1 and len(set(counts)) == 1, counts[0]

    return max(SEPARATORS, key=cut_by)


def _split(line: str, mark: str) -> list[str]:
    """Return the cells of a line; a line without the mark is one cell, however long."""
    return next(csv.reader([line], delimiter=mark), []) if mark in line else [line.strip('"')]


def blocks(path: Path, codes: tuple[str, ...] = ()) -> Iterator[Block]:
    """Yield a table in blocks, in the order of its rows; cells that are one of the `codes` are missing.

    Raises:
        InputError: the file is not a table or is damaged, or a row has more or fewer cells than the header.
    """
    names, start = header(path), 0
    decimal_comma = not is_parquet(path) and separator(path) == ";"
    for batch in _batches(path, names):
        step(f"reading {path.name}: row {start + 1:,}, {len(names):,} columns")
        with _one_line(path):
            columns = dict(zip(names, _all_plain(batch.columns, codes, decimal_comma), strict=True))
        yield Block(path, start, columns, decimal_comma)
        start += batch.num_rows


def class_names(path: Path, column: str) -> list[str] | None:
    """Return a label column's class names, in order, if Parquet of the datasets hub has them."""
    if not is_parquet(path):
        return None
    with _one_line(path), _parquet(path) as table:
        metadata = (table.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    with suppress(AttributeError, KeyError, TypeError, ValueError, RecursionError):
        names = json.loads(metadata)["info"]["features"][column]["names"]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return [cells.composed(name) for name in names]
    return None


def is_image(values: pyarrow.Array) -> bool:
    """Tell whether a column holds images as the datasets hub writes them: a struct of bytes and path."""
    import pyarrow

    kind = values.type
    return pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and kind.get_field_index("path") >= 0


def _batches(path: Path, names: list[str]) -> Iterator[Any]:
    with _one_line(path):
        if is_parquet(path):
            with _parquet(path) as table:
                heavy = any(not _is_simple(field.type) for field in table.schema_arrow)
                size, rows, claimed = BLOCK_IMAGES if heavy else BLOCK_ROWS, 0, table.metadata.num_rows
                for batch in table.iter_batches(size, use_threads=False):
                    rows += batch.num_rows
                    yield batch
                if rows != claimed:  # pyarrow ends where the pages or the rows of a group end, without a word
                    expected = f"{claimed:,} rows, as its last bytes say"
                    raise InputError("damaged", where=str(path), expected=expected, got=f"{rows:,}", remedy=AGAIN)
            return
        import pyarrow
        from pyarrow import csv as arrow_csv

        size = min(MOST_BYTES, max(BLOCK_BYTES, BLOCK_ROWS * len(_first_lines(path)[-1])))
        places = [str(k) for k in range(len(names))]
        options = {
            "read_options": arrow_csv.ReadOptions(column_names=places, use_threads=False, block_size=size),
            "parse_options": arrow_csv.ParseOptions(delimiter=separator(path), newlines_in_values=True),
            "convert_options": arrow_csv.ConvertOptions(column_types=dict.fromkeys(places, pyarrow.string())),
        }
        with opened(path) as file, arrow_csv.open_csv(file, **options) as reader:  # ends its threads if left early
            header_rows = 1
            for batch in reader:
                yield batch.slice(header_rows)
                header_rows = 0


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with path.open("rb"):  # a file that can't be opened is not a damaged one
        pass
    with parquet.ParquetFile(path, page_checksum_verification=True) as table:
        yield table


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow and the system into errors of one line."""
    import pyarrow

    what = "no Parquet file, or damaged" if is_parquet(path) else "no table of text"
    try:
        with reading(path):
            yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError("packed, and damaged", where=str(path), got=str(error)[:80], remedy=AGAIN) from error
    except (pyarrow.ArrowException, UnicodeDecodeError, csv.Error) as error:
        got = str(error).splitlines()[0].removeprefix("CSV parse error: ")
        if is_parquet(path) and "UTF8" in got:
            remedy = "write its texts in UTF-8"
            raise InputError("texts that are not UTF-8", where=str(path), remedy=remedy) from error
        if "UTF8" in got or isinstance(error, UnicodeDecodeError):
            raise NotUtf8("not UTF-8", where=str(path), got=got[:80], remedy=REMEDY_UTF_8.format("it")) from error
        if ": Expected " in got:  # Row #2: Expected 3 columns, got 2: the row's text
            row, counts = got.split(": Expected ", 1)
            expected, found = counts.split(", got ", 1)
            where = f"{path}: {row.lower().replace('#', '')}"
            raise InputError(
                "cells", where=where, expected=f"{expected}, as in the header", got=found.split(":")[0]
            ) from error
        raise InputError(what, where=str(path), got=got[:80]) from error


def _first_lines(path: Path) -> list[str]:
    """Return the header and, if there is one, the first row.

    Raises:
        InputError: there is no header.
    """
    return [*_read_first_lines(path, _stamp(path))]


@lru_cache(maxsize=CACHED)
def _read_first_lines(path: Path, _: tuple[int, int]) -> tuple[str, ...]:
    lines: list[str] = []
    with _one_line(path), opened(path) as binary, io.TextIOWrapper(binary, "utf-8-sig", newline="") as file:
        while len(lines) < 2 and (line := file.readline(LONGEST_HEADER)):
            if not lines and "\0" in line:
                what, got = "not UTF-8", "a byte 0, as UTF-16 has"
                raise NotUtf8(what, where=str(path), got=got, remedy=REMEDY_UTF_8.format("it"))
            if line.strip():
                lines.append(line.rstrip("\r\n"))
    if not lines:
        raise InputError("no header", where=str(path), expected="a first line of different names", got="an empty file")
    return tuple(lines)


def _all_plain(
    columns: Sequence[pyarrow.Array], codes: tuple[str, ...], decimal_comma: bool
) -> Iterator[pyarrow.Array]:
    """Yield each column as `plain` returns it; columns of text, of which there may be 20,000, all in one call."""
    import pyarrow

    texts = [column for column in columns if column.type == pyarrow.string()]
    joined = plain(pyarrow.concat_arrays(texts), codes, decimal_comma) if texts else None
    place = 0
    for column in columns:
        if joined is not None and column.type == pyarrow.string():
            yield joined.slice(place, len(column))
            place += len(column)
        else:
            yield plain(column, codes)


def plain(values: pyarrow.Array, codes: tuple[str, ...], decimal_comma: bool = False) -> pyarrow.Array:
    """Return text trimmed and in NFC, with nulls for `MISSING` and `codes`; numbers with nulls for NaN; anything else
    as it is. A code that is a number, such as -999, is every number equal to it: -999.0, too.
    """
    import pyarrow
    import pyarrow.compute as pc

    if isinstance(values.type, pyarrow.BaseExtensionType):
        values = values.storage
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    of_codes = [value for code in codes if not cells.is_boolean(code) and (value := cells.number(code)) is not None]
    if str(values.type) == "string_view":
        values = values.cast(pyarrow.string())
    if pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type):
        trimmed = pc.utf8_trim_whitespace(values)
        if not pc.all(pc.string_is_ascii(trimmed)).as_py():
            trimmed = _composed(trimmed)
        absent = pc.is_in(trimmed, value_set=_missing(values.type, codes))
        if floats := [value for value in of_codes if isinstance(value, float)]:
            known = pyarrow.array(floats, "float64")
            absent = pc.or_(absent, pc.is_in(_as_numbers(trimmed, decimal_comma), value_set=known))
        return pc.if_else(absent, pyarrow.scalar(None, values.type), trimmed)
    if pyarrow.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), pyarrow.scalar(None, values.type), values)
    kind = values.type
    if of_codes and pyarrow.types.is_integer(kind):  # as text: float64 has not all numbers of 64 bits
        whole = [str(int(value)) for value in of_codes if isinstance(value, int) or value.is_integer()]
        absent = pc.is_in(pc.cast(values, pyarrow.string()), value_set=pyarrow.array(whole, pyarrow.string()))
        return pc.if_else(absent, pyarrow.scalar(None, kind), values)
    if of_codes and (pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)):
        known = pyarrow.array([float(value) for value in of_codes], "float64")
        absent = pc.is_in(pc.cast(values, pyarrow.float64(), safe=False), value_set=known)
        return pc.if_else(absent, pyarrow.scalar(None, kind), values)
    return values


def _composed(texts: pyarrow.Array) -> pyarrow.Array:
    """Return texts in NFC; `pyarrow.compute.utf8_normalize` leaves them as they are in versions before 26."""
    import pyarrow

    encoded = texts.dictionary_encode()
    different = [cells.composed(text) for text in encoded.dictionary.to_pylist()]
    return pyarrow.array(different, texts.type).take(encoded.indices)


def _as_numbers(texts: pyarrow.Array, decimal_comma: bool) -> pyarrow.Array:
    """Return texts as float64, null for those that are not numbers (`cells.WHOLE_OR_FRACTION`)."""
    import pyarrow
    import pyarrow.compute as pc

    pointed = pc.replace_substring(texts, ",", ".") if decimal_comma else texts
    is_number = pc.match_substring_regex(pointed, cells.WHOLE_OR_FRACTION)
    return pc.cast(pc.if_else(is_number, pointed, pyarrow.scalar(None, texts.type)), pyarrow.float64())


@cache
def _missing(kind: pyarrow.DataType, codes: tuple[str, ...]) -> pyarrow.Array:
    import pyarrow

    return pyarrow.array([*MISSING, *codes], kind)


def _is_simple(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return not (pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def is_parquet(path: Path) -> bool:
    """Tell whether a file is Parquet, by its name."""
    return path.suffix.lower() == ".parquet"
