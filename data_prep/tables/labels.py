"""The classes of a target column, numbered in the order of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from data_prep.tables import cells
from data_prep.tables.read import MISSING, class_names
from data_prep.tables.survey import MANY_NUMBERS, ColumnFacts
from hpcfed.errors import InputError, first_of, nearest

MAX_LISTED = 12
LIKE_MISSING = frozenset([*MISSING, "None", "none", "NaT"])
"""Classes that may be missing labels: of arrays, ``y.astype(str)`` makes such words of None and NaN."""


@dataclass(frozen=True)
class Classes:
    """The classes of a target.

    Attributes:
        names: of the classes, in order; None if the labels are 0 … K-1 themselves.
        codes: text of a cell → number of its class.
        count: K.
        remarks: doubts for the user to check.
        positive: whether the user named the positive one of two classes, which is the second.
    """

    names: list[str] | None
    codes: dict[str, int]
    count: int
    remarks: tuple[str, ...] = ()
    positive: bool = False


def check_positive(positive: str | None, task: str) -> None:
    """Refuse a positive class where samples have no class.

    Raises:
        InputError: naming the task.
    """
    if positive is not None and task != "classification":
        raise InputError(f"--positive has no effect with --task {task}", remedy="leave it out")


def with_positive(found: Classes, positive: str | None) -> Classes:
    """Return two classes in the order in which `positive`, a label, is the second; None for the order they have.

    Raises:
        InputError: there are not two classes, or none has this name.
    """
    if positive is None:
        return found
    names = [str(k) for k in range(found.count)] if found.names is None else found.names
    if len(names) != 2:
        raise InputError(f"--positive {positive}", expected="two classes", got=listed(found), remedy="leave it out")
    wanted = positive.strip()
    number = names.index(wanted) if wanted in names else found.codes.get(wanted)
    if number is None and any(map(cells.is_boolean, (wanted, *names))):
        number = next((k for k, name in enumerate(names) if cells.number(name) == cells.number(wanted)), None)
    if number is None:
        raise InputError(f"--positive {positive}: no such class", remedy=nearest(wanted, names))
    if number == 1:
        return replace(found, positive=True)
    codes = {text: 1 - code for text, code in found.codes.items()}
    return replace(found, names=names[::-1], codes=codes, positive=True)


def classes(path: Path, column: str, facts: ColumnFacts) -> Classes:
    """Return the classes of a column of labels, which `path`, the first table with a row, may name.

    Raises:
        InputError: no cell has a label; labels are fractions; or a label is beyond the class names that a file defines.
    """
    if facts.strange or facts.image:
        where, got = facts.strange_in or str(path), facts.strange or "images"
        raise InputError(f"target {column!r}", where=where, expected="labels", got=got)
    if not facts.levels:
        raise InputError(f"target {column!r} has no value in any row", where=str(path), remedy="see --target")
    known = class_names(path, column)
    names, _ = cells.names(facts.levels)
    numeric = None not in facts.levels.values()
    whole = all(value is not None and float(value).is_integer() for value in facts.levels.values())
    if known is not None and whole:
        numbers = {text: int(value) for text, value in facts.levels.items() if value is not None}
        beyond = [text for text, number in numbers.items() if not 0 <= number < len(known)]
        if beyond:
            expected, got = f"labels 0 … {len(known) - 1}", beyond[0]
            raise InputError(f"target {column!r}", where=str(path), expected=expected, got=got)
        return Classes(known, numbers, len(known))
    if numeric and not whole and len(names) > MANY_NUMBERS:
        remedy = "use --task regression, or name another --target"
        got = f"{len(names)} different fractions"
        raise InputError(f"target {column!r}", where=str(path), expected="labels", got=got, remedy=remedy)
    return of_texts(column, facts.levels)


def of_texts(column: str, levels: Mapping[str, float | None]) -> Classes:
    """Return the classes that distinct texts of labels stand for; `levels` as of `cells.names`."""
    names, codes = cells.names(levels)
    counted = names == [str(k) for k in range(len(names))]
    return Classes(None if counted else names, codes, len(names), doubts(column, names, None not in levels.values()))


def described(column: str, found: Classes) -> str:
    """Return the target and its classes in a line."""
    return f"target {column!r}: {listed(found)}"


def listed(found: Classes) -> str:
    """Return the number of classes, the first of their names, and of two named by words which is the positive one."""
    names = [str(k) for k in range(found.count)] if found.names is None else found.names
    count = "1 class" if found.count == 1 else f"{found.count} classes"
    said = f"{count}: {first_of(names, MAX_LISTED)}"
    if len(names) != 2 or (cells.are_numbers(names) and not found.positive):
        return said
    return f"{said}; positive: {names[1]}{'' if found.positive else f' (--positive {quote(names[0])} for the other)'}"


def doubts(column: str, names: Sequence[str], numeric: bool) -> tuple[str, ...]:
    """Return what the user may want to check about classes of these names, numbers or not."""
    words = ", ".join(repr(name) for name in names if name in LIKE_MISSING)
    lines = [f"classes {words}: if such labels are missing, leave their samples out"] if words else []
    if numeric and len(names) > MANY_NUMBERS:
        lines.append(f"{len(names)} numbers as classes: if {column!r} is a quantity, use --task regression")
    elif line := cells.twice("classes", names):
        lines.append(line)
    return tuple(lines)
