"""Roles of a table's columns: the target, the client's name, and features, found by name in any order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.tables.read import header
from hpcfed.errors import InputError, cut, did_you_mean, first_of

OBVIOUS = ("y", "target", "label", "class", "outcome")
"""Column names taken as the target without --target, if a table has exactly one of them."""
_PERSON = "patient|subject|participant|person|proband|case|record"
_NUMBERED = f"{_PERSON}|pat|pt|subj|usubj|study|sample|specimen|visit|row"
IDENTIFIER = re.compile(
    rf"(.* )?((p|u|uu|gu)?id|nr|mrn|({_NUMBERED}) ?(id|no|nr|num|number|index|code|key))"
    rf"|id ({_NUMBERED})|{_PERSON}|index|level \d+|unnamed \d+( \d+)?"
)
"""Names of columns that identify a row or its patient, as `is_identifier` spells them."""
ROW_INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas stores the numbers of a data frame's rows, as of those that a filter has left."""
_CAMEL = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
MAX_LISTED = 6
SIMILAR = 0.7
"""Similarity from which a column counts as misspelt rather than absent: 'patient' and 'time' have 0.55."""


@dataclass(frozen=True)
class ColumnOptions:
    """The user's options about the columns.

    Attributes:
        task: one of `hpcfed.data.federation.TASKS`.
        target: names of y's columns, comma-separated; None for the obvious one.
        client: column that names the client; None if each file is one client.
        group: column that names the sample's group, such as its patient; None without.
        categorical: columns that become one-hot although they hold numbers.
        excluded: columns that are left out.
        missing: treatment of missing values, one of `missing.WAYS`.
        missing_codes: texts, and numbers, of missing cells beside `read.MISSING`.
        positive: label of the positive one of two classes, which becomes the second; None for the order of their names.
    """

    task: str = "classification"
    target: str | None = None
    client: str | None = None
    group: str | None = None
    categorical: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    missing: str = "refuse"
    positive: str | None = None
    missing_codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColumnRoles:
    """The columns by role.

    Attributes:
        features: columns of x, in the order of the first file that has the usual columns.
        unused: pandas' columns of row numbers, which no option names.
    """

    targets: tuple[str, ...]
    client: str | None
    group: str | None
    features: tuple[str, ...]
    unused: tuple[str, ...] = ()


def roles(paths: Sequence[Path], options: ColumnOptions) -> ColumnRoles:
    """Return the roles of the columns that all tables share, but for excluded ones.

    Raises:
        InputError: tables have different columns, a named column is missing or has two roles, no target was named and
            none is obvious, or no feature is left.
    """
    headers = {path: header(path) for path in paths}
    known = list(dict.fromkeys(name for names in headers.values() for name in names))
    if absent := [column for column in options.excluded if column not in known]:
        raise InputError(f"--exclude: no column {absent[0]!r}", where=str(paths[0]), remedy=_column(absent[0], known))
    chosen = {
        options.client,
        options.group,
        *options.categorical,
        *options.excluded,
        *(options.target or "").split(","),
    }
    unused = tuple(name for name in known if ROW_INDEX.fullmatch(name) and name not in chosen)
    without = {*options.excluded, *unused}
    left = {path: [name for name in names if name not in without] for path, names in headers.items()}
    first, names = _shared(left)
    targets = _targets(first, names, options)
    named = {
        "--target": targets,
        "--client": () if options.client is None else (options.client,),
        "--group": () if options.group is None else (options.group,),
        "--exclude": options.excluded,
    }
    taken: dict[str, str] = {}
    for option, columns in (*named.items(), ("--categorical", options.categorical)):
        for column in columns:
            if column not in known:
                raise InputError(f"{option}: no column {column!r}", where=str(first), remedy=_column(column, names))
            if column in taken:
                raise InputError(f"column {column!r} is named by {taken[column]} and {option}", remedy="choose one")
            taken[column] = option
    features = tuple(name for name in names if taken.get(name, "--categorical") == "--categorical")
    if not features:
        raise InputError("no column is left for x", where=str(first), got=", ".join(names)[:80])
    return ColumnRoles(targets, options.client, options.group, features, unused)


def is_identifier(name: str) -> bool:
    """Tell whether a column's name is an identifier's: ``MRN``, ``PatientID``, ``subject no.``, ``Unnamed: 0``."""
    words = re.findall(r"[^\W_]+", _CAMEL.sub(" ", name))
    return IDENTIFIER.fullmatch(" ".join(words).lower()) is not None


def _column(wanted: str, names: Sequence[str]) -> str:
    """Return a remedy for an unknown column: one that is spelt alike, or the list of all."""
    return did_you_mean(wanted, names, SIMILAR) or f"columns: {cut(', '.join(names), 200)}"


def _targets(path: Path, names: list[str], options: ColumnOptions) -> tuple[str, ...]:
    if options.target is not None:
        targets = tuple(name.strip() for name in options.target.split(","))
        if options.target in names:  # a name with a comma in it
            targets = (options.target,)
        if len(targets) > 1 and options.task == "classification":
            remedy = "name one, or choose --task multi-label, regression or survival"
            raise InputError("--target", expected="one column of labels", got=options.target[:80], remedy=remedy)
        return targets
    obvious = [
        name
        for name in names
        if name.lower() in OBVIOUS and name not in (options.client, options.group, *options.excluded)
    ]
    if len(obvious) == 1:
        return (obvious[0],)
    remedy = f"name it by --target; columns: {', '.join(names)[:200]}"
    raise InputError("which column is the target?", where=str(path), got=" and ".join(obvious), remedy=remedy)


def _shared(headers: Mapping[Path, list[str]]) -> tuple[Path, list[str]]:
    """Return the first table with the columns that most tables have, and these columns.

    Args:
        headers: table → its columns that are not excluded.

    Raises:
        InputError: another table has other columns; the message names them.
    """
    usual = Counter(frozenset(names) for names in headers.values()).most_common(1)[0][0]
    like = [path for path, names in headers.items() if usual == set(names)]
    others = [path for path in headers if path not in like]
    if not others:
        return like[0], headers[like[0]]
    path = others[0]
    absent = [name for name in headers[like[0]] if name not in headers[path]]
    added = [name for name in headers[path] if name not in usual]
    beside = f"{like[0].name}" + (f" and {len(like) - 1} more" if len(like) > 1 else "")
    what = "; ".join(
        f"{verb} {first_of([repr(name) for name in names], MAX_LISTED)}"
        for verb, names in (("it lacks", absent), ("only it has", added))
        if names
    )
    also = (
        f" (other columns also in {', '.join(path.name for path in others[1 : MAX_LISTED + 1])})" if others[1:] else ""
    )
    remedy = "give all tables the same columns, in any order, or leave columns out by --exclude"
    raise InputError(f"columns differ from those of {beside}: {what}{also}", where=str(path), remedy=remedy)
