"""From a recipe to a simulation: every check before the first round, cheapest first, and the parts put together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import psutil

from hpcfed import algorithms, models
from hpcfed.averaging import following_clients
from hpcfed.cohort import Cohorts
from hpcfed.config.factory import imported
from hpcfed.config.recipe import Algorithm, Local, Recipe
from hpcfed.data.format import Federation
from hpcfed.errors import InputError
from hpcfed.placement import homes
from hpcfed.products import check_product
from hpcfed.rng import Purpose, torch_seed
from hpcfed.types import Method
from hpcfed.world import World

if TYPE_CHECKING:
    import torch

    from hpcfed.evaluate import Evaluator
    from hpcfed.flat import FlatModel
    from hpcfed.simulation import Parts


def resolve(recipe: Recipe) -> Recipe:
    """Fill in all that the recipe left open, and check what needs the federation but not torch.

    Raises:
        InputError: anything in the recipe, or in the files it names, that cannot be run.
    """
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    local = _local_work(recipe, method)
    recipe = recipe.model_copy(update={"local": local, "budget": None if method.local.full_gradient else recipe.budget})
    check_product(recipe, method)
    spec = models.spec(recipe.model)
    with Federation.open(recipe.data) as federation:
        if recipe.data_content not in (None, federation.content):
            raise InputError(
                "data_content", where=str(recipe.data), expected=recipe.data_content, got=federation.content or "none"
            )
        weights = recipe.weights or method.local.weights
        Cohorts(recipe, federation.sizes, weights)
        content = federation.content or None
    declared = {} if recipe.algorithm.factory else method.parameters()  # a factory's keys are its own
    algorithm = {**recipe.algorithm.model_dump(), **_parts(recipe.algorithm), **declared}
    model = {**recipe.model.model_dump(), **(spec.model_dump() if spec else {})}
    return recipe.model_copy(
        update={
            "algorithm": type(recipe.algorithm).model_validate(algorithm),
            "model": type(recipe.model).model_validate(model),
            "weights": weights,
            "data_content": content,
        }
    )


def _parts(section: Algorithm) -> dict[str, str]:
    """Return the named parts of a product, defaults filled in."""
    if not section.is_product:
        return {}
    return {role: getattr(section, role) or default for role, default in algorithms.DEFAULT_PARTS.items()}


def _local_work(recipe: Recipe, method: Method) -> Local:
    """Return the recipe's ``local``; the one step of the full batch for a method that takes no other.

    Raises:
        InputError: the recipe says nowhere how much a client works.
    """
    if method.local.full_gradient:
        return recipe.local.model_copy(update={"steps": 1, "epochs": None, "batch_size": "full"})
    if recipe.local.steps is None and recipe.local.epochs is None and recipe.budget is None:
        raise InputError("local", expected="'local.steps', 'local.epochs' or 'budget'", got="none of them")
    return recipe.local


def assemble(recipe: Recipe, world: World) -> tuple[Parts, Evaluator]:
    """Build the parts of a resolved recipe's simulation on this rank.

    Raises:
        InputError: the model does not fit the federation, or cannot be built.
    """
    import torch

    from hpcfed.client.solver import LocalSolver
    from hpcfed.client.states import ClientStates
    from hpcfed.data.shards import Shards
    from hpcfed.evaluate import Evaluator
    from hpcfed.losses import loss_for
    from hpcfed.simulation import Parts

    federation = Federation.open(recipe.data)
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    if recipe.evaluate.model == "client-average":
        method = following_clients(method)
    torch.set_num_threads(recipe.threads)
    spec = models.spec(recipe.model)
    device = choose_device(recipe.device, world)
    dtype = getattr(torch, recipe.dtype)
    loss = loss_for(recipe.loss, federation.task)
    model = build_model(recipe, federation, dtype, device)
    room = {"device": _room(device, world), "host": _room(torch.device("cpu"), world)}
    shards = Shards(federation, dtype, device, capacity=room["device"] // 2)
    home = homes(federation.sizes, world.size)
    parts = Parts(
        method=method,
        federation=federation,
        model=model,
        solver=LocalSolver(model, loss, recipe.local, recipe.seed.batches, draws=spec is None or spec.draws),
        shards=shards,
        cohorts=Cohorts(recipe, federation.sizes, recipe.weights or method.local.weights),
        home=home,
        spread=_may_spread(recipe.placement, method),
        clients=ClientStates(recipe.client_state, device, {tier: free // 4 for tier, free in room.items()}),
        evaluate_model=recipe.evaluate.model,
        world=world,
    )
    return parts, Evaluator(model, loss, shards, federation, home, world, recipe.evaluate.batch_size)


def build_model(recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device) -> FlatModel:
    """Return the recipe's model, initialised from its seed or file, and checked against the federation's shapes."""
    import torch

    from hpcfed.flat import FlatModel

    outputs = federation.num_classes or prod(federation.target_shape)
    torch.manual_seed(torch_seed(recipe.seed.model, Purpose.MODEL))
    spec = models.spec(recipe.model)
    module = spec.build(federation.feature_shape, outputs) if spec is not None else _from_factory(recipe)
    model = FlatModel(module, dtype, device)
    if recipe.model.init is not None:
        model.load_file(recipe.model.init)
    _check_outputs(model, federation, outputs, dtype, device)
    return model


def choose_device(wanted: str, world: World) -> torch.device:
    """Return this rank's device: ranks of one host take its GPUs in turn.

    Raises:
        InputError: ``cuda`` was asked for and there is none.
    """
    import torch

    if wanted == "cpu" or not torch.cuda.is_available():
        if wanted == "cuda":
            raise InputError(
                "device: cuda",
                expected="a GPU",
                got="none that torch sees",
                remedy="set device: cpu, or check the driver",
            )
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", local_rank(world) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def local_rank(world: World) -> int:
    """Return how many lower ranks share this rank's host."""
    return world.hosts[: world.rank].count(world.hosts[world.rank])


def _may_spread(placement: str, method: Method) -> bool:
    if placement == "balanced" and method.local.stateful:
        raise InputError(
            f"placement: balanced with {method.name}, whose clients have a state", remedy="use placement: static"
        )
    return placement != "static" and not method.local.stateful


def _room(device: torch.device, world: World) -> int:
    """Return this rank's fair share, in bytes, of what is free on its device: ranks of its host share."""
    import torch

    neighbours = world.hosts.count(world.hosts[world.rank])
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free // neighbours)


def _from_factory(recipe: Recipe) -> Any:
    from torch import nn

    reference = str(recipe.model.factory)
    build = imported(reference, recipe.python_path, "model")
    try:
        module = build(**recipe.model.args)
    except Exception as error:  # the user's function may raise anything
        raise InputError(
            f"model.factory {reference!r} raised {type(error).__name__}: {error}", remedy="check model.args"
        ) from error
    if not isinstance(module, nn.Module):
        raise InputError(f"model.factory {reference!r}", expected="a torch.nn.Module", got=type(module).__name__)
    return module


def _check_outputs(
    model: FlatModel, federation: Federation, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Run the model on one sample of zeros, and compare its output with what the federation asks for."""
    import torch

    sample = torch.zeros((1, *federation.feature_shape), dtype=dtype, device=device)
    model.module.eval()
    try:
        with torch.no_grad():
            output = model.module(sample)
    except Exception as error:  # a user's model may raise anything
        what = f"the model cannot take a sample of shape {federation.feature_shape}"
        raise InputError(what, got=f"{type(error).__name__}: {error}") from error
    model.module.train()
    wanted = f"{outputs} classes" if federation.num_classes else f"{outputs} outputs"
    shape: Sequence[int] = tuple(getattr(output, "shape", ()))
    if len(shape) < 2 or prod(shape[1:]) != outputs:
        raise InputError("the model's output does not fit the federation", expected=wanted, got=f"shape {tuple(shape)}")
