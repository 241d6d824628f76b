"""Influence that excluded clients keep on a run: scaling, filled cells, levels of categories, initial model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation

TRAINING_ONLY = "training only"
"""Label of a run whose data were prepared, or whose initial model was made, with the clients' data perhaps."""
TRAINING = "training, and no shared preparation is recorded"


def without_facts(recipe: Recipe, federation: Federation) -> dict[str, Any]:
    """Return the entry ``without`` of ``environment.json``: clients left out, and how exact that is; {} without any."""
    if recipe.cohort.without is None:
        return {}
    clients = {str(k): federation.client_name(k) for k in recipe.cohort.without.numbers}
    since = list(shared_preparation(recipe, federation))
    return {"without": {"clients": clients, "exact": TRAINING_ONLY if since else TRAINING, "since": since}}


def shared_preparation(recipe: Recipe, federation: Federation) -> Iterator[str]:
    """Yield what was computed before training and may depend on every client's data."""
    if federation.normalization is not None:
        yield "x is scaled by constants of the federation file"
    if "filled" in federation.source:
        yield "missing cells were filled by a statistic of all clients"
    if "categories" in federation.source:
        yield "the levels of categories are those of all clients"
    if recipe.model.init is not None:
        yield "the initial model comes from a file"
