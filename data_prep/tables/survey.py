"""First pass over tables: types, distinct values and missing cells of each column."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.tables import cells
from data_prep.tables.columns import ColumnOptions, ColumnRoles
from data_prep.tables.read import Block, blocks, is_image, is_parquet, separator
from hpcfed.errors import InputError

if TYPE_CHECKING:
    import pyarrow

MOST_LEVELS, MOST_CHOSEN, MOST_CLASSES = 100, 10_000, 100_000
"""Most distinct values of a column of words, of one named by --categorical, and of labels."""
MANY_NUMBERS = 20
"""Distinct fractional labels above which a column is taken for the target of a regression."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
CODES = frozenset(
    [".", "-", "--", "missing", "Missing", "MISSING", "unknown", "n.a.", "None", "none", "#VALUE!", "#DIV/0!", "#REF!"]
)
"""Words that may stand for a missing cell among numbers."""
SENTINELS = (-9, -99, -999, -9999, -99999)
"""Numbers that stand for a missing cell in many tables."""
COARSE = 1e-4
"""Share of a column's range above which the rounding of its numbers to float32 is told."""


@dataclass
class ColumnFacts:
    """Contents of one column, over all files.

    Attributes:
        missing: number of missing cells, of which `missing_test` are in test sets; `absent` is the place of the first.
        number, boolean: whether any cell is a number, or true or false.
        word: the place and text of the first cell that is neither.
        whole: whether all numbers are whole.
        levels: distinct cells of columns of words or names, as text → their number; None for words in any file.
        commas: files in which a cell has a comma as its decimal point.
        points: file → the first cell there that is a number of thousands or a fraction, where commas are decimal.
        thousands: file of decimal commas → a cell that may be thousands, if all cells there with a point or comma may
            be; "" if others have fewer or more digits behind it.
        truth: place and text of the first cell that is true or false.
        image: whether the column holds images.
        strange: type of a column that is neither numbers, text nor images; "" for these. `strange_in` is the first file
            in which it is that.
        infinite: place of the first number that is not a finite float32; "" for none.
        low, high: the least and the largest number.
        coded: number of cells with one of `SENTINELS`; `low_else` is the least of the other numbers.
        rounding: the largest difference between a number and its float32.
    """

    missing: int = 0
    missing_test: int = 0
    absent: str = ""
    number: bool = False
    boolean: bool = False
    whole: bool = True
    word: tuple[str, str] | None = None
    levels: dict[str, float | None] = field(default_factory=dict)
    commas: set[Path] = field(default_factory=set)
    points: dict[Path, str] = field(default_factory=dict)
    thousands: dict[Path, str] = field(default_factory=dict)
    truth: tuple[str, str] | None = None
    image: bool = False
    strange: str = ""
    strange_in: str = ""
    infinite: str = ""
    low: float = math.inf
    high: float = -math.inf
    coded: Counter[int] = field(default_factory=Counter)
    low_else: float = math.inf
    rounding: float = 0.0

    @property
    def odd_truth(self) -> tuple[str, str] | None:
        """The place and text of a cell that is true or false, among numbers other than 0 and 1; None for none."""
        return self.truth if not self.whole or self.low < 0 or self.high > 1 else None

    @property
    def is_coarse(self) -> bool:
        """Whether float32 blurs the differences between the numbers, as those of times in seconds since 1970."""
        return self.high > self.low and self.rounding > COARSE * (self.high - self.low)


@dataclass(frozen=True)
class Feature:
    """A column of x: numbers, or names in `levels`, encoded one-hot."""

    column: str
    levels: tuple[str, ...] = ()
    codes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Survey:
    """Contents of all tables.

    Attributes:
        facts: column → its contents, for the columns that have a role.
        rows: number of rows of all tables, of which `test_rows` are in test sets.
        comma: the first file with a comma read as the decimal point, "" for none.
        first: the first file that has a row, None for none.
        swallowed: the place of the first cell with line breaks and as many separators as whole rows have, "" for none.
    """

    facts: dict[str, ColumnFacts]
    rows: int
    comma: str
    test_rows: int = 0
    first: Path | None = None
    swallowed: str = ""


def survey(paths: Iterable[Path], roles: ColumnRoles, options: ColumnOptions, tests: Collection[Path] = ()) -> Survey:
    """Read all tables once; `tests` are those of test sets.

    Raises:
        InputError: as `read.blocks`; or a column of names has too many distinct values; or 1.234 among decimal commas.
    """
    labels = roles.targets if options.task == "classification" else ()
    limits = {
        **dict.fromkeys(options.categorical, MOST_CHOSEN),
        **dict.fromkeys(labels, MOST_CLASSES),
        **{name: 1 << 62 for name in (roles.client, roles.group) if name is not None},
    }
    facts = {name: ColumnFacts() for name in (*roles.features, *roles.targets, *limits)}
    rows = test_rows = 0
    first: Path | None = None
    swallowed = ""
    for path in paths:
        for block in blocks(path, options.missing_codes):
            rows += len(block)
            swallowed = swallowed or _swallowed(block)
            first = first or (path if len(block) else None)
            test_rows += len(block) * (path in tests)
            for name, found in facts.items():
                _look(found, block, name, limits.get(name))
                found.missing_test += block.columns[name].null_count * (path in tests)
                if block.decimal_comma and name not in (roles.client, roles.group):
                    _note_commas(found, block, name)
    named = (*labels, *options.categorical)
    words = [name for name in named if None in facts[name].levels.values()]
    numbers = [facts[name] for name in (*roles.features, *roles.targets) if name not in words]
    with_comma = [path for path in paths if any(path in found.commas for found in numbers)]
    for path in with_comma:
        if point := next((found.points[path] for found in numbers if path in found.points), ""):
            remedy = "write it without the point, or with a comma"
            raise InputError(f"{point}: thousands or a fraction? Other cells have decimal commas", remedy=remedy)
    return Survey(facts, rows, with_comma[0].name if with_comma else "", test_rows, first, swallowed)


def features(found: Survey, roles: ColumnRoles, options: ColumnOptions, where: Path) -> list[Feature]:
    """Return the columns of x: the column of images alone, if there is one.

    Raises:
        InputError: a column cannot be a feature; the message says why.
    """
    images = [name for name in roles.features if found.facts[name].image]
    if len(images) > 1:
        got = ", ".join(images)
        raise InputError("one column of images", where=str(where), got=got, remedy="leave the others out by --exclude")
    if images:
        return [Feature(images[0])]
    return [_feature(name, found.facts[name], options, where) for name in roles.features]


def _feature(name: str, facts: ColumnFacts, options: ColumnOptions, where: Path) -> Feature:
    remedy = f"leave it out by --exclude '{name}'"
    chosen = name in options.categorical
    if facts.strange:
        raise InputError(
            f"column {name!r}", where=facts.strange_in, expected="numbers", got=facts.strange, remedy=remedy
        )
    if not (facts.number or facts.boolean or facts.word or facts.levels):
        raise InputError(f"column {name!r} has no value in any row", where=str(where), remedy=remedy)
    if facts.word and facts.number and not chosen:
        place, text = facts.word
        remedy = f"mend the cell, or take the column for names by --categorical '{name}'"
        if cells.THOUSANDS_COMMA.fullmatch(text):
            remedy = f"write {text.replace(',', '')}, or a point for the comma if it is the decimal one"
        elif cells.DECIMAL_COMMA.fullmatch(text):
            remedy = "write a point for the decimal comma, or separate cells by semicolons"
        if text in CODES:
            remedy = f"if it is a missing cell, say so by --missing-codes '{text}'"
        raise InputError(f"column {name!r}", where=place, expected="numbers", got=repr(text[:40]), remedy=remedy)
    dates = [text for text in facts.levels if cells.DATE.fullmatch(text)]
    if not chosen and 2 * len(dates) > len(facts.levels):
        where_first, text = facts.word or (str(where), dates[0])
        got = f"dates such as {text if text in dates else min(dates)!r}"
        raise InputError(f"column {name!r}", where=where_first, expected="numbers", got=got, remedy=remedy)
    if chosen or facts.word:
        if not chosen and len(facts.levels) > MOST_LEVELS:
            if options.group is None:
                remedy += f", or by --group '{name}' if it names a row's patient, so that no test split divides one"
            remedy += f"; or let it be one-hot all the same by --categorical {name!r}"
            what = f"column {name!r} has more than {MOST_LEVELS} different words"
            raise InputError(what, where=str(where), remedy=remedy)
        names, codes = cells.names(facts.levels)
        return Feature(name, tuple(names), codes)
    if facts.odd_truth:
        place, text = facts.odd_truth
        what, expected = f"column {name!r}", "numbers, as in its other cells"
        raise InputError(what, where=place, expected=expected, got=repr(text), remedy="mend the cell")
    if facts.infinite:
        remedy = "mend the cell"
        raise InputError(f"column {name!r}", where=facts.infinite, expected="a finite float32 number", remedy=remedy)
    return Feature(name)


def _look(facts: ColumnFacts, block: Block, name: str, limit: int | None) -> None:
    """Add one block's cells of a column to its facts; `limit`: most distinct values, for a column of names."""
    import pyarrow

    values = block.columns[name]
    if is_image(values):
        facts.image = True
    if values.null_count:
        facts.missing += values.null_count
        facts.absent = facts.absent or block.place(_first_null(values))
    if values.null_count == len(values) or facts.image:
        return
    kind = values.type
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_temporal(kind) or "binary" in str(kind):
        if not facts.strange:
            facts.strange, facts.strange_in = str(kind)[:80], str(block.path)
        return
    if limit is not None:
        _add(facts, cells.distinct(values)[0], block)
        if len(facts.levels) > limit:
            what = f"more than {limit:,} different values in column {name!r}"
            remedy = f"leave it out by --exclude '{name}'"
            if limit == MOST_CLASSES:
                remedy = "use --task regression, or name another --target"
            raise InputError(what, where=str(block.path), remedy=remedy)
        return
    try:
        found = cells.numbers(values, block.decimal_comma)
    except cells.NoNumber as error:
        facts.word = facts.word or (block.place(error.row), error.text)
        _note_words(facts, values, block)
    else:
        _note_numbers(facts, values, found, block)


def _note_words(facts: ColumnFacts, values: pyarrow.Array, block: Block) -> None:
    """Note the distinct cells of a block whose column has words, and whether any is a number."""
    texts = cells.distinct(values)[0]
    facts.number = facts.number or any(
        cells.number(text, block.decimal_comma) is not None for text in texts if not cells.is_boolean(text)
    )
    if len(facts.levels) <= MOST_LEVELS:
        _add(facts, texts, block)


def _note_numbers(facts: ColumnFacts, values: pyarrow.Array, found: np.ndarray, block: Block) -> None:
    """Note the kinds and the range of a column's numbers in a block, `found`, (m,); a missing cell is NaN."""
    facts.truth = facts.truth or _first_truth(values, block)
    if texts := _booleans(values, found):
        _add(facts, texts, block)  # in case that the column has words in another block
        facts.boolean = True
    facts.number = facts.number or not texts or not all(map(cells.is_boolean, texts))
    facts.whole &= bool(((found == np.rint(found)) | np.isnan(found)).all())
    too_large = np.abs(found) > MAX_FLOAT32
    if too_large.any():
        facts.infinite = facts.infinite or block.place(int(too_large.argmax()))
    elif len(present := found[~np.isnan(found)]):
        _note_range(facts, values, present, block)


def _note_range(facts: ColumnFacts, values: pyarrow.Array, present: np.ndarray, block: Block) -> None:
    """Note sentinels, range and rounding of a column's numbers in a block, without missing cells."""
    is_code = np.isin(present, SENTINELS)
    facts.coded.update(present[is_code].astype(int).tolist())
    facts.low_else = min(facts.low_else, float(present[~is_code].min(initial=math.inf)))
    if np.abs(present).max() < cells.EXACT:
        low, high = float(present.min()), float(present.max())
        rounding = float(np.abs(present - present.astype(np.float32)).max())
    else:  # float64 does not tell whole numbers of this size apart
        exact = [cells.number(text, block.decimal_comma) for text in cells.distinct(values)[0]]
        known = [value for value in exact if value is not None and not math.isnan(value)]
        low, high = min(known), max(known)
        rounding = max(abs(value - type(value)(np.float32(value))) for value in known)
    facts.low, facts.high = min(facts.low, low), max(facts.high, high)
    facts.rounding = max(facts.rounding, rounding)


def _booleans(values: pyarrow.Array, found: np.ndarray) -> list[str]:
    """Return the distinct cells of a column with true or false, whose numbers are `found`; none of another."""
    if not ((found == 0) | (found == 1) | np.isnan(found)).all():
        return []
    texts = cells.distinct(values)[0]
    return texts if any(map(cells.is_boolean, texts)) else []


def _first_truth(values: pyarrow.Array, block: Block) -> tuple[str, str] | None:
    """Return the place and text of the first cell that is true or false, None for none."""
    import pyarrow
    import pyarrow.compute as pc

    kind = values.type
    if pyarrow.types.is_boolean(kind):
        row = int(pc.index(pc.is_valid(values), True).as_py())
    elif pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        row = int(pc.index(pc.is_in(pc.utf8_lower(values), value_set=pyarrow.array(cells.TRUTH, kind)), True).as_py())
    else:
        row = -1
    return None if row < 0 else (block.place(row), str(values[row].as_py()))


def _add(facts: ColumnFacts, texts: Iterable[str], block: Block) -> None:
    """Add the distinct texts of a block to the levels of its column."""
    for text in texts:
        value = cells.number(text, block.decimal_comma)
        facts.levels[text] = value if facts.levels.get(text, value) == value else None


def _note_commas(facts: ColumnFacts, block: Block, name: str) -> None:
    """Note the decimal commas of a column in a block that has them, and what would be thousands elsewhere."""
    if block.path not in facts.commas and _first(block, name, cells.DECIMAL_COMMA):
        facts.commas.add(block.path)
    if block.path not in facts.points and (point := _first(block, name, cells.THOUSANDS)):
        facts.points[block.path] = point
    marked, example = _thousands(block, name)
    if marked and facts.thousands.get(block.path) != "":
        facts.thousands[block.path] = example


def _thousands(block: Block, name: str) -> tuple[int, str]:
    """Return how many cells have a point or a comma, and one of them if all have three digits behind it, else ""."""
    import pyarrow.compute as pc

    values = block.columns[name]
    if str(values.type) not in ("string", "large_string"):
        return 0, ""
    marked = values.filter(pc.match_substring_regex(values, "[.,]"))
    either = f"^({cells.THOUSANDS.pattern}|{cells.THOUSANDS_COMMA.pattern})$"
    all_are = pc.all(pc.match_substring_regex(marked, either), min_count=1).as_py()
    return len(marked), marked[0].as_py() if all_are else ""


def _swallowed(block: Block) -> str:
    """Return the place of a cell that may hold whole rows, as behind a quote that is not closed, "" for none."""
    import pyarrow
    import pyarrow.compute as pc

    most = len(block.columns) - 1
    if is_parquet(block.path) or not most:
        return ""
    for name, values in block.columns.items():
        broken = pc.match_substring(values, "\n") if values.type == pyarrow.string() else None
        row = -1 if broken is None else pc.index(broken, True).as_py()
        if row >= 0:
            text = values[row].as_py()
            if text.count(separator(block.path)) >= most * text.count("\n"):
                return f"{block.place(row)}: column {name!r}"
    return ""


def _first_null(values: pyarrow.Array) -> int:
    import pyarrow.compute as pc

    return int(pc.index(pc.is_null(values), True).as_py())


def _first(block: Block, name: str, pattern: re.Pattern[str]) -> str:
    """Return the place and text of a column's first cell that matches wholly; "" for none, or if it holds no text."""
    import pyarrow.compute as pc

    values = block.columns[name]
    if str(values.type) not in ("string", "large_string"):
        return ""
    row = pc.index(pc.fill_null(pc.match_substring_regex(values, f"^({pattern.pattern})$"), False), True).as_py()
    return "" if row < 0 else f"{block.place(row)}: column {name!r}: {values[row].as_py()}"
