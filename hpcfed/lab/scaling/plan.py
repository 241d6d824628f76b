"""The settings of a scaling study: on each number of ranks, cohort sizes to fit the model and one to test it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed import algorithms, updates
from hpcfed.cohort import Cohorts
from hpcfed.config.load import of_rounds_alone
from hpcfed.config.recipe import CohortSection, Recipe
from hpcfed.errors import InputError
from hpcfed.ranks.placement import Placement, homes

DRAWN_ROUNDS = 10
"""Number of rounds whose cohorts are drawn and assigned to ranks to compute a `Load`."""


@dataclass(frozen=True)
class StudySetting:
    """One setting to measure: the cohort's size, None for the recipe's; `held_out`: kept out of the fit, to test it."""

    cohort: int | None
    held_out: bool = False


@dataclass(frozen=True)
class Load:
    """The work of a round on all ranks.

    Attributes:
        slowest, average: samples visited by the slowest rank, and per rank; means over rounds.
        placing: CPU seconds that each rank needs to assign the cohort to ranks and to update its estimates of the
            ranks' speed and the work's cost; the least over rounds, measured on this machine.
    """

    slowest: float
    average: float
    placing: float = 0.0


def settings(recipe: Recipe, num_clients: int, mode: str, ranks: int) -> list[StudySetting]:
    """Return the settings on `ranks` ranks: the full cohort and a quarter of it to fit the model, half of it to test.

    In ``weak`` mode the full cohort grows in proportion to `ranks`. A recipe whose cohorts follow a schedule has one
    setting.

    Raises:
        InputError: in ``weak`` mode, cohorts follow a schedule or outgrow the federation.
    """
    num_clients -= left_out(recipe)
    scheduled = recipe.budget is not None and recipe.budget.schedule is not None
    base = None if scheduled else recipe.cohort.size_in(num_clients)
    if base is None:
        if mode == "weak":
            raise InputError("--mode weak", expected="a cohort of some size or fraction", got="a schedule")
        return [StudySetting(None)]
    size = base * ranks if mode == "weak" else base
    if size > num_clients:
        got = f"{size} on {ranks} ranks"
        raise InputError("--mode weak", expected=f"cohorts of at most the {num_clients} clients", got=got)
    chosen, quarter, half = [StudySetting(size)], -(-size // 4), -(-size // 2)
    if quarter < size:
        chosen.append(StudySetting(quarter))
    if quarter < half < size:
        chosen.append(StudySetting(half, held_out=True))
    return chosen


def overrides(recipe: Recipe, setting: StudySetting, rounds: int, output: Path) -> Iterator[str]:
    """Yield the recipe overrides for measuring a setting: such a run only trains, without evaluation or checkpoint."""
    yield from of_rounds_alone(rounds, output)
    if setting.cohort is not None:
        yield f"cohort={json.dumps(of_size(recipe, setting.cohort).model_dump(mode='json', exclude_none=True))}"


def of_size(recipe: Recipe, size: int) -> CohortSection:
    """Return the recipe's section ``cohort`` changed to `size` clients per round."""
    return recipe.cohort.model_copy(update={"size": size, "fraction": None, "schedule": None})


def left_out(recipe: Recipe) -> int:
    """Return the number of clients in ``cohort.without`` if cohorts are redrawn without them, else 0."""
    without = recipe.cohort.without
    return len(set(without.numbers)) if without is not None and without.cohorts == "redrawn" else 0


def load(recipe: Recipe, sizes: np.ndarray, ranks: int, cohort: int | None) -> Load:
    """Return the load of a round on `ranks` ranks; cohorts are drawn and assigned to ranks, but nothing is trained.

    `sizes`, (N,), holds the clients' sample counts; `cohort` is the cohort's size, None for the recipe's.
    """
    if cohort is not None:
        recipe = recipe.model_copy(update={"cohort": of_size(recipe, cohort)})
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    balanced = recipe.balances(method.local.stateful or updates.build(recipe).stateful)
    drawn = Cohorts(recipe, sizes)
    placement = Placement(homes(sizes, ranks), ranks, balanced=balanced)
    slowest, average, placing = [], [], []
    for round in range(1, min(DRAWN_ROUNDS, recipe.rounds) + 1):
        members = drawn.round(round)
        started = time.process_time()
        where = placement.place(members.clients, members.work, members.steps)
        placed = time.process_time() - started
        per_rank = np.bincount(where, weights=members.work, minlength=ranks)
        started = time.process_time()
        placement.learn(where, members.work, members.steps, per_rank)
        placing.append(placed + time.process_time() - started)
        slowest.append(per_rank.max())
        average.append(per_rank.mean())
    return Load(float(np.mean(slowest)), float(np.mean(average)), min(placing))
