"""The parts of a simulation, built from a resolved recipe on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from hpcfed import algorithms, models, updates
from hpcfed.algorithms._evaluated import with_client_average, with_step_average
from hpcfed.algorithms.fednova import PerStep
from hpcfed.arithmetic.operations import arithmetic_of
from hpcfed.assembly.kept import check_robust
from hpcfed.assembly.loss import build_loss, build_measured_loss
from hpcfed.assembly.model import build_model, zeros
from hpcfed.assembly.private import privacy_of, sample_mechanism_of
from hpcfed.assembly.secure import masks_of
from hpcfed.client.engine import ClientWork, trained_by, tuner_for
from hpcfed.client.engine_choice import EngineChoice
from hpcfed.client.private_parts import PrivateParts, keeping_private
from hpcfed.client.solver import Engine, SequentialSolver, Stepping
from hpcfed.client.state_store import ClientStates
from hpcfed.cohort import Cohorts, measured_in, present_in
from hpcfed.config.clients import BatchSize
from hpcfed.config.factory import own_step
from hpcfed.config.metrics import BUILT_IN, references
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.method import checked
from hpcfed.config.user_code.settings import multiply_exactly
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import InputError
from hpcfed.evaluation.evaluate import Evaluator
from hpcfed.evaluation.measures import Measures
from hpcfed.evaluation.metrics import WholeMetric, whole_metrics
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import BatchMetric, Loss, metrics_for
from hpcfed.models.trial import try_own
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import accelerator
from hpcfed.ranks.devices import DeviceSlot, WorldDevices
from hpcfed.ranks.host_memory import free_memory
from hpcfed.ranks.placement import Placement, homes
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.reduce.device import device_sum
from hpcfed.reduce.masks import Masks
from hpcfed.server import LARGEST_ON_HOST
from hpcfed.types import Method
from hpcfed.updates._chain import Chain, sending
from hpcfed.updates._checked import checked_parts
from hpcfed.updates._layout import layout_of

ONE_SAMPLE = "Expected more than 1 value per channel"
"""torch's words where BatchNorm is trained on one sample."""


def parts_of(
    recipe: Recipe,
    federation: Federation,
    world: World,
    slot: DeviceSlot,
    devices: WorldDevices,
    watchdog: Watchdog,
    step_work: int | None,
    key: bytes | None = None,
) -> tuple[Parts, Evaluator]:
    """Build the parts of this rank, on the device of its `slot`.

    `devices` and `step_work` are as `Parts` has them; `key` encrypts clients' states in checkpoints, None without a
    secret seed.

    Raises:
        InputError: as `hpcfed.assembly.assemble` says.
    """
    if not federation.num_samples:
        raise InputError("no client has a training sample", where=str(federation.path), remedy="prepare it again")
    torch.set_num_threads(recipe.threads)
    dtype, device = getattr(torch, recipe.dtype), slot.device
    if device.type != "cpu":
        accelerator(device).be_deterministic(recipe.deterministic)
    repeats_bits = recipe.deterministic or not devices.any_gpu
    sized_for = torch.device("cpu") if devices.are_mixed else device
    # What is trained and measured: loss, metrics, model and method.
    loss = build_loss(recipe, federation, dtype, device)
    sums = metrics_for(recipe.evaluate.metrics, recipe.python_path)
    whole = whole_metrics(recipe.evaluate.metrics, federation.task, federation.num_classes, recipe.python_path)
    model = build_model(recipe, federation, dtype, device, threads=recipe.threads)
    chain = _chain(recipe, federation, model, key)
    method = _method(recipe, model, chain)
    initial_w = model.vector.clone()
    _check_statistics(recipe, federation, model)
    if model.own:
        method = keeping_private(method, model.own)
    outputs = _outputs(recipe, federation, model, loss, sums)
    _check_scores(recipe, model, outputs)
    # Who trains it, and where: cohorts, samples, engine, ranks and clients' states.
    cohorts = Cohorts(recipe, federation.sizes)
    room = {"device": _room(device, slot.sharing), "host": _room(torch.device("cpu"), slot.neighbours)}
    check_robust(recipe, chain, method, model, cohorts, room["host"] // 2, world)
    keeps_clients = _reads_again(recipe, cohorts)
    shards = Shards(federation, dtype, device, capacity=room["device"] // 2, keeps_clients=keeps_clients)
    work = ClientWork(cohorts.most_listed, federation.sizes, cohorts.typical_steps)
    multiply_exactly(device)
    engine, engine_choice = _engine(recipe, federation, method, model, loss, work, sized_for)
    placement = _placement(recipe, method, engine, cohorts, federation, world)
    clients = ClientStates(recipe.client_state, device, {tier: free // 4 for tier, free in room.items()})
    if method.local.stateful:
        clients.open_disk()
    private = PrivateParts(model, clients)
    evaluator = Evaluator(
        recipe.evaluate,
        model,
        loss,
        _measures(recipe, federation, model, loss, sums, whole),
        shards,
        federation,
        placement,
        world,
        outputs,
        private if model.own else None,
        counted=cohorts.measured,
        present=cohorts.present,
        sized_for=sized_for,
    )
    masks = _masks(recipe, chain, device)
    parts = Parts(
        method=method,
        chain=chain,
        federation=federation,
        model=model,
        initial_w=initial_w,
        engine=engine,
        engine_choice=engine_choice,
        stepping=Stepping(recipe.local),
        tuner=_tuner(recipe, model, loss),
        shards=shards,
        cohorts=cohorts,
        placement=placement,
        clients=clients,
        private=private,
        evaluate_model=recipe.evaluate.model,
        skips_bad=recipe.on_bad_client == "skip",
        watchdog=watchdog,
        reduction=recipe.reduction,
        hashes_updates=recipe.update_hashes,
        masks=masks,
        sentinel=recipe.sentinel if repeats_bits and masks is None else "off",
        repeats_bits=repeats_bits,
        sum_on_device=device_sum(recipe.gpu_reduce, slot, world, mixed=devices.are_mixed),
        server_home=_server_home(recipe, model) if devices.are_alike else torch.device("cpu"),
        devices=devices,
        step_work=step_work,
        world=world,
        seed=recipe.seed.batches,
        loss_of=evaluator.loss_of,
        arithmetic=arithmetic_of(recipe.bits),
        sample_noise=sample_mechanism_of(recipe, federation),
    )
    return parts, evaluator


def _chain(recipe: Recipe, federation: Federation, model: FlatModel, key: bytes | None) -> Chain:
    """Return the parts of ``updates`` and ``means``, a user's checked at each call, with the privacy that they keep."""
    chain = updates.build(recipe)
    chain = replace(chain, privacy=privacy_of(recipe, chain, federation, layout_of(model), key))
    return checked_parts(chain, model, recipe.seed.batches)


def _method(recipe: Recipe, model: FlatModel, chain: Chain) -> Method:
    """Return the recipe's method, sending by its parts, with what the model to be evaluated needs."""
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    if recipe.algorithm.factory is not None:
        by_steps = isinstance(method.normalize, PerStep)
        averages = recipe.evaluate.model == "cohort-average"
        method = checked(method, model.gaps, recipe.seed.batches, by_steps=by_steps, averages=averages)
    method = sending(method, chain, layout_of(model))
    if recipe.evaluate.model == "client-average":
        return with_client_average(method)
    return with_step_average(method) if recipe.evaluate.model == "step-average" else method


def _server_home(recipe: Recipe, model: FlatModel) -> torch.device:
    """Return where the server's vectors lie: on the device for large models, but where a user's rules take its step."""
    is_small = model.vector.numel() <= LARGEST_ON_HOST
    return torch.device("cpu") if is_small or recipe.own_rules else model.vector.device


def _check_statistics(recipe: Recipe, federation: Federation, model: FlatModel) -> None:
    """Refuse what a model's running statistics do not allow.

    Raises:
        InputError: they are to be estimated anew, but it has none that are averaged; or a minibatch is too small.
    """
    if recipe.evaluate.statistics == "training" and not model.averaging:
        what = "evaluate.statistics: training, but the model has no averaged running statistics"
        raise InputError(what, remedy="leave it out, or set parameters.buffers: averaged")
    if not model.is_plain:
        _check_minibatches(recipe, federation, model)


def _outputs(
    recipe: Recipe, federation: Federation, model: FlatModel, loss: Loss, sums: Mapping[str, BatchMetric]
) -> tuple[int, ...]:
    """Return the shape of a sample's output where something needs it, and try the user's functions on two samples."""
    if recipe.loss.factory is None and not recipe.evaluate.metrics and not loss.whole:
        return ()
    with torch.no_grad():
        x, y = zeros(2, federation, model.vector.dtype, model.vector.device)
        output = model.module(x)
        try_own(loss, sums, output, y)
    return tuple(output.shape[1:])


def _check_scores(recipe: Recipe, model: FlatModel, outputs: tuple[int, ...]) -> None:
    """Refuse built-in metrics of outputs whose shape they do not know.

    Raises:
        InputError: naming one.
    """
    if model.findings.has_known_outputs:
        return
    metrics = recipe.evaluate.metrics
    built_in = [name for name, metric in metrics.items() if isinstance(metric, str) and metric in BUILT_IN]
    accuracy = ["stop"] if recipe.stop.test_accuracy is not None or recipe.stop.metric == "accuracy" else []
    for name in built_in + accuracy:
        what = "stop: accuracy" if name == "stop" else f"evaluate.metrics: {name}"
        got, remedy = f"shape {outputs} of a sample's", "use a function of your own, {sum: 'module:function'}"
        raise InputError(what, expected="outputs in the targets' shape", got=got, remedy=remedy)


def _reads_again(recipe: Recipe, cohorts: Cohorts) -> bool:
    """Whether a client's samples are read more than once in a run."""
    evaluate = recipe.evaluate
    measured = evaluate.train.every > 0 or evaluate.clients.every > 0 or evaluate.statistics == "training"
    return cohorts.draws > 1 or measured


def _engine(
    recipe: Recipe,
    federation: Federation,
    method: Method,
    model: FlatModel,
    loss: Loss,
    work: ClientWork,
    sized_for: torch.device,
) -> tuple[Engine, EngineChoice]:
    return trained_by(
        recipe.local,
        model,
        loss,
        recipe.seed.batches,
        zeros(1, federation, model.vector.dtype, model.vector.device),
        work,
        precision=recipe.precision,
        draws=_draws(recipe),
        elsewhere=method.local.evaluates_elsewhere,
        own_step=own_step(recipe.local, recipe.python_path),
        private_first=recipe.parameters.private_first or 0,
        arithmetic=arithmetic_of(recipe.bits),
        sized_for=sized_for,
    )


def _tuner(recipe: Recipe, model: FlatModel, loss: Loss) -> SequentialSolver | None:
    """Return what takes the steps of ``evaluate.clients.fine_tune``; None without."""
    fine_tune = recipe.evaluate.clients.fine_tune
    return None if fine_tune is None else tuner_for(fine_tune, model, loss, recipe.seed.batches, draws=_draws(recipe))


def _measures(
    recipe: Recipe,
    federation: Federation,
    model: FlatModel,
    loss: Loss,
    sums: Mapping[str, BatchMetric],
    whole: Mapping[str, WholeMetric],
) -> Measures:
    """Return the measures of evaluations: loss and accuracy, and the recipe's metrics."""
    return Measures(
        model,
        build_measured_loss(recipe, federation, model.vector.dtype, model.vector.device, loss),
        federation.task,
        sums,
        whole,
        recipe.evaluate.batch_size,
        seed=recipe.seed.batches if _draws_in_evaluation(recipe) else None,
        precision=recipe.precision if recipe.evaluate.precision == "run" else "float32",
    )


def _masks(recipe: Recipe, chain: Chain, device: torch.device) -> Masks | None:
    """Return the masks of secure aggregation; None without.

    Raises:
        InputError: the run is on a GPU.
    """
    masks = masks_of(recipe, chain)
    if masks is not None and device.type != "cpu":
        raise InputError(f"secure_aggregation with device: {recipe.device}", expected="cpu", remedy="set device: cpu")
    return masks


def _placement(
    recipe: Recipe, method: Method, engine: Engine, cohorts: Cohorts, federation: Federation, world: World
) -> Placement:
    home = homes(np.where(cohorts.present, federation.sizes, 0), world.size)
    balanced = recipe.balances(method.local.stateful)
    return Placement(home, world.size, balanced=balanced, tile=engine.tile, fixed_slots=engine.fixed_slots)


def _draws(recipe: Recipe) -> bool:
    """Whether the model, the loss or the step draws random numbers, as far as is known."""
    spec = models.spec(recipe.model)
    return spec is None or spec.draws or recipe.loss.factory is not None or recipe.local.step is not None


def _draws_in_evaluation(recipe: Recipe) -> bool:
    """Whether the model, the loss or a metric may draw random numbers where it is measured."""
    return (
        recipe.model.factory is not None or recipe.loss.factory is not None or bool(references(recipe.evaluate.metrics))
    )


def _check_minibatches(recipe: Recipe, federation: Federation, model: FlatModel) -> None:
    """Refuse minibatches of one sample where the model cannot be trained on one, as BatchNorm cannot.

    Raises:
        InputError: naming the first client that has one.
    """
    x, _ = zeros(1, federation, model.vector.dtype, model.vector.device)
    try:
        with torch.no_grad():
            model.module(x)
    except Exception as error:  # training reports what else a user's model raises
        if ONE_SAMPLE not in str(error):
            return
    else:
        return
    most = recipe.budget.high if recipe.budget is not None else recipe.local.steps
    trained, measured = (which(recipe, federation.num_clients) for which in (present_in, measured_in))
    _refuse_one_sample("local.batch_size", recipe.local.batch_size, most, trained, federation)
    section = recipe.evaluate.clients
    if section.fine_tune is not None and section.every:
        batch_size, steps = section.fine_tune.batch_size, section.fine_tune.steps
        _refuse_one_sample("evaluate.clients.fine_tune.batch_size", batch_size, steps, measured, federation)


def _refuse_one_sample(
    key: str, batch_size: BatchSize, most_steps: int | None, clients: np.ndarray, federation: Federation
) -> None:
    """Refuse the `batch_size` of a key by which one of the `clients`, (N,) bool, has a minibatch of one sample.

    It takes `most_steps` at most; None: as many as pass over its samples.

    Raises:
        InputError: naming the first one.
    """
    sizes = np.where(clients, federation.sizes, 0)
    if batch_size == "full":
        last = sizes
    elif (size := int(batch_size)) == 1:
        last = np.minimum(sizes, 1)
    else:
        last = np.where((most_steps or sizes) > sizes // size, sizes % size, 0)
    for client in np.flatnonzero(last == 1)[:1].tolist():
        raise InputError(
            f"{key}: client {client} ({federation.client_name(client)})",
            expected="minibatches of two samples or more, for BatchNorm",
            got=f"one of 1 sample, of {sizes[client]} in all",
            remedy=f"choose another {key}",
        )


def _room(device: torch.device, sharing: int) -> int:
    """Return a rank's share, in bytes, of a device's free memory, for `sharing` ranks."""
    free = free_memory() if device.type == "cpu" else accelerator(device).free_bytes(device)
    return int(free // sharing)
