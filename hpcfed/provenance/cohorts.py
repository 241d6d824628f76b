"""The cohorts of a private run, which its record withholds, drawn again by the holder of its secret seed."""

from __future__ import annotations

from dataclasses import replace

from hpcfed.assembly.private import with_secret_seeds
from hpcfed.cohort import Cohorts
from hpcfed.data.federation import Federation
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.ranks.world import World


def with_cohorts(run: RecordedRun) -> RecordedRun:
    """Return a run whose rows have their cohorts; on one rank.

    Raises:
        InputError: the run is private, and its secret seed is not at hand.
    """
    if not run.recipe.is_private:
        return run
    recipe, _ = with_secret_seeds(run.recipe, World())
    with Federation.open(recipe.data) as federation:
        draws = Cohorts(recipe, federation.sizes).clients
    rows = [{**row, "cohort": draws(round).tolist()} for round, row in enumerate(run.rows, start=1)]
    return replace(run, rows=rows)
