"""Cohorts of a private run: its record omits them, but the holder of the secret seed can draw them again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcfed.assembly.private import with_secret_seeds
from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.ranks.world import World
from hpcfed.reduce.masks import dropouts


def with_cohorts(run: RecordedRun) -> RecordedRun:
    """Return a private run with each row's ``cohort`` and ``skipped`` (dropped clients) filled in; called on one rank.

    A run that is not private is returned unchanged.

    Raises:
        InputError: the run is private, and its secret seed is not available.
    """
    if not run.recipe.is_private:
        return run
    recipe, _ = with_secret_seeds(run.recipe, World())
    with Federation.open(recipe.data) as federation:
        draws = Cohorts(recipe, federation.sizes).clients
    cohorts = [draws(round) for round in range(1, len(run.rows) + 1)]
    skipped = [_dropped(recipe, round, clients) for round, clients in enumerate(cohorts, start=1)]
    drawn = zip(run.rows, cohorts, skipped, strict=True)
    return replace(run, rows=[{**row, "cohort": own.tolist(), "skipped": left} for row, own, left in drawn])


def _dropped(recipe: Recipe, round: int, clients: np.ndarray) -> list[int]:
    """Return the clients that are missing from a round's masked sum: dropped ones, or all if too few remained."""
    section = recipe.secure_aggregation
    if section is None:
        return []
    are = dropouts(recipe.seed.batches, section.dropout, round, len(clients))
    too_few = int((~are).sum()) < section.survivors
    return clients[are | too_few].tolist()
