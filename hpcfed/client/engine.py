"""The choice of the engine that trains a recipe's clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.batched.gradients import StackedNetwork, Vectorized, mixes_samples
from hpcfed.client.batched.matmul import OneDNN, matmul_for
from hpcfed.client.batched.networks import network_of
from hpcfed.client.batched.operators.network import OperatorNetwork
from hpcfed.client.batched.portable import PortableNetwork
from hpcfed.client.batched.solver import StackedSolver
from hpcfed.client.batched.tiles import tile_for
from hpcfed.client.device_client import DeviceClient
from hpcfed.client.engine_choice import EngineChoice, refuse_tile
from hpcfed.client.own_step import OwnStepSolver
from hpcfed.client.sample_noise import PrivateSolver
from hpcfed.client.solver import Engine, SequentialSolver
from hpcfed.client.trials import refuse_unseen, try_clients_at_once, try_compiled, try_graphs
from hpcfed.config.clients import FineTune
from hpcfed.config.recipe import Local
from hpcfed.data.cache import Samples
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.models.flat import PARAMETERS, FlatModel
from hpcfed.models.losses import Loss
from hpcfed.models.portable import PortableLoss
from hpcfed.models.reading.program import Unreadable
from hpcfed.ranks.accelerators import accelerator, answer, is_full
from hpcfed.ranks.graphs import Graphs, on_device
from hpcfed.rng import Purpose

CALLS = 6
"""Operators whose calls take as long as those of the perceptrons of which the rule of tiles was measured."""

VALUES = 4
"""A tile's values, which wait for the way back, take up to so many times the memory of its parameters, on a GPU."""


@dataclass(frozen=True)
class ClientWork:
    """The work of a round's clients, from which the size of a tile follows.

    Attributes:
        cohort_size: most members of a cohort.
        sizes: samples of each client, (N,).
        steps: that each client takes in a round, (N,).
    """

    cohort_size: int
    sizes: np.ndarray
    steps: np.ndarray


def trained_by(
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
    private_first: int = 0,
    arithmetic: Arithmetic = LIBRARIES,
    sized_for: torch.device | None = None,
) -> tuple[Engine, EngineChoice]:
    """Return the engine of a resolved recipe, and what was chosen.

    Where the recipe leaves the engine to ``auto``, models that can be read (`hpcfed.models.reading`) are trained in
    tiles unless clients must be kept apart or gain nothing from tiles (`_tiles`), all others one client after another.
    Neither a name nor a timing decides.

    Args:
        section, model, loss: how clients train, what, and on what.
        seed: the recipe's ``seed.batches``.
        like: one sample, x (1, …) and y (1, …), in the run's shapes and types.
        work: of the clients.
        precision: the recipe's.
        draws: whether the model, the loss or the step draws random numbers.
        elsewhere: whether tilts may have an offset or a radius.
        own_step: the function that the recipe's ``local.step`` names.
        private_first: the recipe's ``parameters.private_first``, or 0.
        arithmetic: of the recipe's ``bits``.
        sized_for: the device whose rule gives the tile's size, which is one on all ranks; default: the model's.

    Raises:
        InputError: the batched engine or its products cannot take the model, it cannot be compiled, the device knows no
            such precision, or clients cannot be trained in tiles of the size that the recipe asks for.
        EnvironmentFailure: tiles of that size do not fit into the device's memory.
    """
    if section.noise is not None:
        return _private(section, model, loss, seed, like)
    tiles, why = _tiles(section, model, loss, like, work, draws=draws, private_first=private_first, sized_for=sized_for)
    if tiles is not None:
        build_stacked = partial(
            StackedSolver,
            model,
            tiles.network,
            section,
            seed,
            tile=tiles.size,
            width=tiles.width,
            most_steps=int(work.steps.max(initial=1)),
            elsewhere=elsewhere,
            averages=loss.reduction == "mean",
            draws=tiles.draws,
            arithmetic=arithmetic,
            precision=precision,
        )
        return _stacked(build_stacked, section, model, like, tiles), tiles.choice(section)
    refuse_tile(section, f"local.engine: sequential ({why})" if why else "local.engine: sequential")
    build = partial(
        SequentialSolver, model, loss, section, seed, precision=precision, draws=draws, private_first=private_first
    )
    solver = try_compiled(build, like) if section.compile else build()
    engine = solver if own_step is None else OwnStepSolver(solver, own_step, section.step_args, model, loss, seed)
    if hindrance := _unrecordable(loss, own_step, private_first):
        engine.graphs = _graphs_of_none(section, model, hindrance)
    else:
        _record_steps(solver, section, model, like, work)
    return engine, EngineChoice("sequential", "blas", section.tile, section.memory_format, why=why)


def _private(
    section: Local, model: FlatModel, loss: Loss, seed: int, like: Samples
) -> tuple[PrivateSolver, EngineChoice]:
    """Return the engine of steps with noise, and what was chosen."""
    refuse_tile(section, "local.noise")
    solver = PrivateSolver(model, loss, section, seed, like)
    solver.graphs = _graphs_of_none(section, model, "local.noise has minibatches of random sizes")
    return solver, EngineChoice("sequential", "blas", section.tile, section.memory_format)


@dataclass(frozen=True)
class Tiles:
    """The tiles in which clients are trained: their network and their sizes.

    Attributes:
        network: the model as it is computed for the clients of a tile.
        read: what the model is read as.
        size: slots of a tile, R.
        width: samples of a minibatch that is not short.
        slot_work: multiplications of a slot's step, as the rule of tiles has them.
        draws: whether the network draws random numbers.
    """

    network: StackedNetwork
    read: str
    size: int
    width: int
    slot_work: float
    draws: bool

    def choice(self, section: Local) -> EngineChoice:
        """Return what was chosen, for the record."""
        network = self.network
        memory_format = network.memory_format if isinstance(network, OperatorNetwork) else section.memory_format
        return EngineChoice("batched", section.matmul, self.size, memory_format, self.read, slot_work=self.slot_work)


def _tiles(
    section: Local,
    model: FlatModel,
    loss: Loss,
    like: Samples,
    work: ClientWork,
    *,
    draws: bool,
    private_first: int,
    sized_for: torch.device | None,
) -> tuple[Tiles | None, str]:
    """Return the tiles, or why clients are trained one after another; no reason if the recipe alone asks for that.

    Raises:
        InputError: the recipe asks for tiles that the model, the loss or the device does not allow.
    """
    why = _keeps_apart(model, private_first)
    if section.engine == "batched" and why:
        raise InputError(f"local.engine: batched with {why}", remedy="use local.engine: sequential")
    crops_there = section.augment is not None and on_device(model.vector.device)
    if section.engine == "batched" and crops_there:
        raise InputError("local.engine: batched with augmentation on a GPU", remedy="use local.engine: sequential")
    if section.engine == "auto" and crops_there:
        return None, "images are augmented on the GPU"
    if section.engine == "sequential" or why:
        return None, why
    network, read, why = _network(section, model, loss, like)
    if network is None:
        return None, why
    of_network = draws and (isinstance(network, Vectorized) or loss.is_own)
    width, alone = _minibatch(section, loss, network, work.sizes, draws=of_network)
    slot_work = width * _weights(network, model)
    if section.tile != "auto":
        size = section.tile
    else:
        size = 1 if alone else _tile(network, model, work, width, slot_work, sized_for)
    if section.engine == "auto" and (loses := _loses(network, size, model.vector.device)):
        return None, loses
    if alone:
        refuse_tile(section, alone)
    return Tiles(network, read, size, width, slot_work, of_network), ""


def _unrecordable(loss: Loss, own_step: Callable[..., Any] | None, private_first: int) -> str:
    """Return why steps of clients trained one after another cannot be recorded on a device; empty if they can."""
    if own_step is not None:
        return "local.step is your own"
    if loss.by_client is not None:
        return "each client has a loss of its own"
    return "parameters.private_first trains parts in turn" if private_first else ""


def _record_steps(solver: SequentialSolver, section: Local, model: FlatModel, like: Samples, work: ClientWork) -> None:
    """Let a device record the steps of clients that are trained one after another, where it can; nothing on a CPU."""
    if not on_device(model.vector.device):
        return
    width = max(1, int(work.sizes.max(initial=1)))
    if section.batch_size != "full":
        width = min(int(section.batch_size), width)
    graphs = _graphs(section, model)
    most_steps = int(work.steps.max(initial=1))
    solver.train_by(DeviceClient(solver, model, section, graphs, width=width, most_steps=most_steps), graphs)
    try_graphs(solver, graphs, model, like, width)


def _stacked(
    build: Callable[..., StackedSolver], section: Local, model: FlatModel, like: Samples, tiles: Tiles
) -> StackedSolver:
    """Build the solver of tiles, which a device records where it can.

    Raises:
        EnvironmentFailure: the tiles do not fit into the device's memory.
    """
    graphs = _graphs(section, model) if on_device(model.vector.device) else None
    try:
        solver = build(graphs=graphs)
        if graphs is not None:
            try_graphs(solver, graphs, model, like, tiles.width)
        return solver
    except RuntimeError as error:
        if not is_full(error):
            raise
        answer(error)
        what = f"memory for tiles of {tiles.size} clients (local.tile) is short"
        raise EnvironmentFailure(what, remedy="use a smaller local.tile, which changes last bits") from error


def _keeps_apart(model: FlatModel, private_first: int) -> str:
    """Return what of a client cannot be stacked beside its neighbours'; empty if all can."""
    if private_first:
        return "parameters.private_first"
    if model.own.keys() - {PARAMETERS}:
        return "private buffers"
    if model.averaged:
        return "averaged buffers"
    return "private parameters on a GPU" if model.private is not None and on_device(model.vector.device) else ""


def _loses(network: StackedNetwork, tile: int, device: torch.device) -> str:
    """Return why clients alone in their tiles are trained no faster than by the module itself; empty if they are."""
    if tile > 1 or not isinstance(network, OperatorNetwork):
        return ""
    if device.type != "cpu":
        return "a client alone fills the GPU, by the module's own kernels"
    return "" if network.gains else "too many of its operations are called as the module calls them"


def _graphs(section: Local, model: FlatModel) -> Graphs:
    """Return what records the work of a device."""
    return Graphs(model.vector.device, records=section.graphs == "auto")


def _graphs_of_none(section: Local, model: FlatModel, why: str) -> Graphs | None:
    """Return what says that a device's work is not recorded; None on a CPU."""
    if model.vector.device.type == "cpu":
        return None
    graphs = Graphs(model.vector.device, records=False)
    if section.graphs == "auto":
        graphs.give_up(why)
    return graphs


def _network(section: Local, model: FlatModel, loss: Loss, like: Samples) -> tuple[StackedNetwork | None, str, str]:
    """Return the network that is trained in tiles, what the model is read as, and why there is no network.

    Raises:
        InputError: there is none, and the recipe asks for tiles.
    """
    if isinstance(loss, PortableLoss):
        return PortableNetwork(loss), "in portable arithmetic", ""
    matmul = matmul_for(section.matmul, model.vector)
    batch = like[0].shape[0] if section.batch_size == "full" else int(section.batch_size)
    try:
        network = network_of(model, loss, like[0], batch, matmul, section.memory_format)
    except Unreadable as unreadable:
        if section.engine == "auto":
            return None, "", str(unreadable)
        why = str(unreadable)
    else:
        return network, network.account, ""
    if model.private is not None:
        what = f"local.engine: batched with private parameters is for models that can be read: {why}"
        raise InputError(what, remedy="use local.engine: sequential")
    refuse_unseen(model, like)
    if isinstance(matmul, OneDNN):
        what = f"local.matmul: onednn is for models that can be read: {why}"
        raise InputError(what, remedy="use matmul: blas")
    mapped = Vectorized(model.module, loss, mixes=mixes_samples(model.module, like[0]))
    try_clients_at_once(mapped, model, like)
    return mapped, f"by torch.func.vmap ({why})", ""


def _tile(
    network: StackedNetwork,
    model: FlatModel,
    work: ClientWork,
    width: int,
    slot_work: float,
    sized_for: torch.device | None,
) -> int:
    """Return R, by the network's operations and the rule of `tile_for`."""
    if isinstance(network, OperatorNetwork) and not network.by_slot:
        return 1
    device = sized_for or model.vector.device
    tile = tile_for(model, device, work.cohort_size, work.steps, slot_work)
    if isinstance(network, OperatorNetwork) and device.type != "cpu":
        of_slot = width * network.numbers * model.vector.element_size()
        tile = min(tile, max(1, VALUES * accelerator(device).stack_bytes // of_slot))
    return tile


def _weights(network: StackedNetwork, model: FlatModel) -> float:
    """Return the multiplications of a sample, forwards, in a network that takes as many calls as a perceptron."""
    if isinstance(network, OperatorNetwork):
        return network.work / max(1.0, network.calls / CALLS)
    return float(model.trained.numel())


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
    if isinstance(network, OperatorNetwork) and not network.by_slot:
        return width, "a model of which only one client at a time can be computed"
    return width, ""


def tuner_for(fine_tune: FineTune, model: FlatModel, loss: Loss, seed: int, *, draws: bool) -> SequentialSolver:
    """Return a solver that takes the plain steps of a fine-tuning, with random streams of its own."""
    section = Local(steps=fine_tune.steps, batch_size=fine_tune.batch_size, lr=fine_tune.lr)
    streams = Purpose.TUNING_BATCHES, Purpose.TUNING_DROPOUT
    return SequentialSolver(model, loss, section, seed, draws=draws, streams=streams)
