"""The grids of a sweep, ``key=values``, parsed strictly: no input is ever evaluated as code.

local.lr=0.01,0.1,1                      a YAML list without its brackets
local.lr=10**-2,10**-1.5                 a list may have powers
algorithm.mu=0:1:5                       5 values from 0 to 1, evenly spaced
local.lr=10**-2:10**0:5                  5 powers of 10, their exponents evenly spaced
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hpcfed.errors import InputError
from hpcfed.io.text import Malformed, split_list

KEY = re.compile(r"[A-Za-z_]\w*(\.(?:[A-Za-z_][\w-]*|\d+))*")
DECIMAL = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
NUMBER = re.compile(DECIMAL)
POWER = re.compile(rf"({DECIMAL})\*\*({DECIMAL})")
NOT_SWEPT = {"seed": "use --seeds", "seeds": "use --seeds", "output": "use --output", "name": "name the recipe"}
MAX_VALUES = 1000
"""Maximum number of values of one grid."""
MAX_DIGITS = 20
"""Maximum number of digits of a seed or a count; enough for all 64-bit seeds."""
LABEL_DIGITS = 4
"""Significant digits of a number in labels and folder names."""


@dataclass(frozen=True)
class Value:
    """One value of a grid: its YAML text, and its label in tables and folder names."""

    text: str
    label: str

    @property
    def number(self) -> float | None:
        """The value as a number; None if it is not one."""
        return float(self.text) if NUMBER.fullmatch(self.text) else None


@dataclass(frozen=True)
class Grid:
    """A grid: the values that one recipe key takes in a sweep."""

    key: str
    values: tuple[Value, ...]

    @property
    def numbers(self) -> list[float] | None:
        """All values as numbers; None if any value is not a number."""
        numbers = [value.number for value in self.values if value.number is not None]
        return numbers if len(numbers) == len(self.values) else None

    @property
    def is_logarithmic(self) -> bool:
        """Whether the values are positive numbers that span a factor of 10 or more, so that axes are logarithmic."""
        numbers = self.numbers
        return numbers is not None and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)


@dataclass(frozen=True)
class Point:
    """One configuration of a sweep: a value for every grid's key, in the grids' order; empty without grids."""

    keys: tuple[str, ...]
    values: tuple[Value, ...]

    @property
    def overrides(self) -> list[str]:
        """The configuration as ``section.key=value`` arguments of ``hpcfed run``."""
        return [f"{key}={value.text}" for key, value in zip(self.keys, self.values, strict=True)]

    @property
    def label(self) -> str:
        """The configuration as text, unique in its sweep."""
        pairs = zip(self.keys, self.values, strict=True)
        return ", ".join(f"{key}={value.label}" for key, value in pairs) or "the recipe"


def parse_grid(text: str, option: str = "--grid") -> Grid:
    """Parse a grid, ``key=values``; `option` is the command's option named in errors.

    Raises:
        InputError: the text is not a grid, or has a value twice or a key that a sweep sets itself.
    """
    key, equals, values = text.partition("=")
    where = f"{option} {text}"
    if not equals or not KEY.fullmatch(key):
        raise InputError("a grid", where=where, expected="section.key=values", got=repr(text))
    if key.partition(".")[0] in NOT_SWEPT:
        raise InputError(f"{key!r} cannot be swept", where=where, remedy=NOT_SWEPT[key.partition(".")[0]])
    parts = _split(values, where)
    ends = parts[0].split(":")
    is_range = len(parts) == 1 and len(ends) > 1 and all(_is_number(end) for end in ends[:2])
    found = _range(ends, where) if is_range else [_value(part, where) for part in parts]
    for what, name in ((lambda value: value.text, "value"), (lambda value: value.label, "value, as it is shown,")):
        seen: set[str] = set()
        for value in found:
            if what(value) in seen:
                raise InputError(f"the {name} {what(value)} stands twice", where=where, remedy="name it once")
            seen.add(what(value))
    return Grid(key, tuple(found))


def parse_grids(texts: Sequence[str]) -> list[Grid]:
    """Parse all grids of a sweep.

    Raises:
        InputError: see `parse_grid`; or two grids have the same key.
    """
    grids = [parse_grid(text) for text in texts]
    for first, second in itertools.combinations(grids, 2):
        if first.key == second.key:
            raise InputError(f"two grids of {first.key!r}", where="--grid", remedy="put all its values into one")
    return grids


def points(grids: Sequence[Grid]) -> list[Point]:
    """Return all configurations, the Cartesian product of the grids; the last grid varies fastest."""
    keys = tuple(grid.key for grid in grids)
    return [Point(keys, values) for values in itertools.product(*(grid.values for grid in grids))]


def parse_seeds(text: str) -> list[int]:
    """Parse ``5`` (the seeds 0 to 4) or a list, ``0,7,11`` (``7,`` is the seed 7 alone).

    Raises:
        InputError: the text has neither form, no seed, a seed twice, or more than `MAX_VALUES` seeds.
    """
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if (
        not all(word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS for word in words)
        or not 0 < len(words) <= MAX_VALUES
    ):
        raise InputError("--seeds", expected="how many, or a list such as 0,1,2", got=repr(text))
    numbers = [int(word) for word in words]
    seeds = (
        numbers if "," in text else list(range(min(numbers[0], MAX_VALUES + 1)))
    )  # one more than `MAX_VALUES` is refused
    if not 0 < len(seeds) <= MAX_VALUES or len(set(seeds)) < len(seeds):
        raise InputError("--seeds", expected=f"1 to {MAX_VALUES} different seeds", got=repr(text))
    return seeds


def _split(text: str, where: str) -> list[str]:
    """Split a grid into the texts of its values, 1 to `MAX_VALUES` of them."""
    try:
        parts = split_list(text)
    except Malformed:
        parts = []
    if not parts:
        raise InputError("a grid", where=where, expected="values with commas between them", got=repr(text))
    if len(parts) > MAX_VALUES:
        raise InputError("a grid", where=where, expected=f"at most {MAX_VALUES} values", got=str(len(parts)))
    return parts


def _range(ends: Sequence[str], where: str) -> list[Value]:
    """Return the values of ``low:high:count``: powers of one base, or evenly spaced numbers."""
    is_count = len(ends) == 3 and ends[2].isascii() and ends[2].isdigit() and len(ends[2]) <= MAX_DIGITS
    if not is_count or not 2 <= int(ends[2]) <= MAX_VALUES:
        raise InputError(
            "a range", where=where, expected=f"low:high:count, a count of 2 to {MAX_VALUES}", got=":".join(ends)
        )
    steps = int(ends[2]) - 1
    powers = [POWER.fullmatch(end) for end in ends[:2]]
    if powers[0] and powers[1]:
        if powers[0][1] != powers[1][1]:
            raise InputError("a range", where=where, expected="powers of one base", got=":".join(ends))
        low, high = Fraction(powers[0][2]), Fraction(powers[1][2])
        spaced = [low + (high - low) * step / steps for step in range(steps + 1)]
        return [_numeric(_power(powers[0][1], exponent, where)) for exponent in spaced]
    if powers[0] or powers[1]:
        raise InputError("a range", where=where, expected="two powers, or two numbers", got=":".join(ends))
    low, high = Fraction(ends[0]), Fraction(ends[1])
    spaced = [low + (high - low) * step / steps for step in range(steps + 1)]
    whole = all(re.fullmatch(r"[+-]?\d+", end) for end in ends[:2]) and all(part.denominator == 1 for part in spaced)
    return [_numeric(int(part) if whole else float(part)) for part in spaced]


def _value(text: str, where: str) -> Value:
    power = POWER.fullmatch(text)
    if power:
        return _numeric(_power(power[1], Fraction(power[2]), where))
    return Value(text, _shown(float(text)) if NUMBER.fullmatch(text) else text)


def _power(base: str, exponent: Fraction, where: str) -> int | float:
    """Return base**exponent, an int if both are written as integers."""
    if re.fullmatch(r"\d+", base) and exponent.denominator == 1 and 0 <= exponent <= 60:
        return int(base) ** int(exponent)
    try:
        value = math.pow(float(base), float(exponent))
    except (OverflowError, ValueError):
        value = math.inf
    if not math.isfinite(value) or value == 0:
        raise InputError("a power", where=where, expected="one that is a number", got=f"{base}**{exponent}")
    return value


def _numeric(value: int | float) -> Value:
    return Value(repr(value), _shown(value))


def _shown(value: float) -> str:
    return f"{value:.{LABEL_DIGITS}g}"


def _is_number(text: str) -> bool:
    return bool(NUMBER.fullmatch(text) or POWER.fullmatch(text))
