"""Each run's record and clients as a table: the one reader of ``metrics.jsonl`` and ``clients.csv`` in the laboratory.

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
from hpcfed.run_folder.rounds import columns_of, interval_of, iterate_rounds, skipped_in

if TYPE_CHECKING:
    import pandas as pd

MAX_TABLE_BYTES = 1 << 34
"""Bytes of ``clients.csv``: a million clients over hundreds of evaluations."""


def record(path: Path, evaluate: Mapping[str, Any] | None, skipped: Counter[int] | None = None) -> pd.DataFrame:
    """Return a record's numbers: a row a round, by its number, a column a dotted name, nan for null; counts are whole.

    A run's last round is evaluated in any case; once it is not the last any more, scores outside the schedule of
    `evaluate` are nan. Rounds that left out a client's update are counted in `skipped`.

    Raises:
        InputError: a line is malformed, out of order, or has a value that is no number; or there is no round.
    """
    import pandas

    columns = columns_of(_counted(iterate_rounds(path), Counter() if skipped is None else skipped), path)
    if not columns.rounds:
        raise InputError("no rounds yet", where=str(path), remedy="wait for the run's first round")
    rounds = np.arange(1, columns.rounds + 1)
    found = {}
    for name in list(columns):
        due = (rounds % interval_of(name, evaluate or {}) == 0) | (rounds == len(rounds))
        column = np.array(columns.pop(name))
        found[name] = column if due.all() else np.where(due, column, np.nan)
    return pandas.DataFrame(found, index=pandas.Index(rounds, name="round"))


def _counted(rows: Iterable[dict[str, Any]], skipped: Counter[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows; count clients that they name as skipped."""
    for row in rows:
        skipped.update(skipped_in(row))
        yield row


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV, a column a key: numbers read back as the same bits, lists are JSON, None and nan empty."""
    import pandas

    def cell(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list) else value

    plain = [{key: cell(value) for key, value in row.items()} for row in records]
    return str(pandas.DataFrame(plain, dtype=object).to_csv(index=False, lineterminator="\n"))


def clients_table(path: Path) -> pd.DataFrame:
    """Return the whole lines of a run's ``clients.csv``, a row a client, model, split and round, its cells as text.

    Raises:
        InputError: the file cannot be read, or is no CSV.
    """
    import pandas

    try:
        text = read_text(path, MAX_TABLE_BYTES)
        whole = io.StringIO(text[: text.rfind("\n") + 1])
        return pandas.read_csv(whole, dtype=str, keep_default_na=False, index_col=False).fillna("")
    except pandas.errors.EmptyDataError:
        return pandas.DataFrame()
    except (OSError, Malformed, ValueError) as error:  # ValueError: pandas's, too
        raise InputError("cannot be read", where=str(path), got=str(error).strip()) from error
