"""`hpcfed.replay`: trains one client of one round of a recorded run again, and returns all its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcfed.assembly import build_loss, build_model
from hpcfed.client.augment import augmented
from hpcfed.client.batched.operators.dropping import GivenMasks
from hpcfed.client.sample_noise import expected_size, poisson_minibatches
from hpcfed.client.solver import Task, start_of
from hpcfed.config.recipe import Local, Recipe
from hpcfed.config.user_code.generators import Generators, generators_kept
from hpcfed.config.user_code.one_thread import ONE_THREAD
from hpcfed.config.user_code.settings import settings_kept
from hpcfed.data.batches import minibatches
from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.parts import Parts
from hpcfed.provenance.code_of_rounds import RUN_CODE, Permission
from hpcfed.provenance.cohorts import with_cohorts
from hpcfed.provenance.recorded import RecordedRun, placed_recipe, recorded
from hpcfed.provenance.replay.capture import ClientReport, reports_of
from hpcfed.provenance.replay.enter import RewoundRun, entered
from hpcfed.provenance.replay.neighbours import Dependence, dependences_of
from hpcfed.rng import Purpose, stream
from hpcfed.run_folder.update_hashes import UPDATE_HASHES, read_update_hashes
from hpcfed.types import State

if TYPE_CHECKING:
    from torch import nn

MOST_BYTES = 1 << 30
"""Largest size, in bytes, of a client's iterates that are kept; of larger ones only norms are kept."""


@dataclass(frozen=True)
class Step:
    """A step of the client's training, from its iterate y_{k−1} to y_k.

    Attributes:
        number: k, from 1.
        x, y: features and targets of the step's minibatch, (B, …) each.
        loss: loss of the minibatch at y_{k−1}, without the method's terms and weight decay; 0 for an empty minibatch.
        gradient: norm of that loss's gradient at y_{k−1}, before clipping and noise; 0 for an empty minibatch.
        drift: ‖y_k − w‖, where w is the server's model.
        iterate: y_k, (d,); None if the client's iterates would take more than `MOST_BYTES`.
        own, buffers: the client's private part and the averaged buffers after the step, by name; empty if the model has
            none, or if iterates are not kept.
    """

    number: int
    x: Tensor
    y: Tensor
    loss: float
    gradient: float
    drift: float
    iterate: Tensor | None
    own: State = field(default_factory=dict, repr=False)
    buffers: State = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Replay:
    """One client's training in one round of a recorded run.

    Attributes:
        recipe: the recipe of the round, resolved.
        round: the round, from 1.
        client, name: the client's number and name.
        w: the server's model before the round, (d,).
        reported: the client's update: vectors, scalars and hash.
        recorded_hash: the update's hash in the run's ``update-hashes.bin``; None if it was not recorded.
        start: round of the checkpoint that the computation began from; 0: the initial model.
        parted: first round, from `start` on, whose model hash differs from the recorded one; None if all agree.
        steps: the client's steps, in order: ``.x``, ``.y`` (the minibatch), ``.loss``, ``.gradient``, ``.drift``,
            ``.iterate``.
    """

    recipe: Recipe
    round: int
    client: int
    name: str
    w: Tensor
    reported: ClientReport
    recorded_hash: int | None
    start: int
    parted: int | None
    steps: list[Step] = field(repr=False)
    _entered: RewoundRun = field(repr=False)
    _run: RecordedRun = field(repr=False)

    def __str__(self) -> str:
        """Return two lines: round, client and number of steps, and the run's folder."""
        what = f"{self.recipe.name}, round {self.round}, client {self.client} ({self.name})"
        return f"{what}: {counted(len(self.steps), 'step')}\n{self.recipe.output}"

    __repr__ = __str__  # a notebook shows it

    @property
    def samples(self) -> Samples:
        """All samples of the client: x (n, …) and y (n, …)."""
        return self.reported.task.samples

    def module(self, step: int = 0) -> nn.Module:
        """Return the model with the parameters after a step, on the recipe's device; step 0: the server's model.

        Raises:
            InputError: the client has fewer steps, or its iterates were not kept.
        """
        if not 0 <= step <= len(self.steps):
            raise InputError("step", expected=f"0 to {len(self.steps)}", got=str(step))
        vector = self.steps[step - 1].iterate if step else self.w
        if vector is None:
            raise InputError("the iterates of so large a model are not kept", where=f"client {self.client}")
        model = self._entered.parts.model
        model.load(vector, self.steps[step - 1].own if step else self.reported.task.own)
        if step and not model.is_plain:
            model.set_buffers(self.steps[step - 1].own, self.steps[step - 1].buffers)
        return model.module

    @property
    def skipped(self) -> bool:
        """Whether the run left the client out of the round, since its training failed or no masked sum has it."""
        return self.client in self._run.rows[self.round - 1].get("skipped", [])

    @property
    def dropped(self) -> bool:
        """Whether no masked sum has the client's update: it dropped out before it sent, or its round is `unopened`."""
        return self.skipped and self.recipe.secure_aggregation is not None

    @property
    def unopened(self) -> bool:
        """Whether too few clients were left to open the round's sum (``secure_aggregation.survivors``)."""
        row = self._run.rows[self.round - 1]
        return self.dropped and len(row["skipped"]) == len(row["cohort"])

    @cached_property
    def agrees(self) -> bool:
        """Whether the update is as recorded, judged by its hash.

        If no hash of the update was recorded, the whole round is computed and its hash compared. An update that the run
        left out as not finite agrees if it is not finite here either. False if an earlier round differs (`parted`).
        """
        if self.parted is not None:
            return False
        if self.skipped and not self.dropped:
            sums = [float(vector.double().sum()) for vector in self.reported.vectors.values()]
            return not all(map(math.isfinite, (*sums, *self.reported.scalars.values())))
        if self.recorded_hash is not None:
            return self.reported.hash == self.recorded_hash
        with ONE_THREAD, generators_kept(), settings_kept():
            self._entered.settings()
            return self._entered.simulation.round(self.round).hash == self._run.rows[self.round - 1].get("hash")

    @cached_property
    def dependence(self) -> Dependence | None:
        """A client whose update depends on its tile on this machine, which may explain the first difference.

        A tile is a group of clients trained together. The first difference is in round `parted`, or else in the
        replayed round; of several such clients in that round, this is the first. None if there is no such client, if
        nothing differs, or if the checkpoint of `start` differs already.
        """
        round = self.round if self.parted is None else self.parted
        if self.agrees or (self.parted is not None and self.parted == self.start):  # a kept state
            return None
        with ONE_THREAD, generators_kept(), settings_kept():
            return next(iter(dependences_of(self._run, round)), None)


def replay(
    run: str | Path,
    round: int,
    client: int | str,
    *,
    data: str | Path | None = None,
    code: str | Path | None = None,
    run_code: bool = False,
    ask: Callable[[str], bool] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Train one client of one round of a recorded run again, alone in this process, to the same bits.

    Args:
        run: the run folder.
        round: the round, from 1.
        client: the client's number or name.
        data, code: current paths of the federation file and of the folder of the user's code; None: as in the recipe.
        run_code: whether code that is only in the run's record may run.
        ask: called with a description of that code if `run_code` is False; returns whether the code may run. None: the
            code may not run.
        say: called with lines on progress.

    Raises:
        InputError: `run` is not a run folder or has no such round, or the client was not in the round's cohort.
        Diverged, EnvironmentFailure: training of the client, or of an earlier round, failed.
    """
    folder = Path(run).resolve()
    places = (None if place is None else Path(place) for place in (data, code))
    found = with_cohorts(recorded(folder, placed_recipe(folder, *places), Permission(run_code, ask, RUN_CODE)))
    _check_drawn(found, round, client)
    with ONE_THREAD, generators_kept(), settings_kept():
        return replay_in(found, entered(found, round, say), round, client)


def _check_drawn(run: RecordedRun, round: int, client: int | str) -> None:
    """Refuse a client that is not in the round's recorded cohort, before any round is computed.

    Raises:
        InputError: the client is not in the cohort; the message has the cohort and the nearest round with the client.
    """
    if not 1 <= round <= len(run.rows):
        return
    with Federation.open(run.recipe.data) as federation:
        number = federation.client_number(client)
        name = federation.client_name(number)
    _refuse_absent(number, name, round, run.rows[round - 1]["cohort"], run)


def _refuse_absent(number: int, name: str, round: int, clients: Sequence[int], run: RecordedRun) -> None:
    if number in clients:
        return
    cohort = ", ".join(map(str, clients[:20])) + (", …" if len(clients) > 20 else "")
    others = [other for other, row in enumerate(run.rows, start=1) if number in row["cohort"]]
    nearest = min(others, key=lambda other: (abs(other - round), other), default=None)
    remedy = "it was in none" if nearest is None else f"its nearest round is {nearest}"
    got = f"a cohort of {cohort or 'nobody'}"
    raise InputError(f"client {number} ({name}) took no part in round {round}", got=got, remedy=remedy)


def replay_in(run: RecordedRun, begun: RewoundRun, round: int, client: int | str) -> Replay:
    """Train one client of a round again.

    Args:
        run: the recorded run.
        begun: the run rewound to the beginning of the round.
        round: the round, from 1.
        client: the client's number or name.

    Raises:
        InputError: the client was not in the round's cohort.
        Diverged, EnvironmentFailure: the client's training failed.
    """
    parts, plan = begun.parts, begun.simulation.plan(round)
    number = parts.federation.client_number(client)
    name = parts.federation.client_name(number)
    clients = plan.cohort.clients.tolist()
    _refuse_absent(number, name, round, clients, run)
    place = clients.index(number)
    steps: list[Step] = []
    recipe = run.at(round).recipe
    with run.at(round).imported():
        meter = _StepMeter(recipe, parts, number, round, plan.w, steps)
        reported = reports_of(parts, plan, [place], meter)[number]
    sizes = [len(row["cohort"]) for row in run.rows]
    hashes = read_update_hashes(run.folder / UPDATE_HASHES, sizes, round)
    known = None if hashes is None else int(hashes[place])
    return Replay(
        recipe=recipe,
        round=round,
        client=number,
        name=name,
        w=plan.w.clone(),
        reported=reported,
        recorded_hash=known,
        start=begun.start,
        parted=begun.parted,
        steps=steps,
        _entered=begun,
        _run=run,
    )


class _StepMeter:
    """Observer that measures each step of a client: loss and gradient norm at its beginning, drift at its end.

    It computes with a second model, so that the engine's is left unchanged. Random numbers of the model, such as
    dropout masks, are drawn again from the client's stream, so that both models get the same numbers.
    """

    def __init__(self, recipe: Recipe, parts: Parts, client: int, round: int, w: Tensor, found: list[Step]):
        self._section, self._parts, self._client, self._w, self._found = recipe.local, parts, client, w, found
        self._round = round
        device, dtype = parts.model.vector.device, parts.model.vector.dtype
        self._model: FlatModel = build_model(recipe, parts.federation, dtype, device)
        self._loss: Loss = build_loss(recipe, parts.federation, dtype, device).of_client(client)
        self._batches: Iterator[Samples] = iter(())
        self._keeps = False
        self._draws = Generators(device, parts.seed, Purpose.DROPOUT, round, client)
        self._y: Tensor | None = None
        self._beside: tuple[State, State] = ({}, {})

    def begin(self, task: Task, w: Tensor) -> None:
        """Keep the iterate, state and minibatches that the client's training starts with."""
        if task.client == self._client:
            self._y = start_of(task.tilt, w).clone()
            self._beside = task.own, self._parts.model.averaged
            self._batches = _batches(self._section, self._parts.seed, task, self._round)
            self._keeps = task.steps * w.nbytes <= MOST_BYTES
            self._model.forget()

    def __call__(self, client: int, number: int, y: Tensor) -> None:
        """Measure the step `number` of a client, which ended at `y`, (d,); see `hpcfed.client.solver.StepCallback`."""
        if client != self._client:
            return
        drift = norm_of(y - self._w)
        engine = self._parts.model
        beside = ({}, {}) if engine.is_plain else (engine.private_state(), engine.averaged_buffers())
        kept = (y.clone(), *beside) if self._keeps else (None,)
        if number == len(self._found):  # guessed steps, which belong to the last step
            last = self._found.pop()
            self._found.append(Step(number, last.x, last.y, last.loss, last.gradient, drift, *kept))
            return
        x_batch, y_batch = next(self._batches)
        assert self._y is not None
        loss, gradient = self._measure(self._y, x_batch, y_batch)
        self._found.append(Step(number, x_batch, y_batch, loss, gradient, drift, *kept))
        self._y, self._beside = y.clone(), beside

    def _measure(self, y: Tensor, x_batch: Tensor, y_batch: Tensor) -> tuple[float, float]:
        if not len(y_batch):
            return 0.0, 0.0
        own, buffers = self._beside
        self._model.load(y, own)
        if not self._model.is_plain:
            self._model.set_buffers(own, buffers)
        self._model.trained_grad.zero_()
        engine = self._parts.engine
        masks = (
            engine.masks(self._round, self._client, len(self._found) + 1, len(x_batch))
            if hasattr(engine, "masks")
            else []
        )
        with self._draws.here(), torch.enable_grad(), GivenMasks(masks) if masks else nullcontext():
            loss = self._loss.batch(self._model.module(x_batch), y_batch)
            loss.backward()
        return float(loss.detach()), norm_of(self._model.grad)


def norm_of(vector: Tensor) -> float:
    """Return ‖vector‖, of which float32 may not hold the squares."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _batches(section: Local, seed: int, task: Task, round: int) -> Iterator[Samples]:
    """Return the minibatches of a client in a round, augmented, in the order in which the engines use them."""
    rng, samples = stream(seed, Purpose.BATCHES, round, task.client), task.samples
    if section.noise is None:
        batches = minibatches(samples, section.batch_size, task.steps, rng)
    else:
        batches = poisson_minibatches(samples, expected_size(samples, section.batch_size), task.steps, rng)
    if section.augment is None:
        return batches
    rng, augment = stream(seed, Purpose.AUGMENT, round, task.client), section.augment
    return ((augmented(x, augment, rng) if len(y) else x, y) for x, y in batches)
