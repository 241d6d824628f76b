"""FedDyn's convergence analysis, measured: the terms of its lemmas in each round of a least-squares problem.

    L_k(w) = ½‖A_k w − b_k‖²,    ℓ = mean of all L_k, minimal at w*
    γ_t = w_t + h_t/α                  mean of the cohort's models after round t; γ_0 = w_0
    C_t = mean ‖h_k − ∇L_k(w*)‖²       over all N clients; h_k: ∇L_k at client k's last model, 0 before it has one
    ε_t = mean ‖w_k − γ_{t−1}‖²        over the round's cohort

    ‖γ_t − w*‖² + κ C_t ≤ ‖γ_{t−1} − w*‖² + κ C_{t−1} − κ₀ (ℓ(γ_{t−1}) − ℓ(w*))      Lemma 1, α ≥ 25 L
    ‖γ_t − γ_{t−1}‖² ≤ ε_t                                                           Lemma 3
    ‖h_t‖² ≤ C_t                                                                     Lemma 7
    κ = 8N (L + α) / (|S| α (α² − 20L²)),      κ₀ = 2 (α² − 20αL − 40L²) / (α (α² − 20L²))

with L the largest smoothness and ρ the least strong convexity of an L_k, r = 1 + ρ/α, Σ over t = 0 … T−1:

    Σ (ℓ(γ_t) − ℓ(w*)) / T ≤ (‖γ_0 − w*‖² + κ C_0) / (κ₀ T)                          Theorem 2, α ≥ 25 L
    Σ r^t (ℓ(γ_t) − ℓ(w*)) / Σ r^t ≤ (‖γ_0 − w*‖² + κ C_0) / (κ₀ Σ r^t)              Theorem 3, α ≥ max(5Nρ/|S|, 30 L)
    Σ ‖∇ℓ(γ_t)‖² / T ≤ (ℓ(γ_0) − ℓ(w*)) / (κ₀ T)                                     Theorem 4, α ≥ 20 L N/|S|

Each theorem has its own κ and κ₀ (`constants`, `nonconvex_constant`). Theorem 4 is stated for clients that begin at
γ_0. Theorem 3's κ₀ has a factor 1/α that the paper omits: without this factor, ρ = 0 would not give Lemma 1's κ₀.

Lemma 1 and the theorems bound expectations over cohorts; only if all clients take part do they bound each round. The
lemmas assume exact local minimization; `Dynamics.gap` measures how far the run is from it. A run's record has no client
states, so the rounds are trained here, in one process.

Reference: Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, appendix B.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw_lines
from hpcfed.lab.reproduce.plan import ExperimentLayout
from hpcfed.ranks.world import World

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


@dataclass(frozen=True)
class Dynamics:
    """The terms of FedDyn's lemmas after each of T rounds; arrays (T+1,) begin with the value before round 1.

    Attributes:
        tracked: C_t, the mean of ‖h_k − ∇L_k(w*)‖² over all clients and their states h_k, (T+1,).
        distance, excess: ‖γ_t − w*‖² and ℓ(γ_t) − ℓ(w*), γ_t the mean of the cohort's models, (T+1,).
        slope: ‖∇ℓ(γ_t)‖², (T+1,).
        drift: ε_t, the mean squared distance of the cohort's models from γ_{t−1}, (T,).
        server: ‖h_t‖², h_t the server's state, (T,).
        moved: ‖γ_t − γ_{t−1}‖², (T,).
        gap: largest ‖h_k − ∇L_k(w_k)‖ over the cohort's models w_k, (T,); 0 for exact local minimization.
    """

    tracked: np.ndarray
    distance: np.ndarray
    excess: np.ndarray
    slope: np.ndarray
    drift: np.ndarray
    server: np.ndarray
    moved: np.ndarray
    gap: np.ndarray

    def falls(self, alpha: float, smoothness: float) -> np.ndarray:
        """Return whether FedDyn's Lemma 1 holds in each round, (T,) bool; every cohort must have all clients."""
        kappa, gain = constants(alpha, smoothness)
        potential = self.distance + kappa * self.tracked
        return at_most(potential[1:] + gain * self.excess[:-1], potential[:-1])

    def convex_bound(
        self, alpha: float, smoothness: float, share: float, convexity: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return left and right side of FedDyn's Theorem 2 after 1, …, T rounds, (T,) each.

        If `convexity`, ρ, is positive, they are Theorem 3's. `share` is |S|/N, the cohort's share of the clients.
        """
        kappa, gain = constants(alpha, smoothness, share, convexity)
        powers = (1 + convexity / alpha) ** np.arange(len(self.drift))
        total = powers.cumsum()
        start = self.distance[0] + kappa * self.tracked[0]
        return (powers * self.excess[:-1]).cumsum() / total, start / (gain * total)

    def nonconvex_bound(self, alpha: float, smoothness: float, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Return left and right side of FedDyn's Theorem 4 after 1, …, T rounds, (T,) each; `share` is |S|/N."""
        counts = np.arange(1, len(self.drift) + 1)
        gain = nonconvex_constant(alpha, smoothness, share)
        return self.slope[:-1].cumsum() / counts, self.excess[0] / (gain * counts)


def constants(alpha: float, smoothness: float, share: float = 1.0, convexity: float = 0.0) -> tuple[float, float]:
    """Return κ and κ₀ of FedDyn's Theorem 3 (Lemma 8), or of Lemma 1 if `convexity`, ρ, is 0; `share` is |S|/N."""
    a, s, p, c = alpha, smoothness, share, convexity
    scale = a**3 * p + a**2 * c * (p - 1) - 20 * a * s**2 * p + 4 * s**2 * c - 20 * s**2 * p * c
    gain = 2 * a**3 * p + 2 * a**2 * c * (p - 1) - 40 * a**2 * s * p - 80 * a * s**2 * p
    gain += -40 * a * s * p * c + 8 * a * s * c + 16 * s**2 * c - 80 * s**2 * p * c
    return 8 * (s + a) / scale, gain / (a * scale)


def nonconvex_constant(alpha: float, smoothness: float, share: float) -> float:
    """Return κ₀ of FedDyn's Theorem 4 (Lemma 10); `share` is |S|/N."""
    a, s, p = alpha, smoothness, share
    scale = a**2 * p**2 - 32 * s**2 + 16 * s**2 * p - 20 * s**2 * p**2
    return (a**2 * p**2 - 4 * a * s * p**2 - 32 * s**2 - 16 * s**2 * p - 24 * s**2 * p**2) / (2 * a * scale)


def at_most(smaller: np.ndarray, larger: np.ndarray) -> np.ndarray:
    """Return elementwise whether smaller ≤ larger, up to rounding (`SLACK`)."""
    held: np.ndarray = smaller <= larger * (1 + SLACK)
    return held


def measure_dynamics(recipe: Recipe, problem: Problem) -> Dynamics:
    """Train a resolved recipe (FedDyn, linear model, uniform weights); return the lemmas' terms in each round.

    `problem` is read from the recipe's federation.
    """
    from hpcfed.simulation import Simulation

    parts, _ = assemble(recipe, World())
    simulation, alpha = Simulation(parts), float(parts.method.parameters()["alpha"])
    optimum = problem.minimum
    at_optimum, curvature = problem.gradients(optimum), problem.squares.mean(axis=0)
    states = np.zeros_like(problem.linear)
    w = gamma = parts.model.named(simulation.w)["weight"].numpy().reshape(-1)
    start = (float(((states - at_optimum) ** 2).sum(axis=1).mean()), *_error(gamma - optimum, curvature))
    points, rounds = [start], []
    with parts.clients:
        for number in range(1, recipe.rounds + 1):
            cohort = simulation.round(number).cohort.clients
            before = states[cohort]
            for client in cohort.tolist():
                state = parts.clients.get(client) or {}
                states[client] = parts.model.named(state["h"])["weight"].numpy().reshape(-1)
            models = w - (states[cohort] - before) / alpha
            w, h = (parts.model.named(vector)["weight"].numpy().reshape(-1)
                    for vector in (simulation.w, simulation.server["h"]))  # fmt: skip
            drift, last, gamma = ((models - gamma) ** 2).sum(axis=1).mean(), gamma, w + h / alpha
            exact = np.zeros_like(states)
            exact[cohort] = models
            gap = np.linalg.norm(states - problem.gradients(exact), axis=1)[cohort].max()
            rounds.append((drift, h @ h, ((gamma - last) ** 2).sum(), gap))
            tracked = float(((states - at_optimum) ** 2).sum(axis=1).mean())
            points.append((tracked, *_error(gamma - optimum, curvature)))
    return Dynamics(*np.array(points).T, *np.array(rounds).T)


def _error(difference: np.ndarray, curvature: np.ndarray) -> tuple[float, float, float]:
    """Return ‖γ − w*‖², ℓ(γ) − ℓ(w*) and ‖∇ℓ(γ)‖²; `difference` is γ − w*, `curvature` the Hessian of ℓ."""
    slope = curvature @ difference
    return float(difference @ difference), float(difference @ slope) / 2, float(slope @ slope)


def compare_dynamics(experiment: Experiment, layout: ExperimentLayout, folder: Path) -> tuple[Table, list[Path]]:
    """Train each setting of `layout`; return a table, and the PNG files of two figures per case, drawn into `folder`.

    ``18 of 20`` in the table: a lemma holds in 18 of 20 rounds; a theorem holds for 18 of the numbers of rounds T = 1,
    …, 20.

    Raises:
        InputError: the federation's task is not regression.
        EnvironmentFailure: the disk refuses.
    """
    rows: list[tuple[str, ...]] = []
    found: dict[str, dict[str, Dynamics]] = {name: {} for name in experiment.cases}
    for number, setting in enumerate(layout.settings):
        recipe = layout.recipe_of(number)
        problem = Problem.read(recipe.data)
        one = measure_dynamics(recipe, problem)
        case, method = experiment.cases[setting.case], experiment.methods[setting.method]
        found[setting.case][method.title] = one
        rows.append((case.title, method.title, *_cells(one, recipe, problem)))
    header = ("Case", "Method", "α/L", "Lemma 1", "Lemma 3", "Lemma 7", "Theorem 2", "Theorem 3", "Theorem 4",
              "C_t", "ε_t", "‖h_t‖²", "Largest gap")  # fmt: skip
    note = (
        "Rounds in which each lemma, and numbers T of rounds for which each theorem holds, with the left side's share "
        f"of the right one after the last round; terms after the first and the last round. {experiment.note}"
    ).strip()
    pictures = [path for name, own in found.items() if own for path in _draw(name, own, folder)]
    return Table(experiment.title, header, tuple(rows), note), pictures


def _cells(one: Dynamics, recipe: Recipe, problem: Problem) -> Sequence[str]:
    alpha, smoothness, total = recipe.algorithm.model_dump()["alpha"], problem.smoothness, len(one.drift)
    clients = len(problem.linear)
    cohort = recipe.cohort.size_in(clients) or clients
    bounded = cohort == clients and alpha >= 25 * smoothness
    counts = [int(at_most(one.moved, one.drift).sum()), int(at_most(one.server, one.tracked[1:]).sum())]
    terms = [f"{values[0]:.2g} → {values[-1]:.2g}" for values in (one.tracked[1:], one.drift, one.server)]
    first = f"{int(one.falls(alpha, smoothness).sum())} of {total}" if bounded else "–"
    held = [f"{count} of {total}" for count in counts]
    share, convexity = cohort / clients, problem.convexity
    theorems = [
        _theorem(one.convex_bound(alpha, smoothness, share), applies=alpha >= 25 * smoothness),
        _theorem(
            one.convex_bound(alpha, smoothness, share, convexity),
            applies=convexity > 0 and alpha >= max(5 * convexity / share, 30 * smoothness),
        ),
        _theorem(one.nonconvex_bound(alpha, smoothness, share), applies=alpha >= 20 * smoothness / share),
    ]
    return f"{alpha / smoothness:.2f}", first, *held, *theorems, *terms, f"{one.gap.max():.1e}"


def _theorem(sides: tuple[np.ndarray, np.ndarray], *, applies: bool) -> str:
    left, right = sides
    return f"{int(at_most(left, right).sum())} of {len(left)}, {left[-1] / right[-1]:.2g}" if applies else "–"


def _draw(name: str, found: Mapping[str, Dynamics], folder: Path) -> list[Path]:
    """Draw a figure of C_t and one of ε_t against rounds, with a line per method; return the PNG files."""
    written = []
    for word, label in (("tracked", "C_t"), ("drift", "ε_t")):
        columns = {title: getattr(one, word)[-len(one.drift) :] for title, one in found.items()}
        lines = {title: (range(1, len(column) + 1), column) for title, column in columns.items()}
        written.append(draw_lines(folder, f"{name}-{word}", lines, ("round", label), logarithmic=True))
    return written
