"""FedExP's condition (6) and its consequences, measured in each round of a run whose minimum w* is known.

With uniform weights, D_t = ‖w^t − w*‖² and Δ_i = w − w_i, w_i client i's model, all terms follow from a run's record:

    ⟨w − w*, Δ̄⟩ = (D_t − D_{t+1} + η_g² ‖Δ̄‖²) / 2η_g                                    eq. (7)
    residual    = mean ‖w_i − w*‖² / D_t = 1 + (mean ‖Δ_i‖² − 2⟨w − w*, Δ̄⟩) / D_t
    η_opt       = ⟨w − w*, Δ̄⟩ / ‖Δ̄‖²                                                     eq. (8)

and condition (6) holds in rounds whose residual is at most 1.

In these rounds |η_opt − η_g| ≤ |η_opt − 1|, and η_g ≤ η_opt unless η_g is 1, its lower limit.

FedExP-M steps along v_t = Δ̄ + β v_{t−1}. Without ε its η_g is M_t / 2‖v_t‖², with M_t = m_t + (β/2) M_{t−1} and m_t =
mean ‖Δ_i‖². Hence the record gives ‖v_t‖², then eq. (7) with v for Δ̄ gives ⟨w_t − w*, v_t⟩, and for Δ̄ itself

    ⟨w_t − w*, Δ̄⟩ = ⟨w_t − w*, v_t⟩ − β (⟨w_{t−1} − w*, v_{t−1}⟩ − η_g,t−1 ‖v_{t−1}‖²).

Its η_opt is ⟨w − w*, v⟩ / ‖v‖². Lemma 11: ⟨w − w*, v⟩ ≥ M_t as long as ⟨w − w*, Δ̄⟩ ≥ m_t, as for exact projections.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, sections 3.2 and 3.3, Lemma 1, appendices C.4.1 and F.
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
from hpcfed.lab.reproduce.theorems import SLACK, at_most
from hpcfed.run_folder.rounds import RECORD, read_rounds


@dataclass(frozen=True)
class Projections:
    """The terms of FedExP's condition (6) and its consequences in each of a run's T rounds; arrays are (T,).

    Attributes:
        distance: ‖w − w*‖² after each round.
        residual: mean of the clients' ‖w_i − w*‖², divided by ‖w − w*‖² at the round's start; at most 1 if (6) holds.
        optimal, used: η_opt, the server step that comes closest to w*, and η_g, the server step taken.
        falls: whether the distance decreased.
        assumed: whether ⟨w − w*, Δ̄⟩ ≥ mean ‖Δ_i‖² in this round and all before it, as for exact projections.
        momentum: ⟨w − w*, v⟩ / M_t of FedExP-M, by Lemma 11 at least 1 if `assumed`; None for other methods.
    """

    distance: np.ndarray
    residual: np.ndarray
    optimal: np.ndarray
    used: np.ndarray
    falls: np.ndarray
    assumed: np.ndarray
    momentum: np.ndarray | None = None

    @property
    def holds(self) -> np.ndarray:
        """Whether condition (6) holds in each round, (T,) bool."""
        return self.residual <= 1 + SLACK

    @property
    def closer(self) -> np.ndarray:
        """Whether η_g is at least as close to η_opt as 1 is, (T,) bool."""
        return at_most(np.abs(self.optimal - self.used), np.abs(self.optimal - 1))

    @property
    def within(self) -> np.ndarray:
        """Whether η_g is at most η_opt, or is 1, (T,) bool."""
        return at_most(self.used, self.optimal) | (self.used == 1)


def projections(
    first: float, distance: np.ndarray, columns: Mapping[str, np.ndarray], beta: float | None = None
) -> Projections:
    """Return the terms of FedExP's condition (6) and its consequences in each round.

    Args:
        first: ‖w⁰ − w*‖².
        distance: ‖w − w*‖² after each round, (T,).
        columns: the record's ``server_lr`` (nan counts as 1), ``delta_sq`` and ``mean_delta_sq``, each (T,).
        beta: FedExP-M's β, its ε taken as 0; None for other methods.
    """
    before = np.concatenate([[first], distance[:-1]])
    used, squares = np.nan_to_num(columns["server_lr"], nan=1.0), columns["mean_delta_sq"]
    step_sq, momentum = columns["delta_sq"], None
    if beta is not None:
        discounted = np.array([(beta / 2) ** np.arange(t, -1, -1) @ squares[: t + 1] for t in range(len(squares))])
        step_sq = discounted / (2 * used)
    along = (before - distance + used**2 * step_sq) / (2 * used)
    inner = along
    if beta is not None:
        momentum = along / discounted
        inner = along - beta * np.concatenate([[0.0], (along - used * step_sq)[:-1]])
    residual = 1 + (squares - 2 * inner) / before
    assumed = np.logical_and.accumulate(inner >= squares * (1 - SLACK))
    return Projections(distance, residual, along / step_sq, used, distance < before, assumed, momentum)


def compare_projections(
    experiment: Experiment, measured: Sequence[SettingRuns], places: Places, folder: Path
) -> tuple[Table, list[Path]]:
    """Return a table of the number of rounds in which each statement holds, and the PNG files, one per case.

    Only runs of the first seed count. The figures, drawn into `folder`, show the residuals.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    rows, pictures = [], []
    for name, case in experiment.cases.items():
        seed = experiment.seed_numbers[0]
        first, dimension, largest = _problem(places.federation(case.data, seed), places.start(case.data, seed))
        runs = {one.title: one.runs[0] for one in measured if one.setting.case == name and 0 in one.runs}
        found = {title: _of_run(run, first, dimension) for title, run in runs.items()}
        rates = {title: float(run.recipe["local"]["lr"]) for title, run in runs.items()}
        for title, one in found.items():
            held, exact, all_rounds = one.holds, one.assumed, len(one.holds)
            cells = [
                f"{held.sum()} of {all_rounds}",
                *(f"{(also & held).sum()} of {held.sum()}" for also in (one.closer, one.within)),
                *(f"{these.sum()} of {all_rounds}" for these in (one.falls, exact)),
            ]
            lemma = "–"
            if one.momentum is not None:
                cells[1], lemma = "–", f"{(one.momentum[exact] >= 1 - SLACK).sum()} of {exact.sum()}"
            rows.append(
                (case.title, title, f"{rates[title] * largest:.2f}", *cells, lemma, f"{one.residual.max():.4f}")
            )
        pictures.append(_draw(name, found, folder))
    header = ("Case", "Method", "η_l L", "(6) holds", "η_g closer than 1", "η_g ≤ η_opt or 1", "Distance falls",
              "Exact", "Lemma 11", "Largest residual")  # fmt: skip
    note = (
        "Rounds; those with η_g closer to η_opt than 1 is, and with η_g ≤ η_opt or 1, are of those in which (6) holds. "
        "L: the largest smoothness of a client. Exact: ⟨w − w*, Δ̄⟩ ≥ mean ‖Δ_i‖² so far; of these, Lemma 11. "
        f"Residual: the clients' mean squared distance from w* over the model's. {experiment.note}"
    )
    return Table(experiment.title, header, tuple(rows), note.strip()), pictures


def _problem(path: Path, start: Path | None) -> tuple[float, int, float]:
    """Return ‖w⁰ − w*‖², d, and the largest eigenvalue of all clients' A_iᵀA_i, from a regression's federation file.

    The file's test set has x = I and y = w*; `start` is the file of w⁰, None for w⁰ = 0.
    """
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
    algorithm = run.recipe["algorithm"]
    beta = float(algorithm["beta"]) if algorithm.get("name") == "fedexp-m" else None
    return projections(first, 2 * dimension * columns["test_loss"], columns, beta)


def _draw(name: str, found: Mapping[str, Projections], folder: Path) -> Path:
    lines = {title: (range(1, len(one.residual) + 1), one.residual) for title, one in found.items()}
    labels = "round", "mean squared distance of clients' models over the model's"
    return draw_lines(folder, f"{name}-residuals", lines, labels, level=1)
