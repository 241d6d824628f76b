"""Refusals of rounds that keep each client's update: for a robust mean, or for an observer that asks for them."""

from __future__ import annotations

from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.models.flat import FlatModel
from hpcfed.parts import Parts
from hpcfed.ranks.host_memory import free_memory
from hpcfed.ranks.world import World
from hpcfed.reduce.kept import bytes_needed
from hpcfed.types import Method
from hpcfed.updates._chain import Chain


def check_robust(
    recipe: Recipe, chain: Chain, method: Method, model: FlatModel, cohorts: Cohorts, room: int, world: World
) -> None:
    """Refuse a robust mean of updates that do not fit into this rank's memory, of which `room` bytes are free for them.

    Raises:
        InputError: with the memory that they need.
    """
    if chain.robust is not None:
        name = recipe.means[0].name or recipe.means[0].factory
        remedy = "use a smaller cohort, geometric-median, which needs a rank's own alone, or clip in updates"
        _check_room(f"means: {name}", remedy, method, model, cohorts, room, world, all_of_them=chain.robust.holds_all)


def check_updates(parts: Parts) -> None:
    """Refuse to show clients' updates in runs that hide or lack them, or have no memory for those of a round.

    Raises:
        InputError: why.
    """
    if parts.masks is not None:
        what = "updates of clients: secure_aggregation shows the server none"
        raise InputError(what, remedy="look at the rounds without updates, or leave secure_aggregation out")
    if parts.chain.privacy is not None and parts.chain.privacy.is_central:
        what = "updates of clients: they have no noise of their own, which is added to their mean (means: noise)"
        raise InputError(what, remedy="look at the rounds without updates, or add the noise at the clients (updates)")
    if not parts.method.local.reports_delta:
        got = f"clients that report {', '.join(parts.method.reported(alike=False))}"
        remedy = "look at the rounds without updates; hpcfed.replay(run, round, client).reported has a client's vectors"
        raise InputError("updates of clients", expected="a method whose clients report Δ_i", got=got, remedy=remedy)
    world, remedy = parts.world, "use a smaller cohort, or hpcfed.replay, which has one client's at a time"
    room = free_memory() // world.hosts.count(world.hosts[world.rank]) // 2
    about = parts.method, parts.model, parts.cohorts, room, world
    world.together(lambda: _check_room("updates of clients: a round", remedy, *about, all_of_them=True))


def _check_room(
    what: str,
    remedy: str,
    method: Method,
    model: FlatModel,
    cohorts: Cohorts,
    room: int,
    world: World,
    *,
    all_of_them: bool,
) -> None:
    size, vectors = cohorts.most_members, len(method.reported(alike=False))
    dims = model.vector.numel(), model.vector.element_size()
    needed = bytes_needed(size, *dims, vectors, world.size, all_of_them=all_of_them)
    if needed > room:
        raise InputError(
            f"{what} keeps the updates of {size} clients",
            expected=f"{needed / 2**30:.3g} GiB of memory for each rank",
            got=f"{room / 2**30:.3g} GiB (half of what is free on {world.hosts[world.rank]}, shared by its ranks)",
            remedy=remedy,
        )
