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
from pathlib import Path

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.config.recipe import Recipe
from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.reproduce.theorems import Problem, TheoremTable, at_most, held, weights_of
from hpcfed.ranks.world import World


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
    w = gamma = weights_of(parts.model, simulation.w)
    start = (float(((states - at_optimum) ** 2).sum(axis=1).mean()), *_error(gamma - optimum, curvature))
    points, rounds = [start], []
    with parts.clients:
        for number in range(1, recipe.rounds + 1):
            cohort = simulation.round(number).cohort.clients
            before = states[cohort]
            for client in cohort.tolist():
                state = parts.clients.get(client) or {}
                states[client] = weights_of(parts.model, state["h"])
            models = w - (states[cohort] - before) / alpha
            w, h = (weights_of(parts.model, vector) for vector in (simulation.w, simulation.server["h"]))
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


def _measured(recipe: Recipe, _: Path) -> tuple[Sequence[str], Mapping[str, np.ndarray]]:
    problem, alpha = Problem.read(recipe.data), recipe.algorithm.model_dump()["alpha"]
    one, smoothness = measure_dynamics(recipe, problem), problem.smoothness
    clients, total, tracked = len(problem.linear), len(one.drift), one.tracked[1:]
    cohort = recipe.cohort.size_in(clients) or clients
    share, convexity = cohort / clients, problem.convexity
    bounded = cohort == clients and alpha >= 25 * smoothness
    lemmas = [
        f"{int(one.falls(alpha, smoothness).sum())} of {total}" if bounded else ABSENT,
        f"{int(at_most(one.moved, one.drift).sum())} of {total}",
        f"{int(at_most(one.server, tracked).sum())} of {total}",
    ]
    theorems = [
        (alpha >= 25 * smoothness, one.convex_bound(alpha, smoothness, share)),
        (
            convexity > 0 and alpha >= max(5 * convexity / share, 30 * smoothness),
            one.convex_bound(alpha, smoothness, share, convexity),
        ),
        (alpha >= 20 * smoothness / share, one.nonconvex_bound(alpha, smoothness, share)),
    ]
    sides = [held(*both) if applies else ABSENT for applies, both in theorems]
    terms = [f"{values[0]:.2g} → {values[-1]:.2g}" for values in (tracked, one.drift, one.server)]
    cells = f"{alpha / smoothness:.2f}", *lemmas, *sides, *terms, f"{one.gap.max():.1e}"
    return cells, {"tracked": tracked, "drift": one.drift}


DYNAMICS = TheoremTable(
    columns=("α/L", "Lemma 1", "Lemma 3", "Lemma 7", "Theorem 2", "Theorem 3", "Theorem 4", "C_t", "ε_t", "‖h_t‖²",
             "Largest gap"),
    note="Rounds in which each lemma, and numbers T of rounds for which each theorem holds, with the left side's share "
    "of the right one after the last round; terms after the first and the last round.",
    labels={"tracked": "C_t", "drift": "ε_t"},
    measure=_measured,
    logarithmic=True,
)  # fmt: skip
