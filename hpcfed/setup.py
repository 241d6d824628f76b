"""Set-up of a simulation from a recipe: every check before the first round, cheapest first, and the parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from rich.filesize import decimal

from hpcfed import algorithms, models
from hpcfed.algorithms._client_average import following_clients, following_iterates
from hpcfed.algorithms._compatibility import check_parts, check_product
from hpcfed.bits.arithmetic import arithmetic_of
from hpcfed.cohort import Cohorts, present_in
from hpcfed.config.factory import made, own_step
from hpcfed.config.limits import seconds_of
from hpcfed.config.metrics import CLASSES, check_metrics, targets_of
from hpcfed.config.portable import check_portable
from hpcfed.config.recipe import Algorithm, Local, LossSection, Recipe
from hpcfed.data.federation import Federation
from hpcfed.data.staging import open_federation
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.models.images import image_shape
from hpcfed.observers import check_observers
from hpcfed.ranks.accelerators import accelerator
from hpcfed.ranks.devices import DeviceSlot, device_faults, take_device_slot
from hpcfed.ranks.placement import Placement, homes
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.reduce.device import device_sum
from hpcfed.rng import Purpose, torch_seed
from hpcfed.run_folder.code import check_hosts
from hpcfed.run_folder.outcome import own_code_named
from hpcfed.types import Method
from hpcfed.user_code.blame import HOST_FULL, place_of
from hpcfed.vendor import onednn
from hpcfed.vendor.malloc import keep_freed_memory

ONE_SAMPLE = "Expected more than 1 value per channel"
"""torch's words where BatchNorm is trained on one sample."""

if TYPE_CHECKING:
    import torch

    from hpcfed.evaluation.evaluate import Evaluator
    from hpcfed.models.flat import FlatModel
    from hpcfed.models.losses import Loss
    from hpcfed.parts import Parts


def resolve(recipe: Recipe) -> Recipe:
    """Fill in what the recipe leaves open, and check everything that needs the federation but not torch.

    Raises:
        InputError: the recipe, or a file that it names, cannot be run.
    """
    with own_code_named():
        return _resolve(recipe)


def _resolve(recipe: Recipe) -> Recipe:
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    check_parts(method)
    spec = models.spec(recipe.model)
    asked, local = recipe, _local_work(recipe, method, spec, couples=recipe.loss.name == "cox")
    recipe = recipe.model_copy(update={"local": local, "budget": None if method.local.full_gradient else recipe.budget})
    check_product(recipe, method)
    check_observers(recipe.observers, recipe.python_path)
    own_step(recipe.local, recipe.python_path)
    with Federation.open(recipe.data) as federation:
        recipe = _with_numbers(recipe, federation)
        if recipe.bits == "portable":
            check_portable(asked, federation.task)
            recipe = recipe.model_copy(update={"device": "cpu"})
        _check_samples(recipe, federation, spec)
        _check_test_set(recipe, federation)
        if federation.task == "survival" and recipe.loss.factory is None:
            recipe = recipe.model_copy(update={"local": _local_work(asked, method, spec, couples=True)})
        check_metrics(recipe.evaluate.metrics, federation.task, federation.num_classes)
        if recipe.data_content not in (None, federation.content):
            raise InputError(
                "data_content", where=str(recipe.data), expected=recipe.data_content, got=federation.content or "none"
            )
        weights = recipe.weights or method.local.weights
        Cohorts(recipe, federation.sizes, weights)
        content = federation.content or None
    declared = {} if recipe.algorithm.factory else method.parameters()  # a factory's keys are its own
    written = {} if recipe.algorithm.factory is None else recipe.algorithm.parameters
    named = {key: getattr(recipe.algorithm, key) for key in type(recipe.algorithm).model_fields}
    algorithm = {**named, **written, **_parts(recipe.algorithm), **declared}
    model = {**recipe.model.model_dump(), **(spec.model_dump() if spec else {})}
    return recipe.model_copy(
        update={
            "algorithm": type(recipe.algorithm).model_validate(algorithm),
            "model": type(recipe.model).model_validate(model),
            "weights": weights,
            "data_content": content,
        }
    )


def _with_numbers(recipe: Recipe, federation: Federation) -> Recipe:
    """Return the recipe with the clients of ``cohort.without`` by number, each once.

    Raises:
        InputError: there is no such client.
    """
    without = recipe.cohort.without
    if without is None:
        return recipe
    numbers: list[int | str] = [*sorted({federation.client_number(client) for client in without.clients})]
    cohort = recipe.cohort.model_copy(update={"without": without.model_copy(update={"clients": numbers})})
    return recipe.model_copy(update={"cohort": cohort})


def _parts(section: Algorithm) -> dict[str, str]:
    """Return the named parts of a product, defaults filled in."""
    if not section.is_product:
        return {}
    return {role: getattr(section, role) or default for role, default in algorithms.DEFAULT_PARTS.items()}


def _local_work(recipe: Recipe, method: Method, spec: models.Spec | None, *, couples: bool) -> Local:
    """Return the recipe's ``local``, engine and matmul chosen; one full-batch step for methods of the full gradient.

    `couples` tells that the loss of a sample depends on others of its minibatch.

    Raises:
        InputError: the recipe has no ``local.steps``, ``local.epochs`` or ``budget``, or its engine cannot do the work.
    """
    engine, parameters = recipe.local.engine, recipe.parameters
    if recipe.local.step is not None and (parameters.keeps_private or parameters.buffers == "averaged"):
        what = f"local.step beside parameters: {parameters.given}"
        remedy = "use parameters.frozen and buffers: fixed with it, or leave local.step out"
        raise InputError(f"{what}: a step of your own trains the shared parameters alone", remedy=remedy)
    hindrances = {
        f"parameters: {parameters.given}": bool(parameters.given),
        "augmentation": recipe.local.augment is not None,
        f"dropout, which {recipe.model.name!r} has": spec is not None and spec.draws,
        f"precision: {recipe.precision}": recipe.precision != "float32",
        "compile: true": recipe.local.compile,
        "loss.name: cox": couples,
        "loss.weights": recipe.loss.weights is not None,
        f"local.step: {recipe.local.step}": recipe.local.step is not None,
    }
    if engine == "auto":
        stacks = spec is not None and spec.stacks and recipe.loss.factory is None and not any(hindrances.values())
        engine = "batched" if stacks else "sequential"
    if engine == "batched" and any(hindrances.values()):
        why = next(why for why, is_so in hindrances.items() if is_so)
        raise InputError(f"local.engine: batched with {why}", remedy="use local.engine: sequential")
    chosen = {"engine": engine, "matmul": _matmul(recipe, engine, spec)}
    recipe = recipe.model_copy(update={"local": recipe.local.model_copy(update=chosen)})
    if method.local.full_gradient:
        return recipe.local.model_copy(update={"steps": 1, "epochs": None, "batch_size": "full"})
    if recipe.local.steps is None and recipe.local.epochs is None and recipe.budget is None:
        raise InputError("local", expected="'local.steps', 'local.epochs' or 'budget'", got="none of them")
    return recipe.local


def _matmul(recipe: Recipe, engine: str, spec: models.Spec | None) -> str:
    """Return the library for the matrix products of batched clients on a CPU, ``onednn`` or ``blas``.

    Raises:
        InputError: the recipe names ``onednn``, which cannot compute them.
    """
    hindrances = {
        f"local.engine: {engine}": engine != "batched",
        f"dtype: {recipe.dtype}": recipe.dtype != "float32",
    }
    if recipe.local.matmul == "onednn" and any(hindrances.values()):
        why = next(why for why, is_so in hindrances.items() if is_so)
        raise InputError(f"local.matmul: onednn with {why}", remedy="use local.matmul: blas")
    if recipe.local.matmul != "auto":
        return recipe.local.matmul
    ours = spec is not None and spec.stacks and recipe.bits == "native" and not any(hindrances.values())
    return "onednn" if ours and recipe.device in ("auto", "cpu") and onednn.is_faster() else "blas"


def assemble(recipe: Recipe, world: World, device_slot: DeviceSlot | None = None) -> tuple[Parts, Evaluator]:
    """Build the parts of a resolved recipe's simulation on every rank; called on every rank.

    Without a `device_slot`, only the ranks of this world share their nodes' devices.

    Raises:
        InputError: the model does not fit the federation, or cannot be built, or the recipe's device is missing.
        EnvironmentFailure: a GPU cannot be used, or memory is short.
    """
    own = device_slot or take_device_slot(recipe.device, world)
    federation = open_federation(recipe.data, recipe.data_access, world)
    checked = own_code_named()(device_faults(world)(_assemble))
    assembled = world.together(lambda: checked(recipe, federation, world, own))
    check_hosts(recipe, world)
    keep_freed_memory()  # only now: the memory for sorting a large index went back to the system
    return assembled


def _assemble(recipe: Recipe, federation: Federation, world: World, device_slot: DeviceSlot) -> tuple[Parts, Evaluator]:
    import torch

    from hpcfed.client.engine import engine_for, tuner_for
    from hpcfed.client.private_parts import PrivateParts, keeping_private
    from hpcfed.client.solver import Stepping
    from hpcfed.client.state_store import ClientStates
    from hpcfed.data.shards import Shards
    from hpcfed.evaluation.evaluate import Evaluator
    from hpcfed.evaluation.metrics import whole_metrics
    from hpcfed.models.losses import metrics_for, try_own
    from hpcfed.parts import Parts
    from hpcfed.user_code.method import checked

    method, arithmetic = algorithms.build(recipe.algorithm, recipe.python_path), arithmetic_of(recipe.bits)
    if recipe.algorithm.factory is not None:
        method = checked(method)
    if recipe.evaluate.model == "client-average":
        method = following_clients(method)
    elif recipe.evaluate.model == "step-average":
        method = following_iterates(method)
    torch.set_num_threads(recipe.threads)
    spec = models.spec(recipe.model)
    device = device_slot.device
    dtype = getattr(torch, recipe.dtype)
    loss = build_loss(recipe, federation, dtype, device)
    sums = metrics_for(recipe.evaluate.metrics, recipe.python_path)
    whole = whole_metrics(recipe.evaluate.metrics, federation.task, federation.num_classes, recipe.python_path)
    model = build_model(recipe, federation, dtype, device)
    initial_w = model.vector.clone()
    if recipe.evaluate.statistics == "training" and not model.averaging:
        what = "evaluate.statistics: training, but the model has no averaged running statistics"
        raise InputError(what, remedy="leave it out, or set parameters.buffers: averaged")
    if not model.is_plain:
        _check_minibatches(recipe, federation, model)
    if model.own:
        method = keeping_private(method, model.own)
    outputs: tuple[int, ...] = ()
    if recipe.loss.factory is not None or recipe.evaluate.metrics or loss.whole:
        with torch.no_grad():
            x, y = _zeros(2, federation, dtype, device)
            output = model.module(x)
            outputs = tuple(output.shape[1:])
            try_own(loss, sums, output, y)
    room = {"device": _room(device, device_slot.sharing), "host": _room(torch.device("cpu"), device_slot.neighbours)}
    cohorts = Cohorts(recipe, federation.sizes, recipe.weights or method.local.weights)
    again = cohorts.draws > 1 or recipe.evaluate.train.every > 0 or recipe.evaluate.clients.every > 0
    again = again or recipe.evaluate.statistics == "training"
    shards = Shards(federation, dtype, device, capacity=room["device"] // 2, keeps_clients=again)
    balanced = recipe.balances(method.local.stateful)
    draws, fine_tune = spec is None or spec.draws, recipe.evaluate.clients.fine_tune
    like = _zeros(1, federation, dtype, device)
    seed = recipe.seed.batches
    step = own_step(recipe.local, recipe.python_path)
    engine = engine_for(
        recipe.local,
        model,
        loss,
        seed,
        like,
        precision=recipe.precision,
        draws=draws,
        movable=balanced,
        elsewhere=method.local.evaluates_elsewhere,
        most_samples=int(federation.sizes.max()),
        own_step=step,
        arithmetic=arithmetic,
    )
    home = homes(np.where(cohorts.present, federation.sizes, 0), world.size)
    placement = Placement(home, world.size, balanced=balanced, together=engine.together, group_size=engine.group_size)
    clients = ClientStates(recipe.client_state, device, {tier: free // 4 for tier, free in room.items()})
    private = PrivateParts(model, clients)
    measured = loss, sums, whole, shards, federation, placement, world, outputs
    own_parts = private if model.own else None
    evaluator = Evaluator(recipe.evaluate, model, *measured, own_parts, counted=cohorts.measured)
    parts = Parts(
        method=method,
        federation=federation,
        model=model,
        initial_w=initial_w,
        engine=engine,
        stepping=Stepping(recipe.local, arithmetic),
        tuner=tuner_for(fine_tune, model, loss, seed, draws=draws) if fine_tune is not None else None,
        shards=shards,
        cohorts=cohorts,
        placement=placement,
        clients=clients,
        private=private,
        evaluate_model=recipe.evaluate.model,
        skips_bad=recipe.on_bad_client == "skip",
        watchdog=Watchdog(seconds_of(recipe.watchdog), world),
        reduction=recipe.reduction,
        hashes_updates=recipe.update_hashes,
        sum_on_device=device_sum(recipe.gpu_reduce, device_slot, world),
        world=world,
        seed=seed,
        loss_of=evaluator.loss_of,
        arithmetic=arithmetic,
    )
    return parts, evaluator


def build_loss(recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device) -> Loss:
    """Return the recipe's loss, with its class weights.

    Raises:
        InputError: it fits neither the task nor the targets.
    """
    import torch

    from hpcfed.models.losses import OF_TASK, loss_for
    from hpcfed.models.portable import portable_loss

    weights = class_weights(recipe.loss, federation, present_in(recipe, federation.num_clients))
    of_classes = None if weights is None else torch.tensor(weights, dtype=dtype, device=device)
    loss = loss_for(recipe.loss, federation.task, recipe.python_path, of_classes)
    if recipe.bits == "native":
        return loss
    name = OF_TASK[federation.task] if recipe.loss.name == "auto" else recipe.loss.name
    return portable_loss(name, loss)


def class_weights(
    section: LossSection, federation: Federation, present: np.ndarray
) -> list[float] | list[list[float]] | None:
    """Return the weight of each class in the loss, (C,), or in each client's, (N, C); None without weights.

    ``balanced`` is n / (C · n_c), so that each class counts alike and the mean weight of all training samples is 1: of
    the clients `present`, (N,) bool. ``balanced-by-site`` is the same of each client's own samples.

    Raises:
        InputError: the targets are not one label a sample, or a class has no training sample, of a client by site, or
            no weight.
    """
    if section.weights is None:
        return None
    if targets_of(federation.task, federation.num_classes) != CLASSES:
        raise InputError("loss.weights needs classes, one a sample", got=f"a {federation.task} federation")
    count = max(2, federation.num_classes or 0)
    if isinstance(section.weights, list):
        if len(section.weights) != count:
            raise InputError("loss.weights", expected=f"{count} numbers", got=str(len(section.weights)))
        return section.weights
    if section.weights == "balanced-by-site":
        return _by_site(federation, count, present & (federation.sizes > 0))
    labels = federation.train()[1].ravel()[np.repeat(present, federation.sizes)]
    found = np.bincount(labels, minlength=count)
    if not found.all():
        what = "loss.weights: balanced needs training samples of every class"
        raise InputError(what, where=str(federation.path), got=f"none of class {int(found.argmin())}")
    return (found.sum() / (count * found)).tolist()


def _by_site(federation: Federation, count: int, filled: np.ndarray) -> list[list[float]]:
    """Return n_i / (C · n_ic) of each client, (N, C); 0 for all but those `filled`, (N,) bool.

    Raises:
        InputError: naming the first of them that lacks a class.
    """
    sizes, labels = federation.sizes, federation.train()[1].ravel()
    places = np.repeat(np.arange(len(sizes)), sizes) * count + labels
    found = np.bincount(places, minlength=len(sizes) * count).reshape(len(sizes), count)
    if len(absent := np.argwhere((found == 0) & filled[:, None])):
        client, label = absent[0].tolist()
        what = "loss.weights: balanced-by-site needs training samples of every class at every site"
        got = f"none of class {label} at {federation.client_name(client)} (client {client})"
        raise InputError(what, where=str(federation.path), got=got, remedy="use balanced, or leave it out")
    return (sizes[:, None] / (count * np.maximum(found, 1)) * filled[:, None]).tolist()


def build_model(recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device) -> FlatModel:
    """Return the recipe's model, initialised from its seed or file, and checked against the federation's shapes."""
    import torch

    from hpcfed.models.flat import FlatModel
    from hpcfed.models.portable import portable_linear

    outputs = 1 if federation.task == "survival" else federation.num_classes or prod(federation.target_shape)
    spec = models.spec(recipe.model)
    if spec is not None:
        _check_memory(spec, federation.feature_shape, outputs, dtype)
    seed = torch_seed(recipe.seed.model, Purpose.MODEL)
    torch.manual_seed(seed)
    module = _from_spec(spec, federation.feature_shape, outputs) if spec is not None else _from_factory(recipe)
    if recipe.bits == "portable":
        module = portable_linear(prod(federation.feature_shape), outputs, bias=module.bias is not None, seed=seed)
    model = FlatModel(module, dtype, device, recipe.parameters)
    if recipe.model.init is not None:
        model.load_file(recipe.model.init)
    _check_outputs(model, federation, outputs, dtype, device)
    return model


def _check_memory(spec: models.Spec, features: tuple[int, ...], outputs: int, dtype: torch.dtype) -> None:
    """Refuse a model that this machine's memory cannot hold, before any of it is allocated.

    Raises:
        InputError: the model, its gradient and the server's copy in float64 are larger than all memory.
    """
    import torch

    with torch.device("meta"):  # shapes without memory
        count = sum(parameter.numel() for parameter in spec.build(features, outputs).parameters())
    needed, memory = count * (2 * dtype.itemsize + 8), psutil.virtual_memory().total
    if needed > memory:
        got = f"{count:,} parameters, which take {decimal(needed)}"
        remedy = "make the model smaller"
        raise InputError("the model does not fit", expected=f"at most {decimal(memory)}", got=got, remedy=remedy)


def _check_samples(recipe: Recipe, federation: Federation, spec: models.Spec | None) -> None:
    """Refuse samples that the task, the named model or the augmentation cannot take.

    Raises:
        InputError: naming which of them.
    """
    where, tokens = str(recipe.data), federation.task == "next-token"
    if tokens and federation.target_shape:
        got = f"shape {federation.target_shape} each"
        remedy = "make each position a sample, the tokens before it as x"
        raise InputError(
            "a next-token federation", where=where, expected="one target per sample", got=got, remedy=remedy
        )
    if spec is not None and spec.tokens != tokens:
        takes, remedy = ("tokens", "") if spec.tokens else ("numbers", "use model.name lstm, or a factory")
        what = f"model.name {recipe.model.name!r} takes {takes}"
        raise InputError(what, where=where, got=f"a {federation.task} federation", remedy=remedy)
    if recipe.local.augment is not None:
        image_shape(() if tokens else federation.feature_shape, "local.augment")


def _check_test_set(recipe: Recipe, federation: Federation) -> None:
    """Refuse to evaluate private parameters on a test set that belongs to no client.

    Raises:
        InputError: `evaluate.every` asks for it.
    """
    central = federation.num_test > 0 and federation.test_offsets is None
    if recipe.parameters.keeps_private and recipe.evaluate.every and central:
        raise InputError(
            "evaluate.every: a common test set has no private part",
            where=str(recipe.data),
            expected="test sets of clients, beside private parameters or buffers",
            got="one for all",
            remedy="set evaluate.every: 0 and evaluate.clients.every: 1, or prepare a test set for each client",
        )


def _check_minibatches(recipe: Recipe, federation: Federation, model: FlatModel) -> None:
    """Refuse minibatches of one sample where the model cannot be trained on one, as BatchNorm cannot.

    Raises:
        InputError: naming the first client that has one.
    """
    import torch

    x, _ = _zeros(1, federation, model.vector.dtype, model.vector.device)
    try:
        with torch.no_grad():
            model.module(x)
    except Exception as error:  # training reports what else a user's model raises
        if ONE_SAMPLE not in str(error):
            return
    else:
        return
    size, sizes = recipe.local.batch_size, np.where(present_in(recipe, federation.num_clients), federation.sizes, 0)
    most = recipe.budget.high if recipe.budget is not None else recipe.local.steps
    last = sizes if size == "full" else np.where((most or sizes) > sizes // size, sizes % size, 0)
    for client in np.flatnonzero(last == 1)[:1].tolist():
        raise InputError(
            f"local.batch_size: client {client} ({federation.client_name(client)})",
            expected="minibatches of two samples or more, for BatchNorm",
            got=f"one of 1 sample, of {sizes[client]} in all",
            remedy="choose another local.batch_size",
        )


def _room(device: torch.device, sharing: int) -> int:
    """Return a rank's share, in bytes, of a device's free memory, for `sharing` ranks."""
    free = psutil.virtual_memory().available if device.type == "cpu" else accelerator(device).free_bytes(device)
    return int(free // sharing)


def _zeros(
    count: int, federation: Federation, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and y of `count` samples, all zeros, with the federation's shapes and types."""
    import torch

    from hpcfed.data.shards import types_of

    shapes = (count, *federation.feature_shape), (count, *federation.target_shape)
    x, y = (
        torch.zeros(shape, dtype=kind, device=device)
        for shape, kind in zip(shapes, types_of(federation.task, dtype), strict=True)
    )
    return x, y


def _from_spec(spec: models.Spec, features: tuple[int, ...], outputs: int) -> Any:
    """Build a named model.

    Raises:
        EnvironmentFailure: this process may not have that much memory.
    """
    try:
        return spec.build(features, outputs)
    except RuntimeError as error:
        if HOST_FULL not in str(error):
            raise
        got, remedy = str(error).partition("Allocator: ")[2], "make the model smaller, or raise this process's limits"
        raise EnvironmentFailure("not enough memory for the model", got=got, remedy=remedy) from error


def _from_factory(recipe: Recipe) -> Any:
    from torch import nn

    reference = str(recipe.model.factory)
    module = made(reference, recipe.model.args, recipe.python_path, "model.factory", "check model.args")
    if not isinstance(module, nn.Module):
        raise InputError(f"model.factory {reference!r}", expected="a torch.nn.Module", got=type(module).__name__)
    return module


def _check_outputs(
    model: FlatModel, federation: Federation, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Run the model on one sample of zeros, and compare its output's shape with the federation's targets."""
    import torch

    sample, _ = _zeros(1, federation, dtype, device)
    model.module.eval()
    try:
        with torch.no_grad():
            output = model.module(sample)
    except Exception as error:  # a user's model may raise anything
        what = f"the model cannot take a sample of shape {federation.feature_shape}"
        place = place_of(error)
        got = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
        raise InputError(what, got=got) from error
    model.train()
    wanted = f"{outputs} classes" if federation.num_classes else f"{outputs} outputs"
    shape: Sequence[int] = tuple(getattr(output, "shape", ()))
    if len(shape) < 2 or prod(shape[1:]) != outputs:
        raise InputError("the model's output does not fit the federation", expected=wanted, got=f"shape {tuple(shape)}")
