"""Tables of a run's ``metrics.jsonl`` and ``clients.csv``, for comparisons of runs.

pandas is imported when the first table is made.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfed.errors import InputError
from hpcfed.io.text import Malformed, read_text
from hpcfed.run_folder.rounds import columns_of, interval_of, iterate_rounds, no_rounds, skipped_in

if TYPE_CHECKING:
    import pandas as pd

MAX_TABLE_BYTES = 1 << 34
"""Bytes of the largest ``clients.csv`` that is read: a million clients over hundreds of evaluations."""


def record(path: Path, evaluate: Mapping[str, Any] | None, skipped: Counter[int] | None = None) -> pd.DataFrame:
    """Return the ``metrics.jsonl`` at `path` as a table of numbers: a row per round, index from 1; nan for null.

    Columns have dotted names, such as ``seconds.local``. Scores of rounds in which no evaluation was due become nan,
    except in the last round: a run evaluates the round it ends with, and may be resumed later. `evaluate`, the recipe's
    section, says when evaluations are due; if None, all scores are kept. `skipped`, client → number of rounds that left
    out its update, is increased by this run's.

    Raises:
        InputError: a line is malformed or out of order, a value is not a number, or there is no round.
    """
    import pandas

    columns = columns_of(_counted(iterate_rounds(path), Counter() if skipped is None else skipped), path)
    if not columns.rounds:
        raise no_rounds(path.parent)
    rounds = np.arange(1, columns.rounds + 1)
    found = {}
    for name in list(columns):
        due = (rounds % interval_of(name, evaluate or {}) == 0) | (rounds == len(rounds))
        column = np.array(columns.pop(name))
        found[name] = column if due.all() else np.where(due, column, np.nan)
    return pandas.DataFrame(found, index=pandas.Index(rounds, name="round"))


def _counted(rows: Iterable[dict[str, Any]], skipped: Counter[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows unchanged; add to `skipped`, for each client, the number of rows that name it as skipped."""
    for row in rows:
        skipped.update(skipped_in(row))
        yield row


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV, a column per key: floats keep all bits, lists are JSON, None and nan are empty cells."""
    import pandas

    def cell(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list) else value

    plain = [{key: cell(value) for key, value in row.items()} for row in records]
    return str(pandas.DataFrame(plain, dtype=object).to_csv(index=False, lineterminator="\n"))


def clients_table(path: Path, *, typed: bool = False) -> pd.DataFrame:
    """Return a run's ``clients.csv`` as a table: a row per round, model, split and client.

    Cells are strings, "" if empty; with `typed`, pandas infers each column's type. A half-written last line is dropped;
    an empty file gives an empty table.

    Raises:
        InputError: the file cannot be read, or is not CSV.
    """
    import pandas

    try:
        text = read_text(path, MAX_TABLE_BYTES)
        whole = io.StringIO(text[: text.rfind("\n") + 1])
        if typed:
            return pandas.read_csv(whole)
        return pandas.read_csv(whole, dtype=str, keep_default_na=False, index_col=False).fillna("")
    except pandas.errors.EmptyDataError:
        return pandas.DataFrame()
    except (OSError, Malformed, ValueError) as error:  # ValueError: pandas's, too
        raise InputError("cannot be read", where=str(path), got=str(error).strip()) from error
