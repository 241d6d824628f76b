"""Data frames as clients' samples: one with a column of clients, a ``groupby``, or one a client.

A frame is anything with ``to_pandas`` (a Hugging Face ``Dataset``, an Arrow or Polars table), or a pandas DataFrame.
Columns of words and pandas' categoricals become one-hot, by the levels of all clients, as in ``prepare own``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.as_arrays import as_array, is_absent
from data_prep.samples import LARGEST_EXACT, is_double
from data_prep.tables import cells
from hpcfed.errors import InputError, first_of, nearest, shown

MOST_LEVELS = 1000
"""Different words of a column from which it is names, not categories."""


@dataclass(frozen=True)
class Columns:
    """An array (n, p) with names of its columns, as `data_prep.samples` reads data frames."""

    array: np.ndarray
    columns: list[str]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)

    def __len__(self) -> int:
        return len(self.array)


@dataclass
class Frames:
    """Turns frames into pairs (x, y), by one encoding for all of them.

    Attributes:
        target: the columns of y.
        categories: column → its levels, in their order.
    """

    target: Sequence[str]
    categories: dict[str, list[str]] = field(default_factory=dict)

    def survey(self, name: str, frame: Any, leave_out: Sequence[str]) -> None:
        """Add the levels of a frame's columns of words."""
        names = _names(frame)
        if twice := next((one for one in names if names.count(one) > 1), None):
            raise InputError(f"{name}: column {twice!r} is there twice", remedy="rename one")
        for column in (one for one in _names(frame) if one not in (*self.target, *leave_out)):
            values = frame[column]
            found = getattr(values.dtype, "categories", None)
            if found is not None:
                levels = [str(level) for level in found]
            else:
                array = _objects(values)
                if array.dtype.kind == "O":
                    present = array[np.array([not is_absent(one) for one in array], bool)]
                    array = as_array(f"{name}: {column}", present, can_lack=True) if len(present) else np.zeros(0)
                if array.dtype.kind not in "biufU":
                    array = _words(f"{name}: column {column!r}", array)
                if array.dtype.kind != "U":
                    continue
                levels = sorted({*array.tolist()} - {""})
                _check_words(f"{name}: column {column!r}", levels)
            known = self.categories.setdefault(column, [])
            known += [level for level in levels if level not in known]
            if found is None:
                known.sort()
            if len(known) > MOST_LEVELS:
                what = f"column {column!r} has more than {MOST_LEVELS:,} different words"
                raise InputError(what, where=name, remedy="leave it out: df.drop(columns=…)")

    def samples(self, name: str, frame: Any, leave_out: Sequence[str]) -> tuple[Columns, Any]:
        """Return x, with the names of its features, and y."""
        names, parts = list[str](), list[np.ndarray]()
        for column in (one for one in _names(frame) if one not in (*self.target, *leave_out)):
            if column in self.categories:
                levels = self.categories[column]
                words = _words(f"{name}: column {column!r}", _objects(frame[column]))
                if strange := sorted({*words.tolist()} - {*levels, ""}):
                    what, remedy = f"{name}: column {column!r}", "give it one type at all clients: words, or numbers"
                    raise InputError(what, expected=f"one of {first_of(levels, 8)}", got=strange[0], remedy=remedy)
                hot = (words[:, None] == np.array(levels)[None]).astype(np.float32)
                hot[words == ""] = np.nan
                names += [f"{column}={level}" for level in levels]
                parts.append(hot)
            else:
                array = as_array(f"{name}: {column}", _objects(frame[column]), can_lack=True)
                names.append(str(column))
                is_large = array.dtype.kind in "iu" and np.abs(array).max(initial=0) >= LARGEST_EXACT
                is_wide = is_double(array.dtype) or is_large
                parts.append(array.astype(np.float64 if is_wide else np.float32)[:, None])
        if not parts:
            raise InputError(f"{name}: no column is left for x", got=", ".join(map(str, _names(frame))))
        targets = [as_array(f"{name}: {one}", _objects(frame[one]), can_lack=False) for one in self.target]
        return Columns(np.concatenate(parts, axis=1), names), targets[0] if len(targets) == 1 else np.stack(targets, 1)


def is_frame(content: Any) -> bool:
    """Whether samples are a data frame, or a table that can become one."""
    return hasattr(content, "to_pandas") or (hasattr(content, "columns") and hasattr(content, "groupby"))


def holds_frames(clients: Any) -> bool:
    """Whether clients come as a frame, a ``groupby`` of one, or a mapping with a frame."""
    if isinstance(clients, Mapping):
        return any(is_frame(content) for content in clients.values())
    return is_frame(clients) or _is_grouped(clients)


def of_frames(
    clients: Any, test: Any, client: str | None, target: str | Sequence[str] | None
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return clients and test samples with pairs (x, y) in the place of frames, and the columns' metadata.

    Args:
        clients: a frame or a ``groupby``; or a mapping of clients' names to frames, or to samples of other kinds.
        test: a frame, a mapping of frames, or samples of other kinds.
        client: the column that names the client; of a frame alone.
        target: the columns of y.

    Raises:
        InputError: a column is not there, not named, or holds neither numbers nor words.
    """
    if target is None:
        remedy = "name it: target='outcome', and of one frame client='hospital'"
        raise InputError("a data frame without its column of y", remedy=remedy)
    frames = Frames([target] if isinstance(target, str) else [*target])
    by_client, left_out = _by_client(clients, client)
    own = test if isinstance(test, Mapping) and test.keys() != {"x", "y"} else None
    if own is None and is_frame(test) and client is not None and client in _names(_pandas(test)):
        own = _by_client(test, client)[0]
    tests = own if own is not None else {"": test} if is_frame(test) else {}
    tests = {name: _pandas(content) if is_frame(content) else content for name, content in tests.items()}
    both = [(f"client {name!r}", frame) for name, frame in by_client.items() if is_frame(frame)]
    both += [(f"the test set {name!r}" if name else "the test set", frame) for name, frame in tests.items()]
    both = [(name, frame) for name, frame in both if is_frame(frame)]
    for name, frame in both:
        for column in frames.target:
            _check_column(name, frame, column)
        frames.survey(name, frame, left_out)

    def pairs(samples: Mapping[str, Any]) -> dict[str, Any]:
        return {
            str(name): frames.samples(f"client {name!r}", content, left_out) if is_frame(content) else content
            for name, content in samples.items()
        }

    found: Any = pairs(tests) if tests else test
    if tests and own is None:
        found = found[""]
    said: dict[str, Any] = {"target": ", ".join(frames.target)}
    return pairs(by_client), found, said | ({"categories": frames.categories} if frames.categories else {})


def _by_client(clients: Any, client: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the frame of each client, and the columns that name clients."""
    if isinstance(clients, Mapping):
        if client is not None:
            raise InputError("client", expected="none, beside a mapping of clients", got=shown(client))
        return {str(name): _pandas(one) if is_frame(one) else one for name, one in clients.items()}, []
    if _is_grouped(clients):
        keys = clients.keys if isinstance(clients.keys, list) else [clients.keys]
        named = [key for key in keys if isinstance(key, str)]
        return {_name(key): frame for key, frame in clients}, named
    frame = _pandas(clients)
    if client is None:
        remedy = "name it: client='hospital'; or give df.groupby(…), or a mapping of names to frames"
        raise InputError("a data frame without its column of clients", remedy=remedy)
    _check_column("the data frame", frame, client)
    if frame[client].isna().any():
        what = f"column {client!r}: {int(frame[client].isna().sum()):,} samples without a client"
        raise InputError(what, remedy=f"leave them out: df.dropna(subset=[{client!r}])")
    return {_name(key): part for key, part in frame.groupby(client, observed=True)}, [client]


def _is_grouped(clients: Any) -> bool:
    return hasattr(clients, "ngroups") and hasattr(clients, "obj") and hasattr(clients, "__iter__")


def _name(key: Any) -> str:
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _pandas(table: Any) -> Any:
    return table.to_pandas() if hasattr(table, "to_pandas") else table


def _names(frame: Any) -> list[Any]:
    return list(frame.columns)


def _check_column(name: str, frame: Any, column: str) -> None:
    names = _names(frame)
    if column not in names:
        raise InputError(f"{name}: no column {column!r}", remedy=nearest(str(column), list(map(str, names))))
    if names.count(column) > 1:
        raise InputError(f"{name}: column {column!r} is there twice", remedy="rename one")


def _objects(values: Any) -> np.ndarray:
    """Return a column as an array; categoricals and pandas' own types as objects."""
    is_plain = isinstance(values.dtype, np.dtype) and values.dtype.kind in "biufM"
    return np.asarray(values, dtype=None if is_plain else object)


def _check_words(what: str, levels: Sequence[str]) -> None:
    """Refuse words of which at least half are numbers, as pandas reads a column of numbers with a "?" in it.

    Raises:
        InputError: they are.
    """
    numbers = sum(re.match(cells.WHOLE_OR_FRACTION, level) is not None for level in levels)
    if levels and 2 * numbers >= len(levels):
        remedy = "make them numbers by pandas.to_numeric(…, errors='coerce'), or categories by .astype('category')"
        raise InputError(what, expected="numbers, or words", got=f"text: {first_of(levels, 4)}", remedy=remedy)


def _words(what: str, array: np.ndarray) -> np.ndarray:
    """Return words as texts, "" where missing.

    Raises:
        InputError: there are other objects.
    """
    flat: Iterator[Any] = iter(array.tolist())
    found = ["" if is_absent(one) else one for one in flat]
    strange = next((one for one in found if not isinstance(one, str | int | float | bool)), None)
    if array.dtype.kind == "M" or strange is not None:
        got = f"dates ({array.dtype})" if array.dtype.kind == "M" else f"a {type(strange).__name__}"
        arrays = "give arrays, {'north': (x, y), …}, or" if isinstance(strange, list | np.ndarray) else "convert it, or"
        raise InputError(what, expected="numbers or words", got=got, remedy=f"{arrays} leave it out")
    return np.array([str(one) for one in found], dtype=str)
