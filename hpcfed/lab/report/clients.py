"""Per-client results: a run's ``clients.csv``, and the distribution over clients at its last evaluation.

The file has one line per round, model, split and client: ``round, client, model, split, loss, accuracy, n, name``, and
the recipe's metrics. If the column ``split`` or ``model`` is missing, all lines count as one split or model. A
half-written last line is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcfed.config.metrics import CLIENT_COLUMNS
from hpcfed.errors import InputError
from hpcfed.lab.frame import clients_table

if TYPE_CHECKING:
    import pandas as pd

PREFERRED_SPLITS = ("test", "train")
PREFERRED_MEASURES = ("accuracy", "loss")
GLOBAL = "global"
MAX_DIGITS = 18
"""Maximum number of digits of a round number, and of a sample count."""


@dataclass(frozen=True)
class Clients:
    """The last evaluation of a run's C clients in ``clients.csv``.

    Attributes:
        round: the round of the evaluation.
        split: the part of the clients' data that was measured: ``test`` if the file has it, else ``train``; ``all`` if
            the file names no splits.
        measure: ``accuracy``, or ``loss`` if no accuracy was recorded.
        values: model (``global``, and others that the recipe asked for) → `measure` of each client, (C,) float64.
        names, sizes: the clients' names and sample counts as text, C of each.
        measures: name → the clients' values for the main model, (C,); the names are ``accuracy``, ``loss`` and the
            recipe's metrics, as far as recorded. Undefined values are nan, those that were not finite inf.
        model: name of the main model.
    """

    round: int
    split: str
    measure: str
    values: Mapping[str, np.ndarray]
    names: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    measures: Mapping[str, np.ndarray] = field(default_factory=dict)
    model: str = GLOBAL

    @property
    def num_samples(self) -> int | None:
        """Number of samples of all clients together; None if any client's sample count is missing."""
        known = all(size.isdecimal() and len(size) <= MAX_DIGITS for size in self.sizes)
        return sum(map(int, self.sizes)) if known else None

    @property
    def main(self) -> np.ndarray:
        """The clients' values of `measure` for the main model, (C,)."""
        return self.values[self.model]


def read_clients(path: Path, model: str = GLOBAL) -> Clients | None:
    """Return the last evaluation in ``clients.csv``; None without the file, or if it has no accuracies or losses yet.

    The main model is `model` if it was measured, else ``global``, else the first in the file.

    Raises InputError: a field that must be a number is not one.
    """
    if not path.exists():
        return None
    table = clients_table(path)
    for name in ("split", "model"):
        table[name] = table.get(name, "")
    table["model"] = table["model"].replace("", GLOBAL)
    splits = set(table["split"])
    split = next((name for name in PREFERRED_SPLITS if name in splits), min(splits, default=""))
    of_split = table[table["split"] == split]
    rounds = of_split.get("round", of_split["split"])
    for line, text in rounds[~rounds.str.fullmatch(rf"[0-9]{{1,{MAX_DIGITS}}}")].items():
        raise InputError("round", where=f"{path}, line {line + 2}", expected="a whole number", got=repr(text[:40]))
    latest = of_split[rounds.map(int) == max(map(int, rounds), default=0)]
    known = [name for name in PREFERRED_MEASURES if name in latest and latest[name].any()]
    if not known:
        return None
    values = {name: _column(rows, known[0], path) for name, rows in latest.groupby("model", sort=False)}
    model = next(name for name in (model, GLOBAL, *values) if name in values)
    main = latest[latest["model"] == model]
    clients, sizes = main.get("client", ""), main.get("n", "")
    names = main["name"].where(main["name"] != "", clients) if "name" in main else clients
    own = [name for name in main if name not in CLIENT_COLUMNS and _is_number(main[name])]
    measures = {name: _column(main, name, path) for name in [*(n for n in known if main[n].any()), *own]}
    last = int(latest["round"].iloc[0])
    return Clients(last, split or "all", known[0], values, tuple(names), tuple(sizes), measures, model)


def _is_number(cells: pd.Series) -> bool:
    """Whether a column has a number in some row, and no text or matrix."""
    with suppress(ValueError):
        return bool([float(cell) for cell in cells if cell])
    return False


def _column(rows: pd.DataFrame, measure: str, path: Path) -> np.ndarray:
    """Return a column: nan for an empty cell, which is undefined, and inf for a number that was not finite."""
    try:
        found = np.array([float(cell or math.nan) for cell in rows[measure]])
        return np.where(~np.isfinite(found) & (rows[measure] != "").to_numpy(), math.inf, found)
    except ValueError as error:
        raise InputError(measure, where=str(path), expected="numbers", got=str(error)) from error


@dataclass(frozen=True)
class Fairness:
    """Statistics of a measure over C clients: mean, standard deviation, means of the ⌈C/10⌉ worst and ⌈C/10⌉ best."""

    mean: float
    std: float
    worst_tenth: float  # mean over the ⌈C/10⌉ clients with the worst values
    best_tenth: float

    @staticmethod
    def of(values: np.ndarray, *, higher_is_better: bool) -> Fairness:
        """Return the statistics of the entries of `values`, (C,), that are defined (not nan), all weighted equally.

        They are nan if there are none or if one is not finite: without it, the others would look better than they are.

        Reference: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020, Table 1.
        """
        ordered = from_worst(values, higher_is_better=higher_is_better)
        if not len(ordered) or np.isinf(values).any():
            return Fairness(math.nan, math.nan, math.nan, math.nan)
        tenth = math.ceil(len(ordered) / 10)
        return Fairness(
            float(ordered.mean()), float(ordered.std()), float(ordered[:tenth].mean()), float(ordered[-tenth:].mean())
        )


def from_worst(values: np.ndarray, *, higher_is_better: bool) -> np.ndarray:
    """Return the finite entries of `values`, (C,), sorted from worst to best."""
    ordered = np.sort(values[np.isfinite(values)])
    return ordered if higher_is_better else ordered[::-1]
