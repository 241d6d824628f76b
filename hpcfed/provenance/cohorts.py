"""Who took part in a private run, which its record withholds, drawn again by the holder of its secret seed."""

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
    """Return a run whose rows have their cohorts, and who dropped out of them; on one rank.

    Raises:
        InputError: the run is private, and its secret seed is not at hand.
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
    """Return those of a round's clients that its masked sum is without."""
    section = recipe.secure_aggregation
    if section is None:
        return []
    are = dropouts(recipe.seed.batches, section.dropout, round, len(clients))
    too_few = int((~are).sum()) < section.survivors
    return clients[are | too_few].tolist()
