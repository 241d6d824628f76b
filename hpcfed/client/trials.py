"""Trials of an engine before the first round: of compiling, of stacking, and of recording its work."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from hpcfed.client.batched.gradients import Vectorized
from hpcfed.client.graph_trial import hindrance
from hpcfed.client.solver import Engine, SequentialSolver
from hpcfed.data.cache import Samples
from hpcfed.errors import RAISED, InputError, in_a_line
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.accelerators import check_refusals
from hpcfed.ranks.graphs import Graphs

NO_ORDER = re.compile(r"(\S+) does not have a deterministic implementation")
"""torch's words of a kernel that adds in any order where others are asked for."""
ONE_BY_ONE = "use local.engine: sequential"
STEPS_TO_REPLAY = 3
"""What is compiled, or changes from call to call, shows within so many."""


def try_compiled(build: Callable[[], SequentialSolver], like: Samples) -> SequentialSolver:
    """Build a solver and take a few steps: what cannot be compiled, captured or replayed shows before the first round.

    Raises:
        InputError: it cannot.
    """
    try:
        solver = build()
        for _ in range(STEPS_TO_REPLAY):
            solver.add_gradient(*like)
        return solver
    except RAISED as error:  # a compiler may raise anything
        what = f"local.compile: true does not work here ({in_a_line(error)})"
        raise InputError(what, remedy="use compile: false, or install a C++ compiler") from error


def try_vectorized(network: Vectorized, model: FlatModel, x: Tensor, y: Tensor, *, key: str, remedy: str) -> None:
    """Compute the gradients of two slots once, so that what cannot be stacked is known before the first round.

    Args:
        network, model: the module under `torch.func.vmap`, and its parameters.
        x, y: a minibatch of each slot, (2, B, …).
        key: the recipe's key that asks for these gradients.
        remedy: what to do if they cannot be computed.

    Raises:
        InputError: they cannot.
    """
    stacks = [view.expand(2, *view.shape) for view in model.views(model.vector).values()]
    try:
        network.gradients(stacks, x, y, [stack.clone() for stack in stacks])
    except RAISED as error:  # a user's model may raise anything
        raise InputError(f"{key} cannot take this model ({in_a_line(error)})", remedy=remedy) from error


def try_clients_at_once(network: Vectorized, model: FlatModel, like: Samples) -> None:
    """Try the gradients of two clients at once.

    Raises:
        InputError: they cannot be computed.
    """
    if model.vector.device.type != "cpu" and any(isinstance(part, torch.nn.RNNBase) for part in model.module.modules()):
        what = "local.engine: batched cannot take recurrent layers on a GPU, whose kernels take one client's weights"
        raise InputError(what, remedy=ONE_BY_ONE)
    x, y = (part.unsqueeze(0).expand(2, *part.shape) for part in like)
    try_vectorized(network, model, x, y, key="local.engine: batched", remedy=ONE_BY_ONE)


def refuse_unseen(model: FlatModel, like: Samples) -> None:
    """Refuse a user's module that does in training what stacked parameters do not show.

    Raises:
        InputError: it gives a parameter other memory in a forward pass, or has hooks on gradients.
    """
    if model.bindings is None:
        return
    initial = model.trained.clone()
    model.forget()
    with suppress(*RAISED), torch.no_grad():  # of an error the trial of the stacked network says more
        for _ in range(STEPS_TO_REPLAY):
            model.module(like[0].expand(2, *like[0].shape[1:]))
    model.load(model.vector)
    model.trained.copy_(initial)
    hooks = [part._backward_hooks or part._backward_pre_hooks for part in model.module.modules()]
    hooks += [one._backward_hooks or one._post_accumulate_grad_hooks for one in model.module.parameters()]
    if model.bindings.rebound or any(hooks):
        why = "it gives a parameter other memory in forward" if model.bindings.rebound else "it has hooks on gradients"
        what = f"local.engine: batched cannot take this model: {why}"
        raise InputError(what, remedy=ONE_BY_ONE)


def try_graphs(engine: Engine, graphs: Graphs, model: FlatModel, like: Samples, width: int) -> None:
    """Try to record the engine's work as CUDA graphs; if that fails, turn recording off and keep the reason.

    Raises:
        OutOfMemoryError: the device's memory is too small for its kernels.
    """
    if graphs.records:
        initial = model.trained.clone()
        with _any_order() as names:
            graphs.hindrance = hindrance(engine, graphs, model, like, width)
        graphs.any_order = tuple(sorted(names))
        check_refusals(model.vector.device)
        graphs.records = not graphs.hindrance
        model.forget()
        model.load(initial[: len(model.vector)])
        model.trained.copy_(initial)


@contextmanager
def _any_order() -> Iterator[set[str]]:
    """Yield a set of the kernels that add in any order, of which torch has warned; filled when the block ends."""
    names = set[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield names
    for one in caught:
        if (found := NO_ORDER.match(str(one.message))) is not None:
            names.add(found[1])
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
