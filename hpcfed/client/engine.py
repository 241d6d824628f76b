"""The choice of the engine that trains a recipe's clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.batched.gradients import StackedNetwork, Vectorized, mixes_samples, perceptron_of
from hpcfed.client.batched.matmul import OneDNN, matmul_for
from hpcfed.client.batched.portable import PortableNetwork
from hpcfed.client.batched.solver import StackedSolver
from hpcfed.client.batched.tiles import tile_for
from hpcfed.client.device_client import DeviceClient
from hpcfed.client.graph_trial import hindrance
from hpcfed.client.own_step import OwnStepSolver
from hpcfed.client.solver import Engine, SequentialSolver
from hpcfed.config.clients import FineTune
from hpcfed.config.recipe import Local
from hpcfed.data.cache import Samples
from hpcfed.errors import RAISED, EnvironmentFailure, InputError
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.models.portable import PortableLoss
from hpcfed.ranks.accelerators import is_full
from hpcfed.ranks.graphs import Graphs, on_device
from hpcfed.rng import Purpose

STEPS_TO_REPLAY = 3
"""What is compiled, or changes from call to call, shows within so many."""


@dataclass(frozen=True)
class ClientWork:
    """What the size of a tile follows from, beside the model and the kind of device.

    Attributes:
        cohort_size: most members of a cohort.
        sizes: samples of each client, (N,).
        steps: that each client takes in a round, (N,).
    """

    cohort_size: int
    sizes: np.ndarray
    steps: np.ndarray


def engine_for(
    section: Local,
    model: FlatModel,
    loss: Loss,
    seed: int,
    like: Samples,
    work: ClientWork,
    *,
    precision: str = "float32",
    draws: bool,
    elsewhere: bool = False,
    own_step: Callable[..., Any] | None = None,
    arithmetic: Arithmetic = LIBRARIES,
) -> Engine:
    """Return the engine that a resolved recipe names.

    Args:
        section, model, loss: how clients train, what, and on what.
        seed: the recipe's ``seed.batches``.
        like: one sample, x (1, …) and y (1, …), in the run's shapes and types.
        work: of the clients.
        precision: the recipe's.
        draws: whether the model, the loss or the step draws random numbers.
        elsewhere: whether tilts may have an offset or a radius.
        own_step: the function that the recipe's ``local.step`` names.
        arithmetic: of the recipe's ``bits``.

    Raises:
        InputError: the batched engine or its products cannot take the model, it cannot be compiled, the device knows no
            such precision, or clients cannot be trained in tiles of the size that the recipe asks for.
    """
    if section.engine != "batched":
        _check_tile(section.tile, 1, "local.engine: sequential")
        build = partial(SequentialSolver, model, loss, section, seed, precision=precision, draws=draws)
        solver = try_compiled(build, like) if section.compile else build()
        if on_device(model.vector.device) and own_step is None and loss.by_client is None:
            width = max(1, int(work.sizes.max(initial=1)))
            if section.batch_size != "full":
                width = min(int(section.batch_size), width)
            recorder = _graphs(section, model)
            most_steps = int(work.steps.max(initial=1))
            device = DeviceClient(solver, model, section, recorder, width=width, most_steps=most_steps)
            solver.train_by(device, recorder)
            try_graphs(solver, recorder, model, like, width)
        if own_step is not None:
            return OwnStepSolver(solver, own_step, section.step_args, model, loss, seed)
        return solver
    network = _network(section, model, loss, like)
    draws = draws and isinstance(network, Vectorized)
    width, alone = _minibatch(section, loss, network, work.sizes, draws=draws)
    if alone:
        _check_tile(section.tile, 1, alone)
    tile = section.tile
    if tile == "auto":
        tile = 1 if alone else tile_for(model, model.vector.device, work.cohort_size, width, work.steps)
    graphs = _graphs(section, model) if on_device(model.vector.device) else None
    try:
        stacked = StackedSolver(
            model,
            network,
            section,
            seed,
            tile=tile,
            width=width,
            most_steps=int(work.steps.max(initial=1)),
            elsewhere=elsewhere,
            averages=loss.reduction == "mean",
            draws=draws,
            arithmetic=arithmetic,
            graphs=graphs,
        )
        if graphs is not None:
            try_graphs(stacked, graphs, model, like, width)
        return stacked
    except RuntimeError as error:
        if not is_full(error):
            raise
        what = f"memory for tiles of {tile} clients (local.tile) is short"
        raise EnvironmentFailure(what, remedy="use a smaller local.tile, which changes last bits") from error


def _graphs(section: Local, model: FlatModel) -> Graphs:
    """Return what records the work of a device."""
    return Graphs(model.vector.device, records=section.graphs == "auto")


def _network(section: Local, model: FlatModel, loss: Loss, like: Samples) -> StackedNetwork:
    if isinstance(loss, PortableLoss):
        return PortableNetwork(loss)
    _refuse_unseen(model, like)
    matmul = matmul_for(section.matmul, model.vector)
    network: StackedNetwork | None = perceptron_of(model.module, loss, matmul)
    if network is not None:
        return network
    if isinstance(matmul, OneDNN):
        raise InputError("local.matmul: onednn is for linear models and perceptrons", remedy="use matmul: blas")
    network = Vectorized(model.module, loss, mixes=mixes_samples(model.module, like[0]))
    try_vectorized(network, model, like)
    return network


def _minibatch(
    section: Local, loss: Loss, network: StackedNetwork, sizes: np.ndarray, *, draws: bool
) -> tuple[int, str]:
    """Return the samples of a minibatch that is not short, and why clients have to be trained one by one, if so."""
    if section.batch_size == "full":
        filled = sizes[sizes > 0]
        equal = len(filled) > 0 and filled.min() == filled.max()
        why = "" if equal else "local.batch_size: full, and clients of different sizes"
        return int(filled.max(initial=1)), "random draws of the model or the loss" if draws else why
    width = max(1, min(int(section.batch_size), int(sizes.max(initial=1))))
    if draws:
        return width, "random draws of the model or the loss"
    if not network.takes_short:
        return width, "a loss of your own" if loss.is_own else "samples that are not computed each by itself"
    return width, ""


def _check_tile(asked: int | str, most: int, why: str) -> None:
    """Refuse tiles of more clients than one where they are trained one by one.

    Raises:
        InputError: the recipe asks for them.
    """
    if asked != "auto" and int(asked) > most:
        raise InputError(f"local.tile: {asked} with {why}", remedy="leave local.tile out")


def _refuse_unseen(model: FlatModel, like: Samples) -> None:
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
        raise InputError(what, remedy="use local.engine: sequential")


def tuner_for(fine_tune: FineTune, model: FlatModel, loss: Loss, seed: int, *, draws: bool) -> SequentialSolver:
    """Return a solver that takes the plain steps of a fine-tuning, with random streams of its own."""
    section = Local(steps=fine_tune.steps, batch_size=fine_tune.batch_size, lr=fine_tune.lr)
    streams = Purpose.TUNING_BATCHES, Purpose.TUNING_DROPOUT
    return SequentialSolver(model, loss, section, seed, draws=draws, streams=streams)


def try_compiled(build: Callable[[], SequentialSolver], like: Samples) -> SequentialSolver:
    """Build a solver and take a few steps: what cannot be compiled, captured or replayed shows before the first round.

    Raises:
        InputError: it cannot.
    """
    try:
        solver = build()
        for _ in range(STEPS_TO_REPLAY):
            solver.try_step(*like)
        return solver
    except RAISED as error:  # a compiler may raise anything
        what = f"local.compile: true does not work here ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        raise InputError(what, remedy="use compile: false, or install a C++ compiler") from error


def try_graphs(engine: Engine, graphs: Graphs, model: FlatModel, like: Samples, width: int) -> None:
    """Record an engine's work from now on only if that can be done."""
    if graphs.records:
        initial = model.trained.clone()
        graphs.hindrance = hindrance(engine, graphs, model, like, width)
        graphs.records = not graphs.hindrance
        model.forget()
        model.load(initial[: len(model.vector)])
        model.trained.copy_(initial)


def try_vectorized(network: Vectorized, model: FlatModel, like: Samples) -> None:
    """Compute the gradients of two clients once, so that what cannot be stacked is known before the first round.

    Raises:
        InputError: it cannot.
    """
    if model.vector.device.type != "cpu" and any(isinstance(part, torch.nn.RNNBase) for part in model.module.modules()):
        what = "local.engine: batched cannot take recurrent layers on a GPU, whose kernels take one client's weights"
        raise InputError(what, remedy="use local.engine: sequential")
    x, y = (part.unsqueeze(0).expand(2, *part.shape) for part in like)
    parameters = [view.expand(2, *view.shape) for view in model.views(model.vector).values()]
    try:
        network.gradients(parameters, x, y, [stack.clone() for stack in parameters])
    except RAISED as error:  # a user's model may raise anything
        what = f"local.engine: batched cannot take this model ({type(error).__name__}: {str(error).splitlines()[0]})"
        raise InputError(what, remedy="use local.engine: sequential") from error
