"""The round loop: sample, train, reduce, step, evaluate, record, save."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcfed.checkpoint.keeper import Checkpoints
from hpcfed.config.recipe import Recipe
from hpcfed.errors import EnvironmentFailure, HpcfedError, Stopped
from hpcfed.evaluation.evaluate import Evaluator, Scores
from hpcfed.evaluation.per_client import ClientEvaluator, ClientScores
from hpcfed.observers import Observers
from hpcfed.parts import Parts
from hpcfed.ranks.devices import DeviceSlot
from hpcfed.ranks.signals import Signals, catch_signals
from hpcfed.ranks.world import World
from hpcfed.record import Recorder, environment
from hpcfed.round_checks import RanksDiffer, ranks_differ
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.outcome import own_log, recorded_ending, see_log
from hpcfed.run_folder.progress import Reporter
from hpcfed.setup import assemble
from hpcfed.simulation import RoundResult, Simulation
from hpcfed.stopping import Stopping, TimeLeft
from hpcfed.trail.certificate import write_certificate
from hpcfed.types import Request
from hpcfed.user_code.blame import blamed

log = logging.getLogger("hpcfed")

MANY_REPEATS = 0.05
"""Share of rounds run twice that the user should hear of."""


def train(
    recipe: Recipe, folder: RunFolder, reporter: Reporter, world: World, device_slot: DeviceSlot | None = None
) -> None:
    """Train a resolved recipe to its last round, from its first or from a checkpoint; leave the record in its folder.

    A rank whose `device_slot` was assigned already, since others than this world's share its node, keeps it.

    Raises:
        Stopped: a signal or the clock ended the run early, with a checkpoint.
    """
    with folder.held(world), own_log(folder, world), catch_signals(world) as caught:
        parts, evaluator = assemble(recipe, world, device_slot)
        observers = Observers(recipe, world)
        with parts.clients:
            of_clients = ClientEvaluator(recipe.evaluate, parts, evaluator)
            checkpoints = Checkpoints(recipe, folder, parts, Simulation(parts))
            done, progress = (0, {}) if folder.fresh else checkpoints.restore(reporter.say)
            data = world.on_root(lambda: folder.claim(recipe, done, checkpoints.simulation.hash if done else None))
            with recorded_ending(folder, world) as ending:
                reporter.say(world.on_root(checkpoints.prepare))
                facts = environment(world, parts.model.vector.device, recipe.reduction)
                facts |= {"method": parts.method.name, "data": data}
                facts |= {"bits_depend_on_placement": parts.engine.placement_counts}
                world.on_root(lambda: folder.write("environment.json", facts))
                for remark in _remarks(recipe, parts):
                    reporter.say(f"{recipe.name}: {remark}")
                if done:
                    reporter.say(f"{recipe.name}: goes on after round {done}")
                totals = progress.get("totals", {})
                with (
                    Recorder(folder, parts, totals) as recorder,
                    observers.told(facts, done),
                    _nothing_old_collected(),
                    parts.watch.watching(),
                ):
                    session = Session(
                        recipe, parts, evaluator, of_clients, checkpoints, caught, recorder, reporter, observers
                    )
                    ending.stopped = _rounds(session, progress)
                world.on_root(lambda: write_certificate(folder, recipe, ending.stopped))


def _remarks(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Yield what the user may not have meant, though it can be run."""
    if empty := parts.cohorts.without_samples:
        what = "client has no samples and counts" if empty == 1 else "clients have no samples and count"
        yield f"{empty} {what} as an update of 0 (weights: uniform)"
    if idle := parts.cohorts.idle(parts.world.size):
        yield f"{idle}; the result is the same"
    if recipe.evaluate.every and not parts.federation.num_test:
        yield "no test loss or accuracy, since the federation has no test set"
    if late := [entry.round for entry in recipe.local.lr_schedule if entry.round > recipe.rounds]:
        rounds = f"round {late[0]}, after the last of {recipe.rounds} rounds"
        yield f"local.lr_schedule has a step size from {rounds}; it is not used"


@dataclass(frozen=True)
class Session:
    """What the rounds of a run are done with: who trains and measures, who is heard, and who is told."""

    recipe: Recipe
    parts: Parts
    evaluator: Evaluator
    of_clients: ClientEvaluator
    checkpoints: Checkpoints
    caught: Signals
    recorder: Recorder
    reporter: Reporter
    observers: Observers

    def tell(
        self, round: int, outcome: RoundResult, scores: tuple[Scores, ClientScores | None], seconds: dict[str, float]
    ) -> None:
        """Record a round, and tell of it whoever looks on."""
        row = self.recorder.add(round, outcome, *scores, seconds)
        self.reporter.update(row)
        self.observers.round(row)


def _rounds(session: Session, progress: Mapping[str, Any]) -> str | None:
    """Run the rounds that are not done yet; return why they ended before the last one, if they did.

    Raises:
        Stopped: they ended early, and the same command goes on.
    """
    recipe, checkpoints, caught = session.recipe, session.checkpoints, session.caught
    simulation, world, watch = checkpoints.simulation, session.parts.world, session.parts.watch
    stopping, time_left = Stopping(recipe.stop, progress.get("stopping")), TimeLeft(recipe.stop)
    ended, worked, early, round = time.perf_counter(), time.process_time(), Request.NOTHING, checkpoints.done
    while round < recipe.rounds and stopping.reason is None and not early:
        round += 1
        started = ended  # so that writing the record counts, with the round after it
        asks = checkpoints.asks() | (Request.STOP if caught.name else Request.NOTHING)
        if world.is_root and time_left.is_up(checkpoints.seconds):
            asks |= Request.TIME_IS_UP
        try:
            outcome = simulation.round(round, asks=asks, written=checkpoints.written)
        except RanksDiffer as error:
            if recipe.algorithm.factory is None:
                raise
            raise ranks_differ(round, error.which, own_method=True) from error
        trained = time.perf_counter()
        watch.stage(f"round {round}: evaluation", waits=True)
        scores = _evaluate(session, round)
        ended = time.perf_counter()
        time_left.add(ended - started)
        before, worked = worked, time.process_time()
        seconds = {"evaluate": ended - trained, "total": ended - started, "cpu": worked - before}
        session.tell(round, outcome, scores, seconds)
        stopping.add(scores[0])
        done = round == recipe.rounds or stopping.reason is not None
        early = Request.NOTHING if done else outcome.asks & (Request.STOP | Request.TIME_IS_UP)
        kept = {"totals": dict(session.recorder.totals), "stopping": stopping.progress()}
        watch.stage(f"round {round}: checkpoint", waits=True)
        checkpoints.after(round, outcome.asks, outcome.written, kept, last=done or bool(early), early=bool(early))
    checkpoints.finish()
    if early:
        what = (
            time_left.reason() + " is near"
            if Request.TIME_IS_UP in early
            else caught.name or "a signal to another rank"
        )
        raise Stopped(
            f"{recipe.name} stopped after round {round}: {what}", remedy="the same command goes on from there"
        )
    if stopping.reason is not None:
        session.reporter.say(f"{recipe.name}: stopped after round {round}, {stopping.reason}")
    if simulation.magnitudes.repeats > MANY_REPEATS * round:
        session.reporter.say(
            f"{recipe.name}: {simulation.magnitudes.repeats} of {round} rounds were run twice, since the size of the "
            "updates changed too much from one round to the next (column 'attempts')"
        )
    models = session.parts.model, simulation.w, simulation.evaluated()
    world.on_root(lambda: session.recorder.keep_models(*models))
    return stopping.reason


@contextmanager
def _nothing_old_collected() -> Iterator[None]:
    """Keep the garbage collector from searching, every few rounds, all that torch brought along."""
    gc.collect(1)  # a whole collection takes longer than a short run
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _evaluate(session: Session, round: int) -> tuple[Scores, ClientScores | None]:
    """Measure the round's model where the recipe asks for it; the last round always counts as asked for."""

    def due(every: int) -> bool:
        return every > 0 and (round % every == 0 or round == session.recipe.rounds)

    section, world = session.recipe.evaluate, session.parts.world
    test, train, clients = due(section.every), due(section.train.every), due(section.clients.every)
    if not (test or train or clients):
        return session.evaluator.nothing, None
    try:
        w = session.checkpoints.simulation.evaluated()
        scores = session.evaluator(w, test=test, train=train)
        of_clients = session.of_clients(w, round) if clients else None
        for remark in session.evaluator.news():
            session.reporter.say(f"{session.recipe.name}: {remark}")
        return scores, of_clients
    except HpcfedError:
        raise
    except Exception as error:  # a user's model or a device may raise anything
        place = f"round {round}, evaluation, rank {world.rank} on {world.hosts[world.rank]}"
        log.error("%s raised", place, exc_info=error)
        what, remedy = f"{type(error).__name__}: {error}", see_log(world)
        raise blamed(error, place, remedy) or EnvironmentFailure(what, where=place, remedy=remedy) from error
