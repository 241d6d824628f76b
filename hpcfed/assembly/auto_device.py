"""`device: auto`: the GPU, unless a step is so small that its launches would take longer than a CPU's arithmetic.

    S · B · max(d, m)  ≥  LEAST_ON_GPU

S clients of a cohort with minibatches of B samples; d parameters, m multiply-adds of a sample's forward pass, as
torch counts them (convolutions use a parameter often). A rule of the recipe and the data's shape, never of a timing or
the number of ranks: the device decides the last bits of a run. A run goes on with the kind that it began with.
"""

from __future__ import annotations

from hpcfed.assembly.model import multiply_adds
from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.ranks.devices import sees_a_device
from hpcfed.ranks.world import World

LEAST_ON_GPU = 1 << 22
"""Multiply-adds of a cohort's step, forward, from which ``device: auto`` takes a GPU: a CPU's core takes a millisecond
for them and their gradients, as long as the launches of a step."""


def chosen(recipe: Recipe, federation: Federation, world: World, began_on: str | None = None) -> tuple[str, int | None]:
    """Return the device that a recipe's ``device`` stands for, ``auto`` where it is a GPU for the ranks that see one.

    And the multiply-adds of a step where the rule above was asked: the recipe says ``auto``, a rank sees a GPU, and it
    is not known on which kind of device the run `began_on`. Called on every rank.
    """
    if recipe.device == "auto" and began_on is not None:
        return ("cpu" if began_on == "cpu" else "auto"), None
    if recipe.device != "auto" or not any(world.gather(sees_a_device())):
        return recipe.device, None
    work = world.on_root(lambda: step_work(recipe, federation))
    return ("cpu" if work is not None and work < LEAST_ON_GPU else "auto"), work


def refuse_another_device(began_on: str | None, world: World) -> None:
    """Refuse to go on with a run that ``device: auto`` began on a GPU where no rank sees one; called on every rank.

    Raises:
        InputError: so it is.
    """
    if began_on not in (None, "cpu") and not any(world.gather(sees_a_device())):
        what, got = "device: auto: the run here began on a GPU", "none that torch sees, and a CPU's other bits"
        raise InputError(what, expected="a GPU", got=got, remedy="go on where there is one, or start anew with --fresh")


def step_work(recipe: Recipe, federation: Federation) -> int | None:
    """Return S · B · max(d, m), S and B the most of any round; None where the user's module does not say.

    S · B · d, where that is enough.
    """
    sizes, batch = federation.sizes, recipe.local.batch_size
    samples = int(sizes.max()) if batch == "full" else min(int(batch), int(sizes.max()))
    together = Cohorts(recipe, sizes).most_listed * samples
    each = multiply_adds(recipe, federation, enough=-(-LEAST_ON_GPU // max(1, together)))
    return None if each is None else together * each


def remark(work: int | None, device: str) -> str | None:
    """Return the line that is said where the rule takes the CPU though a rank sees a GPU."""
    if work is None or device != "cpu":
        return None
    rule = f"a step of the cohort has {work:,} multiply-adds, and a GPU pays from {LEAST_ON_GPU:,} on"
    return f"device: auto takes the CPU: {rule}; device=cuda takes the GPU"
