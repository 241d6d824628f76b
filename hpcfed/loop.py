"""The round loop: sample, train, reduce, step, evaluate, record, save."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from hpcfed.assembly import assemble
from hpcfed.assembly.auto_device import refuse_another_device
from hpcfed.assembly.kept import check_updates
from hpcfed.assembly.left_out import without_facts
from hpcfed.assembly.private import privacy_facts
from hpcfed.assembly.remarks import remarks
from hpcfed.config.limits import watchdog_limit
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.blame import blamed, see_log
from hpcfed.errors import RAISED, EnvironmentFailure, HpcfedError, Stopped, counted
from hpcfed.evaluation.evaluate import Evaluator
from hpcfed.evaluation.per_client import ClientEvaluator, ClientScores
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import check_refusals, is_fault
from hpcfed.ranks.devices import DeviceSlot, device_faults, fault
from hpcfed.ranks.platform.malloc import return_freed_memory
from hpcfed.ranks.signals import Signals, catch_signals
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.reduce.checks import RanksDiffer, ranks_differ
from hpcfed.run_folder.certificate import write_certificate
from hpcfed.run_folder.checkpoint.keeper import Checkpoints
from hpcfed.run_folder.clock import ENDING_REQUESTS, Clock
from hpcfed.run_folder.code import without_given_observers
from hpcfed.run_folder.environment import environment, with_suspicions
from hpcfed.run_folder.files import read_environment
from hpcfed.run_folder.folder import RunFolder, with_local
from hpcfed.run_folder.machines import BEFORE, moves, went_on
from hpcfed.run_folder.observers import Observers
from hpcfed.run_folder.outcome import own_log, recorded_ending
from hpcfed.run_folder.progress import Reporter
from hpcfed.run_folder.recorder import Recorder
from hpcfed.run_folder.stopping import Due, Stopping, due_after, has_own_scores, stopping_of
from hpcfed.sentinel import Suspicion
from hpcfed.simulation import RoundResult, Simulation
from hpcfed.types import Request

log = logging.getLogger("hpcfed")

SCORES = ("local_loss", "test_loss", "test_accuracy")
"""Numbers of the record that the text of a round has."""
MANY_REPEATS = 0.05
"""Share of rounds run twice above which the run says so."""


@dataclass(frozen=True)
class Round:
    """A round, as a loop over the rounds of a run sees it: copies, the same on all ranks except seconds.

    Attributes:
        number: t, from 1.
        cohort: the clients that trained; none in a private run, which withholds them.
        metrics: the round's row of ``metrics.jsonl``.
        parameters: the model after the round, by the module's names, on the host.
        updates: Δ_i = w − y_i of each client whose update counts, likewise, as the server adds it up: decoded, and
            normalised where the method does; empty unless asked for.
        delta: Δ̄, by which the server has stepped, likewise; None unless asked for, and in a round without clients.
    """

    number: int
    cohort: list[int]
    metrics: dict[str, Any]
    parameters: dict[str, Tensor]
    updates: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    delta: dict[str, Tensor] | None = None

    def __str__(self) -> str:
        scores = (f"{key} {self.metrics[key]:.4g}" for key in SCORES if self.metrics.get(key) is not None)
        cohort = [counted(len(self.cohort), "client")] if self.cohort else []  # withheld in a private run
        return f"round {self.number}: {', '.join([*cohort, *scores])}"


@dataclass
class Look:
    """A request to see the rounds of a run, and the clients' updates; `left` asks to end it after the round seen."""

    with_updates: bool = False
    left: bool = False


class Left(Stopped):
    """A loop over the rounds was left; there is a checkpoint."""


def training(
    recipe: Recipe,
    folder: RunFolder,
    reporter: Reporter,
    world: World,
    device_slot: DeviceSlot | None = None,
    watchdog: Watchdog | None = None,
    look: Look | None = None,
) -> Iterator[Round]:
    """Train a resolved recipe to its last round, from its first or from a checkpoint; leave the record in its folder.

    With `look` yield each round, after which any rank may ask to end the run. A rank whose `device_slot` was assigned
    already, since others than this world's share its node, keeps it; a `watchdog` that watches already goes on.

    Raises:
        Stopped: a signal or the clock ended the run early, with a checkpoint; `Left` on every rank where any has asked.
    """
    watchdog = watchdog or Watchdog(world, watchdog_limit(recipe.watchdog))
    with (
        watchdog.watching(),
        folder.held(world),
        own_log(folder, world),
        catch_signals(world) as caught,
        device_faults(world),
    ):
        watchdog.stage("start: devices, data and model")
        began_on = world.on_root(partial(folder.began_on, recipe))
        refuse_another_device(began_on, world)
        recipe = world.on_root(partial(folder.with_recorded_engine, recipe))
        parts, evaluator = assemble(recipe, world, device_slot, watchdog, began_on=began_on)
        watchdog.stage("start: checkpoint, record and observers")
        recipe = with_local(recipe, parts.engine_choice.recorded)
        with parts.federation, parts.clients:
            yield from _run(recipe, folder, reporter, parts, evaluator, caught, look)


def _run(
    recipe: Recipe,
    folder: RunFolder,
    reporter: Reporter,
    parts: Parts,
    evaluator: Evaluator,
    caught: Signals,
    look: Look | None,
) -> Iterator[Round]:
    """Go on from the folder's checkpoint, if there is one, and run the rounds that remain; see `training`."""
    world, watchdog = parts.world, parts.watchdog
    observers = Observers(recipe, world, reporter.say)
    client_evaluator = ClientEvaluator(recipe.evaluate, parts, evaluator)
    keeps_updates = observers.want_updates or (look is not None and any(world.gather(look.with_updates)))
    if keeps_updates:
        check_updates(parts)
    simulation = Simulation(parts, keeps_updates=keeps_updates)
    checkpoints = Checkpoints(recipe, folder, parts, simulation)
    done, progress = (0, {}) if folder.fresh else checkpoints.restore(reporter.say)
    stopping = _stopping(recipe, folder, world, done, progress.get("stopping"))
    trains = done < recipe.rounds and stopping.reason is None
    if done and not trains:
        recipe = world.on_root(partial(folder.as_measured, recipe))
    state = simulation.hash if done else None
    rows, say = client_evaluator.rows_of_a_model, reporter.say
    data = world.on_root(lambda: folder.claim(recipe, done, state, say, client_rows=rows, trains=trains))
    with recorded_ending(folder, world) as ending:
        reporter.say(world.on_root(checkpoints.prepare))
        facts, suspicions = _write_environment(recipe, folder, parts, evaluator, data, done)
        for remark in (*remarks(recipe, parts), *_resume_remarks(recipe, done, facts)):
            reporter.say(f"{recipe.name}: {remark}")
        totals = progress.get("totals", {})
        with (
            Recorder(folder, parts, totals, suspected=bool(suspicions)) as recorder,
            observers.watching(facts, done),
            closing(checkpoints),
            _startup_objects_frozen(),
        ):
            session = Session(
                recipe=recipe,
                parts=parts,
                simulation=simulation,
                evaluator=evaluator,
                client_evaluator=client_evaluator,
                checkpoints=checkpoints,
                clock=Clock(recipe.stop, caught, checkpoints, world),
                recorder=recorder,
                reporter=reporter,
                observers=observers,
                suspect=lambda found: _suspect(folder, world, facts, suspicions, found),
            )
            return_freed_memory()  # of the set-up, whose vectors fit into no hole of the rounds'
            ending.stopped = yield from _rounds(session, stopping, look)
        watchdog.stage("end")
    watchdog.stage("end: certificate")  # of ``result.json``, too
    world.on_root(lambda: write_certificate(folder, without_given_observers(recipe), ending.stopped))
    watchdog.stage("end")


@dataclass(frozen=True)
class Session:
    """Everything the round loop needs."""

    recipe: Recipe
    parts: Parts
    simulation: Simulation
    evaluator: Evaluator
    client_evaluator: ClientEvaluator
    checkpoints: Checkpoints
    clock: Clock
    recorder: Recorder
    reporter: Reporter
    observers: Observers
    suspect: Callable[[Sequence[Suspicion]], None]
    """Records what the sentinel has found."""


def _stopping(recipe: Recipe, folder: RunFolder, world: World, done: int, saved: Mapping[str, Any] | None) -> Stopping:
    """Return the early stopping of a run that begins, or goes on after `done` rounds with the state that was saved.

    Raises:
        InputError: the run has ended, and its last scores are of another model.
    """
    stopping = stopping_of(recipe, saved)
    if done and has_own_scores(recipe) and world.on_root(lambda: folder.code.is_new(recipe, done)):
        stopping.forget()
    stopping.refuse_another_model(done, recipe.rounds, str(folder.path))
    if done < recipe.rounds:
        stopping.go_on(done)
    return stopping


def _write_environment(
    recipe: Recipe, folder: RunFolder, parts: Parts, evaluator: Evaluator, data: Mapping[str, Any], done: int
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Write ``environment.json``; return its facts, and the suspicions of the rounds done. Called on every rank."""
    world = parts.world
    facts = _facts(recipe, parts, evaluator) | {"data": data}
    if done and (before := world.on_root(lambda: went_on(read_environment(folder.path), facts, done))):
        facts[BEFORE] = before
    suspicions = list(world.on_root(folder.suspicions)) if done else []
    world.on_root(lambda: folder.write("environment.json", with_suspicions(facts, suspicions)))
    return facts, suspicions


def _facts(recipe: Recipe, parts: Parts, evaluator: Evaluator) -> dict[str, Any]:
    """Return the facts of ``environment.json`` that do not depend on the folder. Called on every rank."""
    return {
        **environment(
            parts.world,
            parts.model.vector.device,
            recipe.reduction,
            recipe.bits,
            deterministic=recipe.deterministic,
            unordered=() if parts.engine.graphs is None else parts.engine.graphs.any_order,
        ),
        "method": parts.method.name,
        "tile": parts.engine.tile,
        "training": parts.engine_choice.account,
        "graphs": None if parts.engine.graphs is None else str(parts.engine.graphs),
        **({} if parts.step_work is None else {"device_by_step_work": parts.step_work}),
        "evaluated_samples": evaluator.num_samples,
        **privacy_facts(parts),
        **without_facts(recipe, parts.federation),
    }


def _suspect(
    folder: RunFolder,
    world: World,
    facts: Mapping[str, Any],
    suspicions: list[Mapping[str, Any]],
    found: Sequence[Suspicion],
) -> None:
    """Write into ``environment.json`` that the bits of the run are not certain, and why."""
    suspicions += [asdict(each) for each in found]
    world.on_root(lambda: folder.write("environment.json", with_suspicions(facts, suspicions)))


def _resume_remarks(recipe: Recipe, done: int, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said of a run that does not begin with its first round."""
    if done >= recipe.rounds:
        yield f"all {done} rounds are done; to measure anything else, raise rounds"
    elif done:
        yield f"goes on after round {done}"
        yield from [*moves(facts, recipe.rounds)][-1:]


def _rounds(session: Session, stopping: Stopping, look: Look | None) -> Generator[Round, None, str | None]:
    """Run the rounds that remain, yielding each with `look`; return why ``stop`` ended them before the last one, if so.

    Raises:
        Stopped: a signal or the clock ended them, and the same command goes on.
    """
    recipe, round, early, left = session.recipe, session.checkpoints.done, Request.NOTHING, False
    parts, watchdog = session.parts, session.parts.watchdog
    with watchdog.rounds(signs=parts.mpi_is_free):
        while round < recipe.rounds and stopping.reason is None and not early:
            round += 1
            # 1. Train a cohort: local work, one Allreduce, the server's step.
            result = _train(session, round)
            # 2. Evaluate the model, where the recipe asks for it.
            scores, client_scores = _evaluate(session, round, result)
            # 3. Record the round; notify progress and observers.
            row = _record(session, round, result, scores, client_scores)
            if look is not None:
                with watchdog.asleep():
                    yield _seen(session, round, row, result, updates=look.with_updates)
                left = any(parts.world.gather(look.left))
            # 4. End early by scores, a signal or the clock; save where it is due.
            if recipe.evaluate.every and round % recipe.evaluate.every == 0:  # not a last round that rounds=… changes
                stopping.add(scores, round)
            is_last = round == recipe.rounds or stopping.reason is not None
            asked = result.requests | (Request.STOP if left else Request.NOTHING)
            early = Request.NOTHING if is_last else asked & ENDING_REQUESTS
            _save(session, round, result, stopping, is_last=is_last, early=bool(early))
            watchdog.round_done()
    watchdog.stage("end: last checkpoint")
    session.checkpoints.finish()
    if early and left:
        raise Left(f"{recipe.name} left after round {round}", remedy="the same call goes on from there")
    if early:
        raise session.clock.stopped(recipe.name, round, early)
    watchdog.stage("end: models")
    return_freed_memory()  # of the last round, whose vectors fit into no hole of the files'
    _finish(session, round, stopping.reason)
    watchdog.stage("end: record and observers")
    return stopping.reason


def _train(session: Session, round: int) -> RoundResult:
    """Train a round; if the ranks differ and the method is the user's, the error says to check the method first."""
    try:
        due = due_after(session.recipe, round), due_after(session.recipe, round + 1)
        requests, written = session.clock.requests(due), session.checkpoints.written
        return session.simulation.round(round, requests=requests, written=written)
    except RanksDiffer as error:
        if not session.recipe.own_rules:
            raise
        raise ranks_differ(round, error.which, own_method=True) from error
    finally:
        session.clock.trained()


def _seen(session: Session, round: int, row: Mapping[str, Any], result: RoundResult, *, updates: bool) -> Round:
    model = session.parts.model
    seen = Round(round, list(row["cohort"]), copy.deepcopy(dict(row)), model.named(session.simulation.w))
    if not updates:
        return seen
    each = {client: model.named_update(vector) for client, vector in result.updates.items()}
    return replace(seen, updates=each, delta=None if result.delta is None else model.named_update(result.delta))


def _record(
    session: Session, round: int, result: RoundResult, scores: Mapping[str, Any], clients: ClientScores | None
) -> Mapping[str, Any]:
    row = session.recorder.add(round, result, scores, clients, session.clock.lap())
    if result.suspicions:
        session.suspect(result.suspicions)
        for suspicion in result.suspicions:
            said = f"{suspicion}; from here on the record says bitwise: false (docs/bits.md)"
            session.reporter.say(f"{session.recipe.name}: {said}")
    session.reporter.update(row)
    session.observers.round(row)
    session.observers.look(lambda updates: _seen(session, round, row, result, updates=updates))
    return row


def _save(session: Session, round: int, result: RoundResult, stopping: Stopping, *, is_last: bool, early: bool) -> None:
    kept = {"totals": dict(session.recorder.totals), "stopping": stopping.progress()}
    session.parts.watchdog.stage(f"round {round}: checkpoint", waits=True)
    session.checkpoints.after(round, result.requests, result.written, kept, last=is_last or early, early=early)


def _finish(session: Session, round: int, reason: str | None) -> None:
    """Write the models of a run that has ended, and print how it went."""
    name, simulation = session.recipe.name, session.simulation
    if reason is not None:
        session.reporter.say(f"{name}: stopped after round {round}, {reason}")
    if simulation.magnitudes.repeats > MANY_REPEATS * round:
        session.reporter.say(
            f"{name}: {simulation.magnitudes.repeats} of {round} rounds were run twice, since the size of the "
            "updates changed too much from one round to the next (column 'attempts')"
        )
    left_out = session.parts.world.on_root(lambda: session.recorder.remark(session.recipe))
    for remark in (*session.parts.model.news(), *([left_out] if left_out else [])):
        session.reporter.say(f"{name}: {remark}")
    evaluated = simulation.evaluated().cpu()
    models = session.parts.model, simulation.w, evaluated, session.evaluator.averaged_for(evaluated)
    session.parts.world.on_root(lambda: session.recorder.keep_models(*models))
    session.parts.world.together(lambda: session.recorder.keep_private(session.parts))


@contextmanager
def _startup_objects_frozen() -> Iterator[None]:
    """Exempt what torch has loaded from garbage collection, whose scans of it would cost time every few rounds."""
    gc.collect(1)  # a whole collection takes longer than a short run
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _evaluate(session: Session, round: int, result: RoundResult) -> tuple[Mapping[str, Any], ClientScores | None]:
    """Return the scores of the round's model by column; its hash is taken while a device works."""
    session.parts.watchdog.stage(f"round {round}: evaluation", waits=True)
    world = session.parts.world
    try:
        due = due_after(session.recipe, round)
        evaluators = session.evaluator, session.client_evaluator
        take_hash = partial(str, result.state_hash)
        found = scores_of(session.simulation, session.parts, *evaluators, round, due, take_hash)
        for remark in (*session.evaluator.news(), *session.parts.model.news()):
            session.reporter.say(f"{session.recipe.name}: {remark}")
        return found
    except HpcfedError:
        raise
    except RAISED as error:  # a user's model or a device may raise anything
        place = f"round {round}, evaluation, rank {world.rank} on {world.hosts[world.rank]}"
        log.error("%s raised", place, exc_info=error)
        if is_fault(error):
            raise fault(error, place) from error
        what, remedy = f"{type(error).__name__}: {error}", see_log(world)
        raise blamed(error, place, remedy) or EnvironmentFailure(what, where=place, remedy=remedy) from error


def scores_of(
    simulation: Simulation,
    parts: Parts,
    evaluator: Evaluator,
    client_evaluator: ClientEvaluator,
    round: int,
    due: Due,
    meanwhile: Callable[[], object] = bool,
) -> tuple[Mapping[str, Any], ClientScores | None]:
    """Return the scores by column of the model after a round, as far as they are `due`."""
    test, train, clients = due
    if not (test or train or clients):
        return evaluator.nothing, None
    w = simulation.evaluated()
    with parts.model.with_averaged(evaluator.averaged_for(w)):
        scores = evaluator(w, test=test, train=train, meanwhile=meanwhile)
        of_clients = client_evaluator(w, round) if clients else None
    check_refusals(parts.model.vector.device)
    return scores, of_clients
