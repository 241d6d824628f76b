"""FedExP's condition (6) and its consequences, measured on the rounds of a run with known minimum w*.

With uniform weights and D_t = ‖w^t − w*‖², all terms are in a run's record:

    ⟨w − w*, Δ̄⟩ = (D_t − D_{t+1} + η_g² ‖Δ̄‖²) / 2η_g                                    eq. (7)
    residual    = mean ‖w_i − w*‖² / D_t = 1 + (mean ‖Δ_i‖² − 2⟨w − w*, Δ̄⟩) / D_t
    η_opt       = ⟨w − w*, Δ̄⟩ / ‖Δ̄‖²                                                     eq. (8)

and condition (6) holds where the residual is at most 1.

Where (6) holds |η_opt − η_g| ≤ |η_opt − 1|, and η_g ≤ η_opt unless the maximum makes it 1.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, sections 3.2 and 3.3, Lemma 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hpcfed.data.federation import Federation
from hpcfed.lab.report.read import Run
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw_lines
from hpcfed.lab.reproduce.inputs import Places
from hpcfed.lab.reproduce.measure import SettingRuns
from hpcfed.run_folder.rounds import RECORD, read_rounds

SLACK = 1e-9
"""Relative rounding error allowed in a comparison."""


@dataclass(frozen=True)
class Projections:
    """The rounds of a run, each array (T,).

    Attributes:
        distance: ‖w − w*‖² after each round.
        residual: mean ‖w_i − w*‖² over ‖w − w*‖², of the model at the round's start; at most 1 where (6) holds.
        optimal, used: η_opt, the server step that comes closest to w*, and η_g, the one taken.
        falls: whether the distance decreased.
    """

    distance: np.ndarray
    residual: np.ndarray
    optimal: np.ndarray
    used: np.ndarray
    falls: np.ndarray

    @property
    def holds(self) -> np.ndarray:
        """Whether condition (6) holds."""
        return self.residual <= 1 + SLACK

    @property
    def closer(self) -> np.ndarray:
        """Whether η_g is at least as close to η_opt as 1 is."""
        return np.abs(self.optimal - self.used) <= np.abs(self.optimal - 1) * (1 + SLACK)

    @property
    def within(self) -> np.ndarray:
        """Whether η_g is at most η_opt, or is 1."""
        return (self.used <= self.optimal * (1 + SLACK)) | (self.used == 1)


def projections(first: float, distance: np.ndarray, columns: Mapping[str, np.ndarray]) -> Projections:
    """Return the terms of each round.

    Args:
        first: ‖w⁰ − w*‖².
        distance: (T,) after each round.
        columns: ``server_lr`` (nan counts as 1), ``delta_sq`` and ``mean_delta_sq``, each (T,).
    """
    before = np.concatenate([[first], distance[:-1]])
    used = np.nan_to_num(columns["server_lr"], nan=1.0)
    inner = (before - distance + used**2 * columns["delta_sq"]) / (2 * used)
    residual = 1 + (columns["mean_delta_sq"] - 2 * inner) / before
    return Projections(distance, residual, inner / columns["delta_sq"], used, distance < before)


def compare_projections(
    experiment: Experiment, measured: Sequence[SettingRuns], places: Places, folder: Path
) -> tuple[Table, list[Path]]:
    """Return the number of rounds in which each statement held, and each case's figure of residuals, in `folder`."""
    rows, pictures = [], []
    for name, case in experiment.cases.items():
        first, dimension, largest = _problem(places.federation(case.data, 0), places.start(case.data, 0))
        found = {one.title: _of_run(one.runs[0], first, dimension) for one in measured
                 if one.setting.case == name and 0 in one.runs}  # fmt: skip
        for title, one in found.items():
            held = one.holds
            numbers = (held.sum(), (one.closer & held).sum(), (one.within & held).sum(), one.falls.sum())
            cells = [f"{number} of {total}" for number, total in zip(
                numbers, (len(held), held.sum(), held.sum(), len(held)), strict=True)]  # fmt: skip
            rows.append((case.title, title, f"{largest:.1f}", *cells, f"{one.residual.max():.4f}"))
        pictures.append(_draw(name, found, folder))
    header = ("Case", "Method", "L", "(6) holds", "η_g closer than 1", "η_g ≤ η_opt or 1", "Distance falls",
              "Largest residual")  # fmt: skip
    note = (
        "Rounds; those with η_g closer to η_opt than 1 is, and with η_g ≤ η_opt or 1, are of those in which (6) holds. "
        "L: the largest smoothness of a client. "
        f"Residual: the clients' mean squared distance from w* over the model's. {experiment.note}"
    )
    return Table(experiment.title, header, tuple(rows), note.strip()), pictures


def _problem(path: Path, start: Path | None) -> tuple[float, int, float]:
    """Return ‖w⁰ − w*‖², d, and the largest eigenvalue of a client's A_iᵀA_i, of a regression with test set (I, w*)."""
    with Federation.open(path) as federation:
        optimum = federation.test(0, federation.num_test)[1].reshape(-1).astype(np.float64)
        clients = [federation.client(k)[0] for k in range(federation.num_clients)]
    largest = max(float(np.linalg.norm(x.astype(np.float64), 2)) ** 2 for x in clients)
    origin = load_file(start)["weight"].reshape(-1) if start else np.zeros(len(optimum))
    return float(((origin - optimum) ** 2).sum()), len(optimum), largest


def _of_run(run: Run, first: float, dimension: int) -> Projections:
    rows = read_rounds(run.folder / RECORD)
    names = ("test_loss", "server_lr", "delta_sq", "mean_delta_sq")
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in names}
    return projections(first, 2 * dimension * columns["test_loss"], columns)


def _draw(name: str, found: Mapping[str, Projections], folder: Path) -> Path:
    lines = {title: (range(1, len(one.residual) + 1), one.residual) for title, one in found.items()}
    labels = "round", "mean squared distance of clients' models over the model's"
    return draw_lines(folder, f"{name}-residuals", lines, labels, level=1)
