"""Theorems measured on least-squares problems: the problem, both sides of a bound, and the table of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw_lines
from hpcfed.lab.reproduce.plan import ExperimentLayout

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.models.flat import FlatModel

SLACK = 1e-9
"""Rounding error allowed in a comparison, relative to its larger side."""


@dataclass(frozen=True)
class Problem:
    """The clients' losses ½‖A_k w − b_k‖²: `squares` is A_kᵀA_k, (N, d, d), and `linear` is A_kᵀb_k, (N, d)."""

    squares: np.ndarray
    linear: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Problem:
        """Read the clients' data from a federation file with one real target per sample.

        Raises:
            InputError: the federation's task is not regression.
        """
        with Federation.open(path) as federation:
            if federation.task != "regression":
                expected = "a regression, for kind: dynamics, bounds or surrogate"
                raise InputError("data", where=str(path), expected=expected, got=federation.task)
            clients = [federation.client(k) for k in range(federation.num_clients)]
        pairs = [(x.reshape(len(x), -1).astype(np.float64), y.reshape(-1).astype(np.float64)) for x, y in clients]
        return cls(np.array([x.T @ x for x, _ in pairs]), np.array([x.T @ y for x, y in pairs]))

    @cached_property
    def smoothness(self) -> float:
        """L, the largest eigenvalue of all clients' A_kᵀA_k."""
        return float(np.linalg.eigvalsh(self.squares).max())

    @property
    def convexity(self) -> float:
        """ρ, the smallest eigenvalue of all clients' A_kᵀA_k; 0 if a client has fewer samples than features."""
        return float(max(np.linalg.eigvalsh(self.squares).min(), 0.0))

    @property
    def minimum(self) -> np.ndarray:
        """w*, (d,), the minimizer of the mean loss; of several, the one of least norm."""
        found: np.ndarray = np.linalg.lstsq(self.squares.mean(axis=0), self.linear.mean(axis=0))[0]
        return found

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """Return each client's gradient, (N, d), at `w`: a common point, (d,), or a point per client, (N, d)."""
        return np.einsum("kij,kj->ki", self.squares, np.broadcast_to(w, self.linear.shape)) - self.linear


def weights_of(model: FlatModel, vector: Tensor) -> np.ndarray:
    """Return the weights of a linear model, (d,), from its vector of parameters."""
    found: np.ndarray = model.named(vector)["weight"].numpy().reshape(-1)
    return found


def at_most(smaller: np.ndarray, larger: np.ndarray) -> np.ndarray:
    """Return elementwise whether smaller ≤ larger, up to rounding (`SLACK`)."""
    held: np.ndarray = smaller <= larger * (1 + SLACK)
    return held


def held(left: np.ndarray, right: np.ndarray) -> str:
    """Return text such as ``18 of 20, 0.93``: how many of T entries have left ≤ right, and the last left / right.

    `left` and `right` are (T,) each.
    """
    return f"{int(at_most(left, right).sum())} of {len(left)}, {left[-1] / right[-1]:.2g}"


@dataclass(frozen=True)
class TheoremTable:
    """The table and figures of a kind of measure whose rounds are trained for them, without a record.

    Attributes:
        columns: titles of the columns after case and method.
        note: note below the table, before the experiment's.
        labels: name of a figure per case → label of its vertical axis.
        measure: function of a setting's recipe, and of a folder for files, that trains it; returns the cells below
            `columns`, and figure's name → values after rounds 1, 2, …
        level, logarithmic: see `draw_lines`.
    """

    columns: Sequence[str]
    note: str
    labels: Mapping[str, str]
    measure: Callable[[Recipe, Path], tuple[Sequence[str], Mapping[str, np.ndarray]]]
    level: float | None = None
    logarithmic: bool = False

    def compare(self, experiment: Experiment, layout: ExperimentLayout, folder: Path) -> tuple[Table, list[Path]]:
        """Measure each setting of `layout`; return the table, and the PNG files of the figures, drawn into `folder`.

        Raises:
            InputError: the federation's task is not regression.
            EnvironmentFailure: the disk refuses.
        """
        rows: list[tuple[str, ...]] = []
        lines: dict[tuple[str, str], dict[str, tuple[Sequence[float], np.ndarray]]] = {}
        for number, setting in enumerate(layout.settings):
            title = experiment.methods[setting.method].title
            cells, values = self.measure(layout.recipe_of(number), folder)
            rows.append((experiment.cases[setting.case].title, title, *cells))
            for name, line in values.items():
                lines.setdefault((setting.case, name), {})[title] = range(1, len(line) + 1), line
        look: dict[str, Any] = {"level": self.level, "logarithmic": self.logarithmic}
        pictures = [
            draw_lines(folder, f"{case}-{name}", own, ("round", self.labels[name]), **look)
            for (case, name), own in lines.items()
        ]
        header, note = ("Case", "Method", *self.columns), f"{self.note} {experiment.note}".strip()
        return Table(experiment.title, header, tuple(rows), note), pictures
