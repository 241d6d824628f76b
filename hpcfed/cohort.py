"""The cohort of a round, its weights and its steps: the same on every rank, without communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.config.recipe import Local, Recipe
from hpcfed.errors import InputError
from hpcfed.io.text import parse_json, read_text
from hpcfed.rng import Purpose, stream

MAX_EMPTY_DRAWS = 1000
"""Number of empty Bernoulli cohorts after which a nonempty one is drawn directly."""
LEAST_EXPECTED = 0.01
"""Clients that a cohort of FedDyn's code must have in expectation: a hundred draws for one that is not empty."""


@dataclass(frozen=True)
class Cohort:
    """One round's clients.

    Attributes:
        clients: (S,) int64, distinct; none of them where all that were drawn are left out (``cohort.without``).
        shares: p_i = q_i / q(S), (S,) float64; they sum to 1, or are all 0 if no member has samples.
        counts: |S| p_i, (S,) float64, one quotient each: exactly 1 where weights are equal.
        fraction: q(S).
        steps: τ_i, (S,) int64; 0 for a client without samples.
        guessed: τ'_i, steps to guess after them, (S,) float64; ``inf`` for the limit.
        work: samples that each will visit, (S,) int64; the cost of its training.
    """

    clients: np.ndarray
    shares: np.ndarray
    counts: np.ndarray
    fraction: float
    steps: np.ndarray
    guessed: np.ndarray
    work: np.ndarray


def members(cohort: Cohort, which: np.ndarray | list[int]) -> Cohort:
    """Return some members of a cohort, by place or as (S,) bool, with the shares that they have in the whole."""
    each = ("clients", "shares", "counts", "steps", "guessed", "work")
    return replace(cohort, **{name: getattr(cohort, name)[which] for name in each})


class Cohorts:
    """Draws the cohorts of a recipe over a federation.

    Args:
        recipe: resolved; its ``cohort``, ``budget``, ``local``, ``seed``, ``rounds``, and ``weights``: ``samples``
            (q_i = n_i/n) or ``uniform`` (q_i = 1/N).
        sizes: samples per client, (N,).

    Attributes:
        present: (N,) bool, false for the clients of ``cohort.without``.
        measured: (N,) bool, whose data count in evaluations.
        mean_size: mean number of samples of the clients present.
        draws: average number of rounds in which a client takes part.

    Raises:
        InputError: a cohort larger than the federation, or a schedule that does not fit it, or no client is left.
    """

    def __init__(self, recipe: Recipe, sizes: np.ndarray):
        self._recipe = recipe
        self._sizes = sizes
        self.present = present_in(recipe, len(sizes))
        without = recipe.cohort.without
        self.measured = measured_in(recipe, len(sizes))
        self._num_present = int(self.present.sum())
        self.mean_size = float(sizes[self.present].mean())
        self._by_samples = recipe.weights == "samples"
        self._num_samples, self._num_present_samples = sizes.sum(), sizes[self.present].sum()
        self._redraws = without is not None and without.cohorts == "redrawn"
        self._listed = [] if recipe.cohort.schedule is None else self._schedule(recipe.cohort.schedule)
        self._scheduled = [self._listed[round % len(self._listed)] for round in range(recipe.rounds) if self._listed]
        self._drawn, self.draws = self._sampler()
        self._budgets = self._read_budgets()

    def round(self, round: int) -> Cohort:
        """Return the cohort of a round, counted from 1."""
        clients = self.clients(round)
        sizes = self._sizes[clients]
        q = self._shares_of_all(sizes, everyone=not self._redraws)
        fraction = float(q.sum())
        shares = q / fraction if fraction > 0 else np.zeros(len(q))
        if self._num_present < len(self._sizes):
            fraction = float(self._shares_of_all(sizes, everyone=False).sum())
        counts = len(q) * sizes / max(sizes.sum(), 1) if self._by_samples else np.ones(len(q))
        steps = self._steps(round, clients)
        batch_size = self._recipe.local.batch_size
        work = steps * (sizes if batch_size == "full" else np.minimum(sizes, int(batch_size)))
        return Cohort(clients, shares, counts, fraction, steps, self._guessed(steps), work)

    @property
    def most_participants(self) -> int:
        """Clients that can have taken part by the last round, expected under Bernoulli sampling."""
        return min(self._num_present, math.ceil(self.draws * self._num_present - 1e-9))

    @property
    def most_members(self) -> int:
        """Members of the largest cohort, ``cohort.without`` counted as present; expected under Bernoulli sampling."""
        section, num_clients = self._recipe.cohort, len(self._sizes)
        if section.schedule is not None:
            return max(map(len, self._scheduled))
        if section.sampling == "bernoulli" and section.fraction is not None:
            return max(1, math.ceil(section.fraction * num_clients - 1e-9))
        return section.size_in(num_clients) or num_clients

    @property
    def most_listed(self) -> int:
        """`most_members`, of a schedule those of any row: tiles are sized by it, so that more rounds change none."""
        if self._recipe.cohort.schedule is None:
            return self.most_members
        return min(max(map(len, self._listed)), len(self._sizes))

    @property
    def fewest_members(self) -> int:
        """Members of non-zero weight that every cohort has at least; 0 under Bernoulli sampling."""
        counted = self.present & (self._sizes > 0) if self._by_samples else self.present
        section = self._recipe.cohort
        if section.schedule is not None:
            return min(int(counted[self._drawn(round)].sum()) for round in range(1, self._recipe.rounds + 1))
        if section.sampling == "bernoulli" and (section.size, section.fraction) != (None, None):
            return 0
        pool = self._num_present if self._redraws else len(self._sizes)
        size = section.size_in(pool) or pool
        return max(0, size - (pool - int(counted.sum())))

    @property
    def typical_steps(self) -> np.ndarray:
        """Steps of each client in a round, (N,): of a drawn budget evenly from its range, of a schedule the most."""
        local, budget = self._recipe.local, self._recipe.budget
        asked: list[int | None] = [local.steps] * len(self._sizes)
        if budget is not None and budget.low is not None and budget.high is not None:
            asked = np.linspace(budget.low, budget.high, len(self._sizes)).round().astype(int).tolist()
        elif self._budgets is not None:
            asked = [max(max(row, default=0) for row in self._budgets)] * len(self._sizes)
        return _num_steps(self._sizes, local, asked)

    @property
    def without_samples(self) -> int:
        """Clients without samples that count in the mean with an update of 0, as they do where weights are uniform."""
        return 0 if self._by_samples else int((self._sizes[self.present] == 0).sum())

    @property
    def never(self) -> list[int]:
        """Numbers of the clients present, with samples, that ``cohort.schedule`` has in no round."""
        if not self._scheduled:
            return []
        filled = np.flatnonzero(self.present & (self._sizes > 0))
        return np.setdiff1d(filled, [client for row in self._scheduled for client in row]).tolist()

    def idle(self, ranks: int) -> str:
        """Return a remark if a cohort has fewer clients than there are ranks, so that some always wait; else ""."""
        section, size = self._recipe.cohort, self.draws * self._num_present / self._recipe.rounds
        if ranks <= max(size, 1):
            return ""
        if section.schedule is not None or section.sampling == "bernoulli":
            return f"cohorts of about {size:.1f} for {ranks} ranks: at least {ranks - size:.1f} wait on average"
        waiting = ranks - round(size)
        idle = "1 rank waits" if waiting == 1 else f"{waiting} ranks wait"
        return f"cohorts of {size:.0f} for {ranks} ranks: at least {idle} in each round"

    def after(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `work` of the round that follows; of nobody after the last one."""
        nobody = np.empty(0, np.int64)
        return self.work(round + 1) if round < self._recipe.rounds else (nobody, nobody)

    def clients(self, round: int) -> np.ndarray:
        """Return the members of a round's cohort: those drawn that are present."""
        drawn = self._drawn(round)
        return drawn if self._num_present == len(self._sizes) else drawn[self.present[drawn]]

    def work(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the members of a round's cohort and their steps τ_i, (S,) each."""
        clients = self.clients(round)
        return clients, self._steps(round, clients)

    def most_work(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return all clients that may be members of a round's cohort, and the most steps that each may take in it.

        Draws have no part in it: a secret seed, of which other cohorts and budgets are drawn, is not needed.
        """
        section, budget = self._recipe.cohort, self._recipe.budget
        is_drawn = section.schedule is None and (section.size, section.fraction) != (None, None)
        clients = np.flatnonzero(self.present) if is_drawn else self.clients(round)
        if self._budgets is not None and not is_drawn:
            return clients, self._steps(round, clients)
        asked = self._recipe.local.steps
        if budget is not None:
            asked = budget.high if self._budgets is None else max(self._budgets[round - 1])
        return clients, _num_steps(self._sizes[clients], self._recipe.local, [asked] * len(clients))

    def _shares_of_all(self, sizes: np.ndarray, *, everyone: bool) -> np.ndarray:
        """Return q_i, (S,), of members with these samples: over all clients of the federation, or those present.

        p_i = q_i / Σ q is the same of both, up to its last bit. ``without.cohorts: empty`` takes q over all clients, so
        that rounds without the missing ones keep their bits; ``redrawn`` takes it over those present, as a federation
        file that lacks the others would.
        """
        if not self._by_samples:
            return np.full(len(sizes), 1 / (len(self._sizes) if everyone else self._num_present))
        return sizes / max(self._num_samples if everyone else self._num_present_samples, 1)

    def _sampler(self) -> tuple[Callable[[int], np.ndarray], float]:
        """Return a function round → clients drawn, and the average number of rounds in which a client takes part."""
        section = self._recipe.cohort
        if section.schedule is not None:
            members = sum(int(self.present[row].sum()) for row in self._scheduled)
            if not members:
                remedy = "leave cohort.without out, or choose another schedule"
                raise InputError("cohort.without: no round of cohort.schedule has a client left", remedy=remedy)
            return lambda round: np.array(self._scheduled[round - 1], dtype=np.int64), members / self._num_present
        if not self._redraws:
            return self._drawn_among(len(self._sizes))
        numbers = np.flatnonzero(self.present)
        draw, draws = self._drawn_among(len(numbers))
        return lambda round: numbers[draw(round)], draws

    def _drawn_among(self, num_clients: int) -> tuple[Callable[[int], np.ndarray], float]:
        """Return a function round → drawn of so many clients, and the average number of rounds that draw a client."""
        section, seed, rounds = self._recipe.cohort, self._recipe.seed.cohort, self._recipe.rounds
        size = section.size_in(num_clients) or num_clients
        if size > num_clients:
            is_whole = num_clients == len(self._sizes)
            left, other = ("", "prepare more clients") if is_whole else (" left", "use cohorts: empty")
            who = "client" if num_clients == 1 else "clients"
            raise InputError(
                "cohort.size",
                expected=f"at most the {num_clients} {who}{left} of {self._recipe.data.name}",
                got=str(size),
                remedy=f"make the cohort smaller or {other}",
            )
        if section.sampling == "bernoulli":
            chance = section.fraction if section.fraction is not None else size / num_clients
            if self._recipe.noise_at == "server":  # an empty cohort is a round of noise; drawing again would reveal it
                return lambda round: _joined(stream(seed, Purpose.COHORT, round), num_clients, chance), rounds * chance
            draws = rounds * chance / _prob_nonempty(num_clients, chance)
            if section.stream == "authors":
                _check_chance(num_clients, chance)
                return lambda round: _as_feddyn_draws(seed + round - 1, num_clients, chance), draws
            return lambda round: _bernoulli(stream(seed, Purpose.COHORT, round), num_clients, chance), draws

        def uniform(round: int) -> np.ndarray:
            return np.sort(stream(seed, Purpose.COHORT, round).choice(num_clients, size, replace=False, shuffle=False))

        return uniform, rounds * size / num_clients

    def _schedule(self, schedule: Path | list[list[int]]) -> list[list[int]]:
        """Return all cohorts of a file, those after the last round among them, or of a list of the recipe's."""
        if not isinstance(schedule, Path):
            where, rows, checked = "cohort.schedule", schedule, len(schedule)
        else:
            where, checked = f"cohort.schedule {schedule}", self._recipe.rounds
            rows = _read_schedule(schedule, where, checked)
        for number, row in enumerate(rows[:checked], 1):
            self._check_cohort(row, f"{where}: round {number}")
        return rows

    def _steps(self, round: int, clients: np.ndarray) -> np.ndarray:
        local, budget = self._recipe.local, self._recipe.budget
        asked: list[int | None]
        if self._budgets is not None:
            budgets = np.array(self._budgets[round - 1])
            asked = budgets[self.present[self._drawn(round)]].tolist()
        elif budget is not None and budget.low is not None and budget.high is not None:
            seed = self._recipe.seed.cohort
            asked = [
                int(stream(seed, Purpose.BUDGET, round, k).integers(budget.low, budget.high, endpoint=True))
                for k in clients
            ]
        else:
            asked = [local.steps] * len(clients)
        return _num_steps(self._sizes[clients], local, asked)

    def _guessed(self, steps: np.ndarray) -> np.ndarray:
        """Return guessed steps τ'_i, (S,): a number, the remainder of ``local.steps``, or inf; 0 for empty clients."""
        guess, asked = self._recipe.guess, self._recipe.local.steps
        if guess == "limit" or isinstance(guess, int):
            return np.where(steps > 0, np.inf if guess == "limit" else float(guess), 0.0)
        if guess == "remaining" and asked is not None:
            return np.where(steps > 0, np.maximum(asked - steps, 0), 0).astype(np.float64)
        return np.zeros(len(steps))

    def _read_budgets(self) -> list[list[int]] | None:
        budget = self._recipe.budget
        if budget is None or budget.schedule is None:
            return None
        where = f"budget.schedule {budget.schedule}"
        rows = _read_schedule(budget.schedule, where, self._recipe.rounds)
        for number, row in enumerate(rows[: self._recipe.rounds], 1):
            self._check_budget(row, len(self._drawn(number)), f"{where}: round {number}")
        return rows

    def _check_cohort(self, row: list[int], where: str) -> None:
        num_clients = len(self._sizes)
        if not row or len(set(row)) != len(row):
            raise InputError(where, expected="one or more different clients", got=str(row))
        absent = [client for client in row if not 0 <= client < num_clients]
        if absent:
            raise InputError(f"{where}: no client {absent[0]}", expected=f"clients 0 to {num_clients - 1}")

    @staticmethod
    def _check_budget(row: list[int], cohort_size: int, where: str) -> None:
        if len(row) != cohort_size or min(row, default=1) < 1:
            raise InputError(where, expected=f"{cohort_size} numbers of steps, each at least 1", got=str(row))


def present_in(recipe: Recipe, num_clients: int) -> np.ndarray:
    """Return which clients take part at all, (N,) bool: not those of ``cohort.without``.

    Raises:
        InputError: they are all left out.
    """
    present = np.full(num_clients, True)
    if recipe.cohort.without is not None:
        present[recipe.cohort.without.numbers] = False
    if not present.any():
        raise InputError("cohort.without", expected="at least one client left", got=f"all {num_clients} left out")
    return present


def measured_in(recipe: Recipe, num_clients: int) -> np.ndarray:
    """Return whose data count in evaluations, (N,) bool: all clients', or those of `present_in`."""
    without = recipe.cohort.without
    if without is not None and without.evaluate == "all":
        return np.full(num_clients, True)
    return present_in(recipe, num_clients)


def _num_steps(sizes: np.ndarray, local: Local, asked: Sequence[int | None]) -> np.ndarray:
    """Return clients' numbers of minibatches, (n,): as `asked`, or for None those of ``epochs``; 0 without samples."""
    each = []
    for size, steps in zip(sizes.tolist(), asked, strict=True):
        per_epoch = 1 if local.batch_size == "full" else -(-size // int(local.batch_size))  # with a short last one
        each.append(0 if size == 0 else per_epoch * (local.epochs or 0) if steps is None else steps)
    return np.array(each, np.int64)


def _bernoulli(rng: np.random.Generator, num_clients: int, chance: float) -> np.ndarray:
    """Return a Bernoulli cohort in which each client joins with probability `chance`, conditioned on not being empty.

    After `MAX_EMPTY_DRAWS` empty draws the first client is drawn from its conditional distribution, so that this ends
    for any chance.
    """
    for _ in range(MAX_EMPTY_DRAWS):
        joined = _joined(rng, num_clients, chance)
        if len(joined):
            return joined
    first_at = math.log1p(-rng.random() * _prob_nonempty(num_clients, chance)) / math.log1p(-chance)
    first = min(int(first_at), num_clients - 1)
    return np.append(first, first + 1 + np.flatnonzero(rng.random(num_clients - first - 1) < chance))


def _joined(rng: np.random.Generator, num_clients: int, chance: float) -> np.ndarray:
    """Return the clients, each of which joins with probability `chance`; perhaps none."""
    return np.flatnonzero(rng.random(num_clients) < chance)


def _prob_nonempty(num_clients: int, chance: float) -> float:
    """Return the probability that a Bernoulli draw of so many clients is not empty."""
    return -math.expm1(num_clients * math.log1p(-chance)) if chance < 1 else 1.0


def _check_chance(num_clients: int, chance: float) -> None:
    """Refuse cohorts that the seeds of FedDyn's code would be searched long for."""
    if num_clients * chance < LEAST_EXPECTED:
        raise InputError(
            "cohort.fraction",
            expected=f"at least {LEAST_EXPECTED / num_clients:g} with stream: authors, which tries seeds one by one",
            got=f"{chance:g}",
            remedy="leave cohort.stream out",
        )


def _as_feddyn_draws(seed: int, num_clients: int, chance: float) -> np.ndarray:
    """Return the cohort of FedDyn's code: the first nonempty one of the seeds from `seed` on, legacy generator.

    A round whose draw is empty has the cohort of the round after it: at 1 % of 100 clients a third of all rounds.
    Source: alpemreacar/FedDyn, utils_methods.py, lines 62 to 73.
    """
    while True:
        joined = np.flatnonzero(np.random.RandomState(seed).uniform(size=num_clients) <= chance)
        if len(joined):
            return joined
        seed += 1


def _read_schedule(path: Path, where: str, rounds: int) -> list[list[int]]:
    """Read a JSON list over rounds of lists of whole numbers, those of the recipe's rounds or more."""
    try:
        schedule: Any = parse_json(read_text(path, pipes=True))
    except FileNotFoundError:
        raise InputError(f"{where}: no such file", remedy="check the path in the recipe") from None
    except (OSError, ValueError) as error:
        remedy = "a schedule is a JSON list over rounds of lists of whole numbers"
        raise InputError(f"{where} cannot be read", got=str(error), remedy=remedy) from None
    whole = isinstance(schedule, list) and all(
        isinstance(row, list) and all(type(entry) is int for entry in row) for row in schedule
    )
    if not whole:
        raise InputError(where, expected="a list over rounds of lists of whole numbers")
    if len(schedule) < rounds:
        raise InputError(where, expected=f"a list for each of the {rounds} rounds", got=f"{len(schedule)} lists")
    rows: list[list[int]] = schedule
    return rows
