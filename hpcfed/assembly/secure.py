"""Secure aggregation: what a recipe with it may have, and the masks of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.types import Method
from hpcfed.updates import Chain
from hpcfed.updates.clip import Clip

if TYPE_CHECKING:
    from hpcfed.reduce.masks import Masks


def check_secure(recipe: Recipe, chain: Chain, method: Method, num_clients: int) -> None:
    """Refuse what the server of a secure aggregation cannot see.

    Raises:
        InputError: naming it.
    """
    if recipe.secure_aggregation is None:
        return
    for what, reason, remedy in _without_meaning(recipe, chain, method):
        raise InputError(f"secure_aggregation with {what}: {reason}", remedy=remedy)
    size, least = recipe.cohort.size_in(num_clients), recipe.secure_aggregation.survivors
    if size is not None and size < least:
        expected = f"cohorts of {least} clients or more"
        raise InputError("secure_aggregation.survivors", expected=expected, got=str(size), remedy="raise cohort.size")


def _without_meaning(recipe: Recipe, chain: Chain, method: Method) -> Iterator[tuple[str, str, str]]:
    if not (chain.updates and isinstance(chain.updates[-1], Clip)):
        yield "no clip last in updates", "its bound says how large masked words are", "add {clip: {norm: …}}"
    if recipe.is_private:
        yield "noise", "who drops out would be seen, as the noise is to hide", "leave one of them out"
    if chain.moves_clip:
        yield "clip.quantile", "masked words have the range of a fixed norm", "fix the norm"
    if chain.robust is not None:
        name = recipe.means[0].name or recipe.means[0].factory
        yield f"means: {name}", "it needs each client's vector", "use clip or centred-clip in updates"
    if method.local.scalars or method.client_scalars:
        yield method.name, "its clients report numbers without a bound", "use another method"
    if recipe.update_hashes:
        yield "update_hashes: true", "a hash tells of one client's update", "leave it out"
    if recipe.sentinel == "strict":
        yield "sentinel: strict", "it compares hashes of one client's update", "leave it out: there is no sentinel here"
    if recipe.reduction != "exact":
        yield f"reduction: {recipe.reduction}", "masks cancel in integers alone", "use exact"
    if recipe.evaluate.model == "client-average":
        yield "evaluate.model: client-average", "its vectors have no bound", "use last"
    if recipe.parameters.buffers == "averaged":
        yield "parameters.buffers: averaged", "they have no bound", "use private or fixed"


def masks_of(recipe: Recipe, chain: Chain) -> Masks | None:
    """Return the masks of a run; None without secure aggregation. It loads torch."""
    from hpcfed.reduce.masks import Masks

    section = recipe.secure_aggregation
    if section is None:
        return None
    clip = chain.updates[-1]
    assert isinstance(clip, Clip)
    return Masks(
        lambda name: clip.norm * clip.scales.get(name, 1.0), section.dropout, section.survivors, recipe.seed.batches
    )
