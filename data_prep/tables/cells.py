"""Cells of a table as numbers, or as one of several names."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from hpcfed.errors import InputError

if TYPE_CHECKING:
    import pyarrow

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")

THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}")
"""With a point, either 1234 or 1.234: among decimal commas it is ambiguous."""
THOUSANDS_COMMA = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
"""The same with a comma."""
TRUTH = ("true", "false")
DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2})"
    r"|\d{1,2}[-. ]*(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[-. ]*(\d{4}|\d{2}))([T ]\d{1,2}:\d\d.*)?",
    re.IGNORECASE,
)
QUANTITY = re.compile(r"[<>≤≥~]?[\s$€£¥+\u2212-]*(0x[\da-f]+|\d[\d.,:'\s%$€£¥]*)", re.IGNORECASE)
"""A number as people write it: with thousands, money, a typographic minus, in base 16, or as a time."""

LEADING_ZEROS = re.compile(r"(?<!\d)(?<!\d[.,])0+(?=\d)")
EXACT = 2.0**53
"""From here on, different whole numbers are equal as floats."""
WHOLE_OR_FRACTION = r"^-?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"
"""A number without leading zeros: 009 may be a name."""
WHOLE = re.compile(r"([+-]?\d+)(\.0*)?")


class NoNumber(Exception):
    """A cell is not a number: its row, and its text."""

    def __init__(self, row: int, text: str):
        super().__init__(text)
        self.row, self.text = row, text


def composed(text: str) -> str:
    """Return a text in Unicode's form NFC, in which é is one character: other systems write it as two."""
    return unicodedata.normalize("NFC", text)


def decoded(what: str, text: bytes) -> str:
    """Return UTF-8 as text.

    Raises:
        InputError: it is none.
    """
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise InputError(f"{what}: not UTF-8", got=repr(text), remedy="give text instead of bytes") from None


def is_boolean(text: str) -> bool:
    """Tell whether a text is true or false, as programs write them: True, TRUE, true."""
    return text.lower() in TRUTH


def number(text: str, decimal_comma: bool = False) -> float | None:
    """Return a text as a number, None if it is not one: an int if it is whole and a float would round it; 1 and 0 for
    true and false.
    """
    if is_boolean(text):
        return float(text.lower() == "true")
    if decimal_comma and DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        value = None if "_" in text else float(text)
        if value is not None and EXACT <= abs(value) < math.inf and (whole := WHOLE.fullmatch(text)):
            return int(whole[1])
    except ValueError:
        return None
    return value


def numbers(values: pyarrow.Array, decimal_comma: bool = False) -> np.ndarray:
    """Return cells as float64, (m,), with NaN for missing ones, and for no others.

    Raises:
        NoNumber: for the first cell that is not a number.
    """
    import pyarrow
    import pyarrow.compute as pc

    with suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
        cast = pc.cast(pc.cast(values, pyarrow.int8()) if pyarrow.types.is_boolean(values.type) else values, "float64")
        found: np.ndarray = cast.to_numpy(zero_copy_only=False).astype(np.float64)
        is_text = pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type)
        if not is_text or np.count_nonzero(np.isnan(found)) == values.null_count:  # else nan(1), which is no gap
            return found
    different, codes = distinct(values)
    parsed = [number(text, decimal_comma) for text in different]
    wrong = [k for k, value in enumerate(parsed) if value is None or math.isnan(value)]
    if wrong:
        row = int(np.isin(codes, wrong).argmax())
        raise NoNumber(row, different[codes[row]])
    return np.array([*parsed, np.nan], np.float64)[codes]


def distinct(values: pyarrow.Array) -> tuple[list[str], np.ndarray]:
    """Return the distinct cells as text, and each cell's index among them, (m,), -1 for missing ones."""
    import pyarrow
    import pyarrow.compute as pc

    if pyarrow.types.is_boolean(values.type):
        values = pc.if_else(values, "True", "False")
    encoded = values.dictionary_encode()
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return [str(text) for text in pc.cast(encoded.dictionary, pyarrow.string()).to_pylist()], codes


def names(levels: Mapping[str, float | None]) -> tuple[list[str], dict[str, int]]:
    """Return the distinct names that texts stand for, sorted, and a mapping from text to its name's index.

    If all texts are numbers, 1, 1.0 and 01 are one name, and the order is numeric. True and 1 are one, too, and False
    and 0; they keep their words where there are no numbers beside them.

    Args:
        levels: text → its number, None for a word.
    """
    found = sorted(levels)
    values = [levels[text] for text in found]
    if any(value is None or not math.isfinite(value) for value in values):
        return found, {text: k for k, text in enumerate(found)}
    ordered = sorted({value for value in values if value is not None})
    place = {value: k for k, value in enumerate(ordered)}
    if all(map(is_boolean, found)):
        spelled = [str(bool(value)) for value in ordered]
    else:
        spelled = [str(int(value)) if abs(value) < EXACT and value == int(value) else repr(value) for value in ordered]
    return spelled, {text: place[value] for text, value in zip(found, values, strict=True) if value is not None}


def are_numbers(texts: Iterable[str]) -> bool:
    """Tell whether all texts are numbers, and no words such as True."""
    return all(number(text) is not None and not is_boolean(text) for text in texts)


def twice(what: str, texts: Iterable[str], of: str = "") -> str:
    """Return a line on names that differ in case, spaces or leading zeros alone, or are one number; "" for none."""
    first: dict[float | str, str] = {}
    pairs = [(first.setdefault(_folded(text), text), text) for text in sorted(texts)]
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    if not pairs:
        return ""
    count = f" (1 of {len(pairs):,} pairs)" if len(pairs) > 1 else ""
    return f"{what} {pairs[0][0]!r} and {pairs[0][1]!r}{of} look like one, written in two ways{count}"


def _folded(text: str) -> float | str:
    value = number(text, decimal_comma=True)
    if value is not None and abs(value) < EXACT:
        return value
    return LEADING_ZEROS.sub("", " ".join(composed(text).casefold().split()))
