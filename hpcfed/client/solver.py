"""The local solver: one client's training in one round, the same lines for every method.

    g = clip(∇f(y; batch) + shift + μ (y − anchor)) + wd·y,     y ← y − η · (the optimizer's direction from g, + after)

from y = w, and then, if the recipe has it guess, on without gradients. What a method adds is its tilt (shift, μ,
anchor, after), constant during the round; so shift − μ·anchor is computed once, and μ·y joins the weight decay where no
clipping comes between the two. This is ``clip: all``; ``clip: linear`` clips ∇f + shift − μ·anchor alone and adds μ·y
after it, as it does wd·y. Adam and Yogi get μ (y − anchor) from the difference: where the loss has no slope, the
rounding of μ·y − μ·anchor would be the whole gradient, whose size they take away.

Two engines do this: `SequentialSolver`, one client after another with autograd, here, and `StackedSolver`, many clients
at once (`hpcfed.client.batched.solver`), by two kinds of steps. The equation thus stands in three places, each in the
order of operations that is fastest there; ``tests/numerics/test_tilts.py`` holds the three to one computation by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfed.arithmetic.elementary import power
from hpcfed.arithmetic.operations import LIBRARIES
from hpcfed.client.augment import augmented
from hpcfed.client.effective_steps import effective_steps
from hpcfed.client.optimizers import Number, optimizer_for
from hpcfed.client.precision import computing
from hpcfed.config.recipe import Local as LocalSection
from hpcfed.config.user_code.blame import described, is_of_the_machine, place_of, raised_in_torch
from hpcfed.config.user_code.generators import seed_generators
from hpcfed.data.batches import minibatches
from hpcfed.data.cache import Samples
from hpcfed.errors import RAISED, HpcfedError, InputError
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.ranks.accelerators import accelerator
from hpcfed.ranks.graphs import Graphs
from hpcfed.rng import Purpose, stream, torch_seed
from hpcfed.types import ClientInfo, LocalResult, State, Tilt

FREED = "backward through the graph a second time"
"""torch's words where a loss depends on a minibatch before."""


@dataclass(slots=True)
class Task:
    """A client's work in a round.

    Attributes:
        client: its number.
        samples: all it has, on the model's device.
        tilt: what the method adds to its gradients.
        steps: τ_i, minibatch steps.
        guessed: τ'_i, steps that follow without gradients; ``inf`` for the limit.
        info, shared, state: what a step of the user's own may read: the client's size, the shared state and the
            client's own.
        own: its private parameters and buffers; empty where it has none.
        place: in the cohort, from which its slot follows where the engine has fixed ones.
        personal: whether its personal model is trained, of which it sends nothing.
    """

    client: int
    samples: Samples
    tilt: Tilt
    steps: int
    guessed: float
    info: ClientInfo | None = None
    shared: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    own: State = field(default_factory=dict)
    place: int = 0
    personal: bool = False


StepCallback = Callable[[int, int, Tensor], None]
"""Called with a client, the number of its step, from 1, and its iterate, (d,), valid during the call. Guessed steps
count with the last one, which is shown once more after them."""


class Expected(NamedTuple):
    """A client that is going to train: all that its draws depend on beside the recipe."""

    round: int
    client: int
    num_samples: int
    steps: int


class Engine(Protocol):
    """Trains clients.

    Attributes:
        tile: R, clients that are trained together.
        fixed_slots: whether a client's slot follows from its place in the cohort, since its bits may depend on it; the
            clients of one tile then have different slots.
        graphs: records the work of a device; None on a CPU.
    """

    tile: int
    fixed_slots: bool
    graphs: Graphs | None

    def solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> Iterator[LocalResult]:
        """Train clients from the server's model `w`, (d,) on the model's device; yield the result of each, in order.

        A yielded Δ is valid until one of the next tile is asked for; a tile is of up to R tasks in a row, of one μ, and
        of different slots where these are fixed. Minibatches, their augmentation, and all that the model draws itself
        (dropout), come from the streams of (round, client). `on_step` is called after each step.
        """
        ...

    def expect(self, members: Callable[[], Iterable[Expected]]) -> None:
        """Prepare for clients of the next round while a device works on this one; do nothing on a CPU.

        `members` are likely to be asked for in this order. It is called only if there is something to prepare.
        """
        ...


@dataclass(frozen=True)
class Stepping:
    """Step sizes and effective steps of local training."""

    section: LocalSection

    def lr(self, round: int) -> float:
        """Return η_l of a round, counted from 1."""
        if self.section.lr_schedule:
            begun = [entry.lr for entry in self.section.lr_schedule if entry.round <= round]
            return begun[-1] if begun else self.section.lr
        return self.section.lr * power(self.section.lr_decay, round - 1)

    def effective_steps(self, steps: int, guessed: float, *, round: int, mu: float) -> float | None:
        """Return ‖a_i‖₁ of a client whose tilt has this μ; None for an optimizer that has none."""
        if self.section.optimizer != "sgd":
            return None
        known = {"lr": self.lr(round), "momentum": self.section.momentum, "mu": mu}
        return effective_steps(steps, guessed, **known)

    def pull(self, mu: float) -> float:
        """Return the coefficient of y − anchor in the gradient, where that is formed from the difference; else 0."""
        splits = self.section.clip_norm is not None and self.section.clip == "linear"
        return 0.0 if self.section.optimizer == "sgd" or splits else mu

    def joined(self, task: Task) -> Task:
        """Return the task with `Tilt.after_momentum` in the shift where no clip and no momentum are between them."""
        tilt, section = task.tilt, self.section
        after = tilt.after_momentum
        if after is None or section.optimizer != "sgd" or section.momentum or section.clip_norm is not None:
            return task
        shift = after if tilt.shift is None else tilt.shift + after
        return replace(task, tilt=replace(tilt, shift=shift, after_momentum=None))

    def scales(self, mu: float) -> tuple[float, float]:
        """Return the coefficients of y in the gradient: of what is clipped, and of what is added after the clip."""
        decay, mu = self.section.weight_decay, mu - self.pull(mu)
        if self.section.clip_norm is None:
            return mu + decay, 0.0
        return (mu, decay) if self.section.clip == "all" else (0.0, mu + decay)


class Scales(NamedTuple):
    """Coefficients of y in the gradient: of what is clipped, of what is added after the clip, and of y − anchor.

    Numbers of the host, 0 where there is none, or scalars of a device.
    """

    before_clip: Number
    after_clip: Number
    pull: Number

    @staticmethod
    def has(scale: Number) -> bool:
        """Whether there is one, without a look at the device."""
        return isinstance(scale, Tensor) or bool(scale)

    def on_device(self, numbers: Sequence[Tensor]) -> Scales:
        """Return the same with the device's numbers in place of those that there are."""
        return Scales(*(number if scale else 0.0 for scale, number in zip(self, numbers, strict=True)))


class TiltParts(NamedTuple):
    """A tilt as the steps of a client take it: shift and anchor in `constant_of`, −η·after_momentum in `move_of`."""

    constant: Tensor | None
    anchor: Tensor | None
    offset: Tensor | None
    radius: Number
    move: Tensor | None


class DeviceTraining(Protocol):
    """Takes a solver's steps of a client on a device, recorded where that can be done (`DeviceClient`)."""

    def train(
        self,
        w: Tensor,
        task: Task,
        lr: float,
        rng: np.random.Generator,
        of_crops: np.random.Generator,
        show: Callable[[int], None] | None,
    ) -> Tensor:
        """Take a client's steps from what its model holds; return the sum of its losses, a scalar.

        Args:
            w: the server's model, (d,).
            task: the client's.
            lr: η_l.
            rng, of_crops: what its minibatches and their crops are drawn from.
            show: called after each step with its number.
        """
        ...


class SequentialSolver:
    """Trains one client after another with one model and one set of buffers.

    Args:
        model, loss: what is trained, and its objective.
        section: the recipe's ``local``.
        seed: the recipe's ``seed.batches``.
        draws: whether the model, the loss or the step draws random numbers, which then come from the client's stream.
        precision: the recipe's.
        streams: what the minibatches, and what the model draws, come from.
        private_first: the recipe's ``parameters.private_first``; 0: all parameters take all steps.

    Attributes:
        precision: the recipe's.
        computing: context manager of a forward and backward pass.
    """

    tile, fixed_slots = 1, False
    graphs: Graphs | None = None

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        section: LocalSection,
        seed: int,
        *,
        draws: bool,
        precision: str = "float32",
        streams: tuple[Purpose, Purpose] = (Purpose.BATCHES, Purpose.DROPOUT),
        private_first: int = 0,
    ):
        self._model = model
        self._module = _compiled(model) if section.compile else model.module
        self.precision = precision
        self.computing = computing(precision, model.vector.device)
        self._loss = self._loss_here = loss
        self._section = section
        self._stepping = Stepping(section)
        self._seed = seed
        self._of_batches, self._of_model = streams
        self._draws = draws
        self._optimizer = optimizer_for(section, model.trained)
        self._on_device: DeviceTraining | None = None
        self._private_first = private_first
        self._still: slice | None = None  # the trained parameters that the present step leaves as they are

    def train_by(self, device: DeviceTraining, graphs: Graphs) -> None:
        """Let clients be trained on a device by steps that are recorded."""
        self._on_device, self.graphs = device, graphs

    def solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> Iterator[LocalResult]:
        """Train clients one after another; see `Engine`."""
        solve = self._solve if self._on_device is None else partial(self._solve_on, self._on_device)
        return (solve(w, task, round, on_step) for task in tasks)

    def expect(self, members: Callable[[], Iterable[Expected]]) -> None:
        """Do nothing: the host is ahead of a device from the second client on."""

    def lr(self, round: int) -> float:
        """Return η_l of a round, counted from 1."""
        return self._stepping.lr(round)

    def minibatches(self, task: Task, round: int) -> Iterator[Samples]:
        """Return the minibatches of one client in one round, augmented where the recipe says so.

        What else draws comes from the client's stream, and gradients are of its loss, from here on.
        """
        rng = self._begin(task, round)
        batches = minibatches(task.samples, self._section.batch_size, task.steps, rng)
        if self._section.augment is None:
            return batches
        rng = stream(self._seed, Purpose.AUGMENT, round, task.client)
        return ((augmented(x, self._section.augment, rng), y) for x, y in batches)

    def _begin(self, task: Task, round: int) -> np.random.Generator:
        """Prepare for a client; return what its minibatches are drawn from."""
        self._loss_here = self._loss.of_client(task.client)
        self._model.forget()
        if self._draws:
            seed_generators(self._model.vector.device, self._seed, self._of_model, round, task.client)
            self._model.seed(torch_seed(self._seed, self._of_model, round, task.client))
        return stream(self._seed, self._of_batches, round, task.client)

    def add_gradient(self, x: Tensor, y: Tensor, begin: Callable[[], None] | None = None) -> Tensor:
        """Add ∇f of a minibatch to the model's flat gradient, and return its loss.

        `begin` sets that gradient once the loss is computed, since a forward pass may change the parameters. Hooks on
        gradients see ∇f alone.
        """
        model = self._model
        with self.computing():
            try:
                output = self._module(x)
                if len(output) != len(y):
                    expected, got = f"a row for each of {len(y)} samples", f"{len(output)} rows"
                    raise InputError("the model's output", expected=expected, got=got)
                loss = self._loss_here.batch(output, y)
                if begin is not None:
                    model.keep_values()
                    begin()
                begun = model.trained_grad.clone() if model.shows_gradients else None
                if begun is not None:
                    model.trained_grad.zero_()
                loss.backward()
            except RAISED as error:
                model.adopt()  # which names a parameter of another shape
                if (failure := self._failure_of(error)) is None:
                    raise
                raise failure from error
        model.adopt()
        if begun is not None:
            model.trained_grad.add_(begun)
        return loss.detach()

    def _failure_of(self, error: BaseException) -> InputError | None:
        """Return the one-line error for one that torch raises in a user's model without a line of the user's code in
        its traceback, as backward passes do; None for any other.
        """
        if FREED in str(error):
            what = "the model keeps a tensor of an earlier minibatch, through which gradients would go back"
            return InputError(what, remedy="keep self.state = state.detach() in its place")
        if self._model.bindings is None or isinstance(error, HpcfedError) or is_of_the_machine(error):
            return None
        if place_of(error) or not raised_in_torch(error) or "overflow" in str(error):
            return None
        remedy = "compute in new tensors: x = x + 1, not x += 1" if "inplace operation" in str(error) else ""
        return InputError("the model or the loss", got=described(error), remedy=remedy)

    def _solve(self, w: Tensor, task: Task, round: int, on_step: StepCallback | None) -> LocalResult:
        model, task = self._model, self._stepping.joined(task)
        lr, tilt = self._stepping.lr(round), task.tilt
        pull = self._stepping.pull(tilt.mu)
        scales = Scales(*self._stepping.scales(tilt.mu), pull)
        constant, move = constant_of(tilt, w, pull), move_of(tilt, lr)
        parts = TiltParts(constant, anchor_of(tilt, w), tilt.offset, tilt.radius, move)
        model.load(start_of(tilt, w), task.own)
        self._optimizer.reset()
        losses: list[Tensor] = []
        for x_batch, y_batch in self.minibatches(task, round):
            numbers = self._optimizer.numbers(lr, self._step_number(task, len(losses)))
            losses.append(self.take_step(x_batch, y_batch, parts, scales, numbers))
            if on_step is not None:
                on_step(task.client, len(losses), model.vector)
        return self._result(w, task, lr, _summed(losses), on_step)

    def _step_number(self, task: Task, taken: int) -> int:
        """Return the number, from 1, of the step after so many, for the optimizer, which begins anew with the shared
        parameters where the private ones come first.
        """
        if not self._private_first:
            return taken + 1
        first, shared = self._private_first, len(self._model.vector)
        if self._section.epochs is not None and self._section.batch_size != "full":
            first *= -(-len(task.samples[1]) // int(self._section.batch_size))
        if taken == first:
            self._optimizer.reset()
        self._still = slice(shared) if taken < first else slice(shared, None)
        return taken + 1 if taken < first else taken - first + 1

    def _solve_on(
        self, device: DeviceTraining, w: Tensor, task: Task, round: int, on_step: StepCallback | None
    ) -> LocalResult:
        """Train a client by steps that are recorded."""
        task = self._stepping.joined(task)
        self._model.load(start_of(task.tilt, w), task.own)
        lr, rng = self._stepping.lr(round), self._begin(task, round)
        of_crops = stream(self._seed, Purpose.AUGMENT, round, task.client)
        show = None if on_step is None else lambda step: on_step(task.client, step, self._model.vector)
        loss_sum = device.train(w, task, lr, rng, of_crops, show)
        return self._result(w, task, lr, loss_sum, on_step)

    def _result(
        self, w: Tensor, task: Task, lr: float, loss_sum: float | Tensor, on_step: StepCallback | None
    ) -> LocalResult:
        """Take the guessed steps, and return what has come of a client's training."""
        model = self._model
        if task.guessed:
            self._optimizer.taken = task.steps
            self._optimizer.guess(model.trained, lr, task.guessed)
            if on_step is not None:
                on_step(task.client, task.steps, model.vector)
        model.check_buffers()
        delta = torch.sub(w, model.vector, out=model.grad)  # which the last step has used
        result = LocalResult(delta, task.steps, loss_sum, lr)
        if model.is_plain:
            return result
        return replace(result, own=model.private_state(), buffers=model.averaged_buffers())

    def reset(self) -> None:
        """Let the client optimizer begin."""
        self._optimizer.reset()

    def numbers(self, lr: float, steps: int) -> list[tuple[float, ...]]:
        """Return the client optimizer's numbers of each step."""
        return [self._optimizer.numbers(lr, step + 1) for step in range(steps)]

    def take_step(self, x: Tensor, y: Tensor, parts: TiltParts, scales: Scales, numbers: Sequence[Number]) -> Tensor:
        """Take a step on a minibatch; return its loss."""
        loss = self._add_gradient_of(parts, x, y, partial(self._begin_gradient, parts, scales))
        self._descend(scales, numbers)
        if parts.move is not None and (self._still is None or self._still.start):
            self._model.vector.add_(parts.move)
        return loss

    def _begin_gradient(self, parts: TiltParts, scales: Scales) -> None:
        """Set the flat gradient to constant + scale·y: what backward then adds ∇f to, in one pass over memory.

        A method tilts the shared parameters alone; weight decay is on all.
        """
        model = self._model
        _begin(model.vector, model.grad, parts.constant, scales.before_clip)
        if model.private is not None and model.private_grad is not None:
            _begin(model.private, model.private_grad, None, self._stepping.scales(0.0)[0])
        if parts.anchor is not None and Scales.has(scales.pull):
            LIBRARIES.add_scaled(model.grad, model.vector - parts.anchor, scales.pull)

    def _add_gradient_of(self, parts: TiltParts, x: Tensor, y: Tensor, begin: Callable[[], None]) -> Tensor:
        """Add ∇f of a minibatch, taken where the tilt says, to what `begin` sets the gradient to; return the loss."""
        ascends = Scales.has(parts.radius)
        if parts.offset is None and not ascends:
            return self.add_gradient(x, y, begin)
        begin()
        model, grad = self._model.trained, self._model.trained_grad
        kept, constant = model.clone(), grad.clone()
        if parts.offset is not None:
            self._model.vector.add_(parts.offset)
        if ascends:
            grad.zero_()
            own, buffers = self._model.private_state(), self._model.averaged_buffers()
            self.add_gradient(x, y)
            model.add_(grad * (parts.radius / (torch.linalg.vector_norm(grad) + 1e-12)))
            grad.copy_(constant)
            self._model.set_buffers(own, buffers)  # each minibatch enters running statistics once
        loss = self.add_gradient(x, y)
        model.copy_(kept)
        return loss

    def _descend(self, scales: Scales, numbers: Sequence[Number]) -> None:
        """One step of the client optimizer from the flat gradient; a clip takes the norm of all that is trained."""
        model, g = self._model, self._model.trained_grad
        if self._still is not None:
            g[self._still] = 0
        if self._section.clip_norm is not None:
            g.mul_((self._section.clip_norm / (torch.linalg.vector_norm(g) + 1e-6)).clamp_(max=1.0))
            if Scales.has(scales.after_clip):
                LIBRARIES.add_scaled(model.grad, model.vector, scales.after_clip)
            if model.private is not None and (decay := self._stepping.scales(0.0)[1]):
                g[len(model.grad) :].add_(model.private, alpha=decay)
            if self._still is not None:
                g[self._still] = 0
        self._optimizer.move(model.trained, g, numbers)


def _summed(losses: list[Tensor]) -> float | Tensor:
    """Return the sum of losses; a scalar on their device, not waited for, if that is not the CPU."""
    if not losses:
        return 0.0
    total = torch.stack(losses).sum(dtype=torch.float64)
    return float(total) if total.device.type == "cpu" else total


def _compiled(model: FlatModel) -> Callable[[Tensor], Tensor]:
    """Return the forward pass, compiled."""
    device = model.vector.device
    return torch.compile(model.module) if device.type == "cpu" else accelerator(device).compiled(model.module)


def _begin(y: Tensor, g: Tensor, constant: Tensor | None, scale: Number) -> None:
    if constant is not None:
        if isinstance(scale, Tensor):
            torch.addcmul(constant, y, scale, out=g)
        else:
            torch.add(constant, y, alpha=scale, out=g)
    elif Scales.has(scale):
        torch.mul(y, scale, out=g)
    else:
        g.zero_()


def start_of(tilt: Tilt, w: Tensor) -> Tensor:
    """Return where training starts, (d,)."""
    return tilt.anchor if tilt.from_anchor and tilt.anchor is not None else w


def anchor_of(tilt: Tilt, w: Tensor) -> Tensor:
    """Return the anchor, (d,)."""
    return w if tilt.anchor is None else tilt.anchor


def constant_of(tilt: Tilt, w: Tensor, pull: float) -> Tensor | None:
    """Return shift − μ·anchor, or None where it is 0; the shift alone where the gradient has `Stepping.pull`."""
    if tilt.mu == pull:
        return tilt.shift
    anchor = anchor_of(tilt, w)
    return -tilt.mu * anchor if tilt.shift is None else tilt.shift - tilt.mu * anchor


def move_of(tilt: Tilt, lr: float) -> Tensor | None:
    """Return what each step adds to the iterate beside the optimizer's step, −η·after_momentum, (d,)."""
    return None if tilt.after_momentum is None else -lr * tilt.after_momentum


def vectors_of(tilt: Tilt, w: Tensor, lr: float, pull: float) -> dict[str, Tensor]:
    """Return by name the vectors of a tilt, (d,), that a step reads; an anchor where the gradient has a `pull`."""
    found = {"constant": constant_of(tilt, w, pull), "offset": tilt.offset, "move": move_of(tilt, lr)}
    if pull:
        found["anchor"] = anchor_of(tilt, w)
    return {name: vector for name, vector in found.items() if vector is not None}
