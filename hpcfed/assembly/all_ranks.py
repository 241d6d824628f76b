"""Set-up of a run's parts on all ranks together; torch is loaded here, and not before."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hpcfed.assembly.auto_device import chosen
from hpcfed.assembly.private import with_secret_seeds
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.blame import own_code_named
from hpcfed.data.federation import Federation
from hpcfed.data.staging import open_federation
from hpcfed.errors import InputError, shown
from hpcfed.ranks.devices import DeviceSlot, WorldDevices, device_faults, take_device_slot
from hpcfed.ranks.platform.malloc import keep_freed_memory
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.run_folder.code import check_hosts

if TYPE_CHECKING:
    from hpcfed.evaluation.evaluate import Evaluator
    from hpcfed.parts import Parts
    from hpcfed.types import Method


def assemble(
    recipe: Recipe,
    world: World,
    device_slot: DeviceSlot | None = None,
    watchdog: Watchdog | None = None,
    *,
    began_on: str | None = None,
) -> tuple[Parts, Evaluator]:
    """Build the parts of a resolved recipe's simulation on every rank; called on every rank.

    Without a `device_slot`, only the ranks of this world share their nodes' devices. The parts tell their stages to the
    `watchdog`, if there is one. `began_on` is the kind of device that ``device: auto`` took for the rounds before.

    Raises:
        InputError: the model does not fit the federation, or cannot be built, the recipe's device is missing, or the
            method reports other vectors or scalars, or has other factors, on another rank.
        EnvironmentFailure: a GPU cannot be used, or memory is short.
    """
    recipe, key = with_secret_seeds(recipe, world)
    federation = open_federation(recipe.data, recipe.data_access, world)
    try:
        device, work = chosen(recipe, federation, world, began_on)
        own = device_slot or take_device_slot(device, world)
        if device == "cpu":
            own = replace(own, index=None, sharing=own.neighbours)
        checked = own_code_named()(device_faults(world)(_assemble))
        devices = WorldDevices.of(world, own)
        others = federation, world, own, devices, watchdog or Watchdog(world), work, key
        assembled = world.together(partial(checked, recipe, *others))
        if devices.are_mixed and not _cut_alike(assembled[0], world):
            alone = _one_by_one(recipe)
            parts, evaluator = world.together(partial(checked, alone, *others))
            choice = replace(parts.engine_choice, why="a GPU and a CPU would take tiles of different sizes")
            assembled = replace(parts, engine_choice=choice), evaluator
        _record_alike(assembled[0], world)
        check_hosts(recipe, world)
        _check_reports(assembled[0].method, world)
        if recipe.algorithm.factory is not None and assembled[0].method.normalize is not None:
            _check_factors(assembled[0], world)
    except BaseException:  # whose traceback would hold the file open
        federation.close()
        raise
    keep_freed_memory()  # only now: the memory for sorting a large index went back to the system
    return assembled


def _assemble(
    recipe: Recipe,
    federation: Federation,
    world: World,
    device_slot: DeviceSlot,
    devices: WorldDevices,
    watchdog: Watchdog,
    step_work: int | None,
    key: bytes | None,
) -> tuple[Parts, Evaluator]:
    from hpcfed.assembly.parts import parts_of

    return parts_of(recipe, federation, world, device_slot, devices, watchdog, step_work, key)


def _cut_alike(parts: Parts, world: World) -> bool:
    """Whether all ranks cut a cohort into the same tiles, from which its placement follows; called on every rank."""
    return len({*world.gather((parts.engine.tile, parts.engine.fixed_slots))}) == 1


def _record_alike(parts: Parts, world: World) -> None:
    """Let no rank record its clients' work as graphs where one cannot; called on every rank."""
    graphs = parts.engine.graphs
    hindrances = world.gather("" if graphs is None else graphs.hindrance)
    if graphs is not None and any(hindrances):
        graphs.give_up(next(filter(None, hindrances)))


def _one_by_one(recipe: Recipe) -> Recipe:
    """Return the recipe with clients trained one after another.

    Raises:
        InputError: it asks for tiles.
    """
    if recipe.local.engine == "batched" or recipe.local.tile != "auto":
        what = "local.engine: batched on GPUs and CPUs, which would take tiles of different sizes for this recipe"
        raise InputError(what, remedy="leave local.engine and local.tile out, or use device: cpu")
    local = recipe.local.model_copy(update={"engine": "sequential"})
    return recipe.model_copy(update={"local": local})


def _check_reports(method: Method, world: World) -> None:
    """Refuse a method whose ranks would reduce buffers of other layouts; called on every rank.

    Raises:
        InputError: naming the first rank whose vectors or scalars are not those of rank 0.
    """
    own = {"vectors": [method.reported(alike) for alike in (False, True)], "scalars": list(method.local.scalars)}
    first, *others = world.gather(own)
    for rank, other in enumerate(others, start=1):
        for what, names in other.items():
            if names != first[what]:
                raise InputError(
                    f"{method.name}: the reported {what} are not the same on every rank",
                    expected=f"{shown(first[what])} of rank 0",
                    got=f"{shown(names)} of rank {rank} on {world.hosts[rank]}",
                    remedy="neither the rank nor a clock, a random number or the order of a set may decide their names",
                )


def _check_factors(parts: Parts, world: World) -> None:
    """Refuse an own normalisation whose factors of the first round differ between ranks; called on every rank.

    Different processors may round them differently.

    Raises:
        InputError: naming the first rank whose factors are not those of rank 0.
    """
    from hpcfed.client.work import effective_steps_and_factors, same_factors

    method = parts.method
    own = effective_steps_and_factors(method, parts.stepping, parts.cohorts.round(1), 1)[1]
    same = world.gather(same_factors(own, world.broadcast(own)))
    if not all(same):
        rank = same.index(False)
        raise InputError(
            f"{method.name}: the factors of round 1 are not the same on every rank",
            expected="those of rank 0",
            got=f"others of rank {rank} on {world.hosts[rank]}",
            remedy="neither the rank nor a clock, a random number or the order of a set may decide them",
        )
