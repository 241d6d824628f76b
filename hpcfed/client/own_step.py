"""A user-defined local step, ``local.step``: it takes the place of clip, decay and client optimizer.

    def step(parameters, batch, context, **step_args):
        ...
        return next_parameters, loss

It is called for each of a client's τ_i minibatches, `parameters` (d,) and `batch` (x, y), with the recipe's
``local.step_args`` as keywords, and returns the client's next parameters and the loss for the record. All that it
remembers from one call to the next lies in ``context.memory``. Clients are trained one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hpcfed.client.solver import Expected, SequentialSolver, StepCallback, Task, start_of
from hpcfed.config.user_code.blame import defined_at
from hpcfed.config.user_code.lent import WriteDetector
from hpcfed.data.cache import Samples
from hpcfed.errors import InputError
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.ranks.graphs import Graphs
from hpcfed.rng import Purpose, stream
from hpcfed.types import LocalResult, State


class StepContext:
    """The context of a user's step, one for each client and round.

    Attributes:
        round, lr: t and η_l of the round.
        client: the client's number and size.
        step, steps: number of the present step, from 1, and of all, τ_i.
        w: the server's model, (d,).
        state, shared: the method's state of this client, and its shared state.
        memory: empty at the client's first step in a round; for a momentum, say.
        module: the model, for its structure: call it by `output`, since its parameters are those evaluated last.
        num_parameters: of the model that clients share; a vector (d,) is longer, by the gaps between tensors.

    Tensors of `w`, `state` and `shared` belong to the run: a step makes new ones.
    """

    def __init__(self, task: Task, w: Tensor, round: int, tools: _Tools):
        self._task, self._tools = task, tools
        self.round, self.lr, self.w = round, tools.solver.lr(round), w
        assert task.info is not None
        self.client = task.info
        self.step, self.steps = 0, task.steps
        self.state: State = task.state
        self.shared: State = task.shared
        self.memory: dict[str, Any] = {}
        self.num_parameters = tools.model.num_parameters
        self.asked_for_tilt = False

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._tools.model.module

    @cached_property
    def random(self) -> np.random.Generator:
        """Random numbers of (seed, round, client), the same on any rank; they go on from step to step."""
        return stream(self._tools.seed, Purpose.LOCAL_STEP, self.round, self.client.client)

    def gradient(self, parameters: Tensor, batch: Samples) -> tuple[Tensor, Tensor]:
        """Return ∇f of a minibatch at `parameters`, (d,), without the method's tilt, and the loss there."""
        self._tools.model.vector.copy_(parameters.detach())
        self._tools.model.grad.zero_()
        loss = self._tools.solver.add_gradient(*batch)
        return self._tools.model.grad.clone(), loss

    def tilt(self, parameters: Tensor) -> Tensor:
        """Return what the method adds to a gradient at `parameters`: shift + μ·(parameters − anchor), (d,)."""
        self.asked_for_tilt, tilt = True, self._task.tilt
        anchor = self.w if tilt.anchor is None else tilt.anchor
        added = tilt.mu * (parameters - anchor) if tilt.mu else torch.zeros_like(parameters)
        return added if tilt.shift is None else added + tilt.shift

    def output(self, parameters: Tensor, x: Tensor, part: nn.Module | None = None) -> Tensor:
        """Return the output for x of the model at `parameters`, (d,), which autograd may follow; in the recipe's
        ``precision``.

        Args:
            part: a module inside the model, to call it alone; x is then its input.
        """
        module = self.module if part is None else part
        views = self._tools.model.views(parameters)
        names = ((name, self._tools.names.get(id(one))) for name, one in module.named_parameters())
        with self._tools.solver.computing():
            found = functional_call(module, {name: views[whole] for name, whole in names if whole is not None}, (x,))
        is_rounded = isinstance(found, Tensor) and found.dtype == torch.bfloat16
        return found.to(parameters.dtype) if is_rounded else found  # as autocast's losses do

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the recipe's loss of a minibatch."""
        return self._tools.loss.of_client(self.client.client).batch(output, y)


class OwnStepSolver:
    """Trains one client after another by the user's step.

    Args:
        solver: the run's minibatches and gradients.
        function, args: the user's step, and its keyword arguments.
        model, loss, seed: the run's.
    """

    tile, fixed_slots = 1, False
    graphs: Graphs | None = None

    def __init__(
        self,
        solver: SequentialSolver,
        function: Callable[..., Any],
        args: Mapping[str, Any],
        model: FlatModel,
        loss: Loss,
        seed: int,
    ):
        self._solver, self._function, self._args = solver, function, args
        self._model, self._tools = model, _Tools(solver, model, loss, seed)
        self._delta = torch.zeros_like(model.vector)
        # under autocast a step would keep the casts of parameters that it changes
        self._computing = solver.computing if solver.precision == "tf32" else nullcontext

    def solve(
        self, w: Tensor, tasks: Sequence[Task], round: int, on_step: StepCallback | None = None
    ) -> Iterator[LocalResult]:
        """Train clients one after another; see `Engine`."""
        return (self._solve(w, task, round, on_step) for task in tasks)

    def expect(self, members: Callable[[], Iterable[Expected]]) -> None:
        """Do nothing: the user's step draws for itself."""

    def _solve(self, w: Tensor, task: Task, round: int, on_step: StepCallback | None) -> LocalResult:
        context, y, losses = StepContext(task, w, round, self._tools), start_of(task.tilt, w).clone(), 0.0
        lent = WriteDetector(w=w, state=task.state, shared=task.shared)
        for batch in self._solver.minibatches(task, round):
            context.step += 1
            with self._computing():
                answer = self._function(y, batch, context, **self._args)
            y, loss = self._checked(answer, w)
            losses += loss
            if on_step is not None:
                on_step(task.client, context.step, y)
        if what := lent.written():
            self._refuse(f"context.{what}", "left as it is", "written to in place", "make a new tensor there")
        if task.tilt.after_momentum is not None:
            remedy = "use the built-in steps, or another method"
            self._refuse("the method's after_momentum", "steps that add it", "a step of your own", remedy)
        tilts = task.tilt.shift is not None or task.tilt.mu != 0
        if context.step and tilts and not context.asked_for_tilt:
            remedy = "add context.tilt(parameters) to its gradient, or use a method without a tilt, such as fedavg"
            self._refuse("the method adds a term to each gradient", "context.tilt in use", "no call of it", remedy)
        self._model.check_buffers()
        views = (self._model.views(vector).values() for vector in (w, y, self._delta))
        for start, end, delta in zip(*views, strict=True):  # gaps stay 0
            torch.sub(start, end, out=delta)
        return LocalResult(self._delta, task.steps, losses, context.lr)

    def _checked(self, answer: Any, like: Tensor) -> tuple[Tensor, float]:
        """Return the step's answer, detached from autograd's graph.

        Raises:
            InputError: it is something else than parameters like those of the model, and a number.
        """
        if not isinstance(answer, tuple) or len(answer) != 2:
            self._refuse("its answer", "a pair, next parameters and loss", f"a {type(answer).__name__}")
        y, loss = answer
        if not isinstance(y, Tensor) or (y.shape, y.dtype, y.device) != (like.shape, like.dtype, like.device):
            got = f"shape {tuple(y.shape)} in {y.dtype}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            self._refuse("its next parameters", f"a tensor of shape {tuple(like.shape)} in {like.dtype}", got)
        if not (isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1)):
            self._refuse("its loss", "a number", f"a {type(loss).__name__}")
        return y.detach(), float(loss.detach() if isinstance(loss, Tensor) else loss)

    def _refuse(self, what: str, expected: str, got: str, remedy: str = "correct it there") -> NoReturn:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        where = ": ".join(filter(None, (defined_at(self._function), f"local.step, in {name}")))
        raise InputError(what, where=where, expected=expected, got=got, remedy=remedy)


class _Tools:
    """The tools that the contexts of a run share."""

    def __init__(self, solver: SequentialSolver, model: FlatModel, loss: Loss, seed: int):
        self.solver, self.model, self.loss, self.seed = solver, model, loss, seed
        self.names = {id(one): name for name, one in model.module.named_parameters() if one.requires_grad}
