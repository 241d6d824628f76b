"""The round loop: sample, train, reduce, step, evaluate, record."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcfed.config.recipe import Recipe
from hpcfed.endings import own_log, recorded_ending
from hpcfed.errors import EnvironmentFailure, HpcfedError
from hpcfed.evaluate import Evaluator, Scores
from hpcfed.folder import RunFolder
from hpcfed.progress import Reporter
from hpcfed.record import Recorder, environment
from hpcfed.setup import assemble
from hpcfed.simulation import Parts, Simulation
from hpcfed.stopping import Stopping
from hpcfed.world import World

log = logging.getLogger("hpcfed")


def train(recipe: Recipe, folder: RunFolder, reporter: Reporter, world: World) -> None:
    """Train a resolved recipe from its first round to its last, and leave the record in its folder."""
    parts, evaluator = world.together(lambda: assemble(recipe, world))
    world.on_root(lambda: folder.claim(recipe))
    with parts.clients, own_log(folder, world), recorded_ending(folder, world) as ending:
        facts = environment(world, parts.model.vector.device, parts.model.vector.dtype)
        world.on_root(lambda: folder.write("environment.json", facts))
        with Recorder(folder, parts.method, parts.model.num_parameters, world) as recorder, _nothing_old_collected():
            ending.stopped = _rounds(recipe, parts, evaluator, recorder, reporter)


def _rounds(recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder, reporter: Reporter) -> str | None:
    """Run the rounds; return why they ended before the last one, if they did."""
    simulation, stopping, world = Simulation(parts), Stopping(recipe.stop), parts.world
    ended, reason = time.perf_counter(), None
    for round in range(1, recipe.rounds + 1):
        started = ended  # so that writing the record counts, with the round after it
        outcome = simulation.round(round, stop=world.is_root and stopping.is_late())
        trained = time.perf_counter()
        last = round == recipe.rounds or outcome.stop
        scores = _evaluate(recipe, round, last, simulation, evaluator, world)
        ended = time.perf_counter()
        seconds = {"evaluate": ended - trained, "total": ended - started}
        reporter.update(recorder.add(round, outcome, scores, seconds))
        reason = stopping.reason(scores, late=outcome.stop)
        if reason is not None:
            reporter.say(f"{recipe.name}: stopped after round {round}, {reason}")
            break
    world.on_root(lambda: recorder.keep_models(parts.model, simulation.w, simulation.evaluated()))
    return reason


@contextmanager
def _nothing_old_collected() -> Iterator[None]:
    """Keep the garbage collector from searching, every few rounds, all that torch brought along."""
    gc.collect(1)  # a whole collection takes longer than a short run
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _evaluate(
    recipe: Recipe, round: int, last: bool, simulation: Simulation, evaluator: Evaluator, world: World
) -> Scores:
    """Measure the round's model where the recipe asks for it; the last round always counts as asked for."""

    def due(every: int) -> bool:
        return every > 0 and (round % every == 0 or last)

    test, train = due(recipe.evaluate.every), due(recipe.evaluate.train.every)
    if not (test or train):
        return Scores()
    try:
        return evaluator(simulation.evaluated(), test=test, train=train)
    except HpcfedError:
        raise
    except Exception as error:  # a user's model or a device may raise anything
        place = f"round {round}, evaluation, rank {world.rank} on {world.hosts[world.rank]}"
        log.error("%s raised", place, exc_info=error)
        what = f"{place}: {type(error).__name__}: {error}"
        raise EnvironmentFailure(what, remedy=f"see the run folder's logs/rank-{world.rank}.log") from error
