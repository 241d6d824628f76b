"""A recorded run rewound to the beginning of a round: restored from the last checkpoint before it, then trained on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from hpcfed.assembly import assemble
from hpcfed.config.user_code.settings import settings_now
from hpcfed.errors import InputError
from hpcfed.parts import Parts
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.ranks.world import World
from hpcfed.run_folder.checkpoint.layout import layout_of_states
from hpcfed.run_folder.checkpoint.restore import CheckpointReader, holds
from hpcfed.run_folder.folder import kind_of_device
from hpcfed.simulation import Simulation


@dataclass(frozen=True)
class RewoundRun:
    """A recorded run's simulation at the beginning of a round.

    Attributes:
        parts, simulation: the run's parts and simulation, on one rank.
        start: round of the checkpoint that was restored; 0: the initial model.
        parted: first round, from `start` on, whose model hash differs from the recorded one; None if all agree.
        settings: sets torch's settings to those in which the simulation was assembled.
    """

    parts: Parts
    simulation: Simulation
    start: int
    parted: int | None
    settings: Callable[[], None]


def entered(run: RecordedRun, round: int, say: Callable[[str], None] = lambda text: None) -> RewoundRun:
    """Rewind a run to the beginning of a round, counted from 1; `say` prints progress.

    Raises:
        InputError: the round is not recorded, its code is not available, no checkpoint leads to it, or the checkpoint
            is damaged or does not have the states that the recipe needs.
        Diverged, EnvironmentFailure: training a round before it failed.
    """
    if not 1 <= round <= len(run.rows):
        raise InputError("round", expected=f"1 to {len(run.rows)}, which are recorded", got=str(round))
    code = run.at(round)
    kept = [one for one in (0, *run.checkpoints) if code.first - 1 <= one < round]
    if not kept:
        what = f"no state is kept between round {code.first - 1}, after which the code was changed, and round {round}"
        raise InputError(what, where=str(run.folder))
    with code.imported():
        parts, _ = assemble(code.recipe, world := World(), began_on=kind_of_device(run.environment))
    simulation = Simulation(parts)
    weakref.finalize(simulation, parts.clients.__exit__, None, None, None)  # states that went to disk
    start = max(kept)
    if start:
        layout, wanted = layout_of_states(parts, simulation.w), simulation.replicated()
        found = CheckpointReader(run.folder / "checkpoints", layout, parts.placement, world).of_round(start, wanted)
        if not holds(found.replicated, wanted):
            remedy = "evaluate.model has changed since: choose another round"
            raise InputError("the checkpoint holds other states", where=f"round {start}", remedy=remedy)
        simulation.restore(found.replicated, found.clients)
        simulation.magnitudes.restore(found.progress["magnitudes"])
    if start + 1 < round:
        which = f"rounds {start + 1} to {round - 1} are" if start + 2 < round else f"round {start + 1} is"
        say(f"{which} computed, from {f'the state of round {start}' if start else 'w⁰'}")
    parted = None
    if start and simulation.hash != run.rows[start - 1].get("hash"):
        parted = start
    for number in range(start + 1, round):
        outcome = simulation.round(number)
        if parted is None and outcome.hash != run.rows[number - 1].get("hash"):
            parted = number
    return RewoundRun(parts, simulation, start, parted, settings_now())
