"""What is measured: on each number of ranks, cohorts to fit the model to, and one to test it with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed import algorithms
from hpcfed.cohort import Cohorts
from hpcfed.config.load import of_rounds_alone
from hpcfed.config.recipe import Cohort, Recipe
from hpcfed.errors import InputError
from hpcfed.ranks.placement import homes, spread

MODES = ("strong", "weak")
"""``strong``: the same cohort on all numbers of ranks; ``weak``: one that grows with the ranks."""
DRAWN = 10
"""Rounds whose cohorts are drawn and placed, to know how much the slowest rank has to do."""


@dataclass(frozen=True)
class Setting:
    """One thing to measure: S, None for the recipe's own cohorts; and whether it is kept from the fit."""

    cohort: int | None
    held_out: bool = False


@dataclass(frozen=True)
class Load:
    """A round's work in samples visited, averages over rounds: the slowest rank's and the average one's."""

    slowest: float
    average: float


def settings(recipe: Recipe, num_clients: int, mode: str, ranks: int) -> list[Setting]:
    """Return what is measured on so many ranks: the cohort itself and a quarter of it for the fit, a half to test it.

    Raises:
        InputError: the cohort cannot grow with the ranks, or outgrows the federation.
    """
    scheduled = recipe.budget is not None and recipe.budget.schedule is not None
    base = None if scheduled else recipe.cohort.size_in(num_clients)
    if base is None:
        if mode == "weak":
            raise InputError("--mode weak", expected="a cohort of some size or fraction", got="a schedule")
        return [Setting(None)]
    size = base * ranks if mode == "weak" else base
    if size > num_clients:
        got = f"{size} on {ranks} ranks"
        raise InputError("--mode weak", expected=f"cohorts of at most the {num_clients} clients", got=got)
    quarter, half = -(-size // 4), -(-size // 2)
    chosen = [Setting(size), *(Setting(quarter) for _ in range(quarter < size))]
    return [*chosen, *(Setting(half, held_out=True) for _ in range(quarter < half < size))]


def overrides(recipe: Recipe, setting: Setting, rounds: int, output: Path) -> Iterator[str]:
    """Yield what a measured run changes in its recipe: rounds of training and nothing else."""
    yield from of_rounds_alone(rounds, output)
    if setting.cohort is not None:
        yield f"cohort={{size: {setting.cohort}, sampling: {recipe.cohort.sampling}}}"


def load(recipe: Recipe, sizes: np.ndarray, ranks: int, cohort: int | None) -> Load:
    """Return the work of a round on so many ranks, from cohorts drawn over clients of these sizes, (N,), and placed."""
    if cohort is not None:
        section = Cohort(size=cohort, sampling=recipe.cohort.sampling)
        recipe = recipe.model_copy(update={"cohort": section})
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    balanced = recipe.balances(method.local.stateful)
    drawn = Cohorts(recipe, sizes, recipe.weights or method.local.weights)
    home, slowest, average = homes(sizes, ranks), [], []
    for round in range(1, min(DRAWN, recipe.rounds) + 1):
        members = drawn.round(round)
        at_home = home[members.clients]
        where = spread(members.work, at_home, ranks) if balanced else at_home
        per_rank = np.bincount(where, weights=members.work, minlength=ranks)
        slowest.append(per_rank.max())
        average.append(per_rank.mean())
    return Load(float(np.mean(slowest)), float(np.mean(average)))
