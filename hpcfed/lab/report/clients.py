"""Per-client results: a run's ``clients.csv``, and the distribution over clients at its last evaluation.

The file has one line per round, model, split and client: ``round, client, model, split, loss, accuracy, n, name``, and
the recipe's metrics. A missing ``split`` or ``model`` counts as one single value; a half-written line is skipped.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpcfed.config.metrics import CLIENT_COLUMNS
from hpcfed.errors import InputError
from hpcfed.io.text import Malformed, read_text

PREFERRED_SPLITS = ("test", "train")
PREFERRED_MEASURES = ("accuracy", "loss")
GLOBAL = "global"
MAX_TABLE_BYTES = 1 << 34
"""Bytes: a million clients over hundreds of evaluations."""
MAX_DIGITS = 18
"""Maximum digits of a round number, and of a number of samples."""


@dataclass(frozen=True)
class Clients:
    """The last evaluation of clients in ``clients.csv``, on `split`: clients' test sets if the file has them.

    `values` maps a model (``global``, and others that the recipe asked for) to one value for each of C clients, in
    their order, (C,) float64: accuracies, or losses for tasks without accuracy. Of the main model: the clients' `names`
    and `sizes`, as text, and all its `measures`, (C,) each, nan where undefined.
    """

    round: int
    split: str
    measure: str
    values: Mapping[str, np.ndarray]
    names: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    measures: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_samples(self) -> int | None:
        """Samples of all clients together, None if a number is missing."""
        known = all(size.isdecimal() and len(size) <= MAX_DIGITS for size in self.sizes)
        return sum(map(int, self.sizes)) if known else None

    @property
    def model(self) -> str:
        """The main model: the global one, or the first in the file."""
        return GLOBAL if GLOBAL in self.values else next(iter(self.values))

    @property
    def main(self) -> np.ndarray:
        """Values of the main model, (C,)."""
        return self.values[self.model]


def read_clients(path: Path) -> Clients | None:
    """Return the last evaluation in ``clients.csv``; None if the file is missing or still empty.

    Raises InputError: a field that must be a number is not.
    """
    if not path.exists():
        return None
    try:
        text = read_text(path, MAX_TABLE_BYTES)
    except (OSError, Malformed) as error:
        raise InputError(f"cannot be read ({error})", where=str(path)) from error
    whole = text[: text.rfind("\n") + 1]
    try:
        rows = list(csv.DictReader(whole.splitlines()))
    except csv.Error as error:
        raise InputError("not CSV", where=str(path), got=str(error)) from error
    splits = {row.get("split") or "" for row in rows}
    split = next((name for name in PREFERRED_SPLITS if name in splits), min(splits, default=""))
    of_split = [
        (_whole_number(row, path, line), row)
        for line, row in enumerate(rows, start=2)
        if (row.get("split") or "") == split
    ]
    last = max((number for number, _ in of_split), default=0)
    latest = [row for number, row in of_split if number == last]
    measure = next((name for name in PREFERRED_MEASURES if any(row.get(name) for row in latest)), None)
    if measure is None:
        return None
    models = dict.fromkeys(row.get("model") or "global" for row in latest)
    values = {
        model: _column([row for row in latest if (row.get("model") or "global") == model], measure, path)
        for model in models
    }
    main = "global" if "global" in models else next(iter(models))
    of_main = [row for row in latest if (row.get("model") or "global") == main]
    names = tuple(row.get("name") or row.get("client") or "" for row in of_main)
    sizes = tuple(row.get("n") or "" for row in of_main)
    own = [name for name in of_main[0] if name and name not in CLIENT_COLUMNS]
    known = [name for name in PREFERRED_MEASURES if any(row.get(name) for row in of_main)]
    measures = {name: _column(of_main, name, path) for name in [*known, *(n for n in own if _is_number(of_main, n))]}
    return Clients(last, split or "all", measure, values, names, sizes, measures)


def _is_number(rows: Sequence[Mapping[str, str | None]], name: str) -> bool:
    """Whether a column has a number in some row, and no text or matrix."""
    cells = [cell for row in rows if (cell := row.get(name))]
    with suppress(ValueError):
        return bool([float(cell) for cell in cells])
    return False


def _whole_number(row: Mapping[str, str | None], path: Path, line: int) -> int:
    text = row.get("round") or ""
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise InputError("round", where=f"{path}, line {line}", expected="a whole number", got=repr(text[:40]))
    return int(text)


def _column(rows: Sequence[Mapping[str, str | None]], measure: str, path: Path) -> np.ndarray:
    try:
        return np.array([float(row.get(measure) or math.nan) for row in rows])
    except ValueError as error:
        raise InputError(measure, where=str(path), expected="numbers", got=str(error)) from error


@dataclass(frozen=True)
class Fairness:
    """Mean, deviation and both ends of the distribution over the C clients of one run, equally weighted."""

    mean: float
    std: float
    worst_tenth: float  # mean over the ⌈C/10⌉ clients with the worst values
    best_tenth: float

    @staticmethod
    def of(values: np.ndarray, *, higher_is_better: bool) -> Fairness:
        """Return the fairness measures of (C,) values, nan if none of them is finite.

        Reference: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020, Table 1.
        """
        ordered = from_worst(values, higher_is_better=higher_is_better)
        if not len(ordered):
            return Fairness(math.nan, math.nan, math.nan, math.nan)
        tenth = math.ceil(len(ordered) / 10)
        return Fairness(
            float(ordered.mean()), float(ordered.std()), float(ordered[:tenth].mean()), float(ordered[-tenth:].mean())
        )


def from_worst(values: np.ndarray, *, higher_is_better: bool) -> np.ndarray:
    """Return the finite values of (C,), from the worst to the best."""
    ordered = np.sort(values[np.isfinite(values)])
    return ordered if higher_is_better else ordered[::-1]
