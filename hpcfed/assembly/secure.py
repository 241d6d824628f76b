"""Secure aggregation: what a recipe with it may have, and the masks of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.rng import LARGEST_NORMAL
from hpcfed.types import Method
from hpcfed.updates import Chain
from hpcfed.updates.clip import Clip
from hpcfed.updates.noise import LocalNoise
from hpcfed.updates.weight import Weight

if TYPE_CHECKING:
    from hpcfed.reduce.masks import Masks


def check_secure(recipe: Recipe, chain: Chain, method: Method, most_members: int) -> None:
    """Refuse what the server of a secure aggregation cannot see, and cohorts of `most_members` of whom it opens no sum.

    Raises:
        InputError: naming it.
    """
    if recipe.secure_aggregation is None:
        return
    for what, reason, remedy in _without_meaning(recipe, chain, method):
        raise InputError(f"secure_aggregation with {what}: {reason}", remedy=remedy)
    least = recipe.secure_aggregation.survivors
    if most_members < least:
        expected, remedy = f"cohorts of {least} clients or more", "choose larger cohorts"
        raise InputError("secure_aggregation.survivors", expected=expected, got=str(most_members), remedy=remedy)


def _without_meaning(recipe: Recipe, chain: Chain, method: Method) -> Iterator[tuple[str, str, str]]:
    if _bound_of(chain) is None:
        yield "no clip last in updates", "its bound says how large masked words are", "add {clip: {norm: …}}"
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

    section, clip, privacy = recipe.secure_aggregation, _bound_of(chain), chain.privacy
    if section is None:
        return None
    assert clip is not None

    def bound(name: str) -> float:
        tail = 0.0 if privacy is None or privacy.is_central else LARGEST_NORMAL * privacy.size(name)
        return clip.norm * clip.scales.get(name, 1.0) + tail

    about = section.dropout, section.survivors, recipe.seed.batches
    return Masks(bound, *about, has_numbers=privacy is None)


def _bound_of(chain: Chain) -> Clip | None:
    """Return the clip behind which there is at most a weight, and noise."""
    bounding = [part for part in chain.updates if not isinstance(part, Weight | LocalNoise)]
    return bounding[-1] if bounding and isinstance(bounding[-1], Clip) else None
