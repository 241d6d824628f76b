"""The model of a run: built, initialised, and checked against the federation's shapes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import psutil
from rich.filesize import decimal

from hpcfed import models
from hpcfed.config.factory import made
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.blame import place_of
from hpcfed.data.federation import Federation
from hpcfed.errors import HOST_FULL, RAISED, EnvironmentFailure, InputError
from hpcfed.rng import Purpose, torch_seed

if TYPE_CHECKING:
    import torch

    from hpcfed.models.flat import Findings, FlatModel


def build_model(
    recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device, *, threads: int | None = None
) -> FlatModel:
    """Return the recipe's model, initialised from its seed or file, and checked against the federation's shapes.

    `threads` are those that torch was set to before any code of the user's. Outside of runs, without `threads`, it may
    have any, and autocast may be on, as around predictions.
    """
    import torch

    from hpcfed.arithmetic.first_calls import make_first_calls
    from hpcfed.config.user_code.generators import seed_generators
    from hpcfed.models.flat import FlatModel
    from hpcfed.models.portable import portable_linear

    make_first_calls()
    is_of_a_run, threads = threads is not None, threads or torch.get_num_threads()
    outputs = _outputs_of(federation)
    spec = models.spec(recipe.model)
    if spec is not None:
        check_memory(spec, federation.feature_shape, outputs, dtype)
    seed = torch_seed(recipe.seed.model, Purpose.MODEL)
    torch.default_generator.manual_seed(seed)  # not those of all devices, as torch.manual_seed does
    if spec is None:
        seed_generators(device, recipe.seed.model, Purpose.MODEL)
    module = _from_spec(spec, federation.feature_shape, outputs) if spec is not None else _from_factory(recipe)
    _check_settings(threads, autocast_may_be_on=not is_of_a_run)
    own_seed = None if torch.initial_seed() == seed else torch.initial_seed()
    if recipe.bits == "portable":
        module = portable_linear(prod(federation.feature_shape), outputs, bias=module.bias is not None, seed=seed)
    model = FlatModel(module, dtype, device, recipe.parameters)
    if recipe.model.init is not None:
        model.load_file(recipe.model.init)
    if spec is None:
        _watch(model)
    is_own_loss, by_gradients = recipe.loss.factory is not None, recipe.local.step is None
    found = _check_outputs(
        model, federation, outputs, dtype, device, is_own_loss=is_own_loss, by_gradients=by_gradients
    )
    model.findings = replace(found, own_seed=own_seed)
    model.forget()
    return model


def _check_settings(threads: int, *, autocast_may_be_on: bool) -> None:
    """Refuse settings of torch by which a recipe has other results: of any code of the user's, a metric's file, say.

    Args:
        threads: torch's before the user's code was called.
        autocast_may_be_on: whether no results follow from the model here.

    Raises:
        InputError: naming one.
    """
    import torch

    settings = {
        "torch.set_default_dtype": (torch.get_default_dtype(), torch.float32, "the recipe's dtype decides"),
        "torch.set_default_device": (torch.get_default_device(), torch.device("cpu"), "the recipe's device decides"),
        "torch.set_num_threads": (torch.get_num_threads(), threads, "the recipe's threads decide"),
        "torch.backends.mkldnn.enabled": (torch.backends.mkldnn.enabled, True, "leave it on"),
        "torch.autocast": (
            not autocast_may_be_on and (torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")),  # or a GPU's
            False,
            "the recipe's precision decides",
        ),
    }
    for name, (value, expected, remedy) in settings.items():
        if value != expected:
            what = f"{name} was set before the run, or by code of yours: results differ by it"
            raise InputError(what, expected=str(expected), got=str(value), remedy=remedy)


def _outputs_of(federation: Federation) -> int:
    """Return the outputs that a named model has for a sample."""
    return 1 if federation.task == "survival" else federation.num_classes or prod(federation.target_shape)


def multiply_adds(recipe: Recipe, federation: Federation, enough: int) -> int | None:
    """Return the recipe's parameters, or the multiply-adds of its forward pass for a sample where those are more.

    As torch counts them: of products and convolutions, which are computed once, unless there are `enough` parameters.
    None where the user's module cannot be built or called, which `build_model` explains.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counting(TorchDispatchMode):
        """torch's own counter, without an import of torch._dynamo, which takes seconds."""

        flops = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if (count := flop_registry.get(function._overloadpacket)) is not None:
                self.flops += count(*args, **(kwargs or {}), out_val=result)
            return result

    def built(device: str) -> torch.nn.Module:
        if spec is None:
            return _from_factory(recipe)
        with torch.device(device), _uninitialised():
            return spec.build(federation.feature_shape, _outputs_of(federation))

    spec = models.spec(recipe.model)
    try:
        count = sum(each.numel() for each in built("meta").parameters())
        if count >= enough:
            return count
        x, _ = zeros(1, federation, torch.float32, torch.device("cpu"))
        stepwise = torch.backends.mkldnn.flags(enabled=False)  # mkldnn's LSTM is one operation of unknown size
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), stepwise, Counting() as counting:
            built("cpu").eval()(x)
    except RAISED:
        return None
    return max(count, counting.flops // 2)


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
    from torch import enable_grad, nn

    reference = str(recipe.model.factory)
    with enable_grad():
        module = made(reference, recipe.model.args, recipe.python_path, "model.factory", "check model.args")
    if not isinstance(module, nn.Module):
        raise InputError(f"model.factory {reference!r}", expected="a torch.nn.Module", got=type(module).__name__)
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    empty = [name for name, tensor in tensors if not nn.parameter.is_lazy(tensor) and tensor.is_meta]
    if empty:
        remedy = "build it on a device: without torch.device('meta'), or with to_empty and initial values"
        got = f"{empty[0]!r} on the meta device"
        raise InputError(f"model.factory {reference!r}", expected="parameters with values", got=got, remedy=remedy)
    if lazy:
        remedy = "name the number of inputs (nn.Linear for nn.LazyLinear), or call the module once in the function"
        got = f"{lazy[0]!r}, which has none yet"
        raise InputError(f"model.factory {reference!r}", expected="parameters with shapes", got=got, remedy=remedy)
    return module


def check_memory(spec: models.Spec, features: tuple[int, ...], outputs: int, dtype: torch.dtype) -> None:
    """Refuse a model that this machine's memory cannot hold, before any of it is allocated.

    Raises:
        InputError: the model, its gradient and the server's copy in float64 are larger than all memory.
    """
    import torch

    with torch.device("meta"), _uninitialised():  # shapes without memory
        count = sum(parameter.numel() for parameter in spec.build(features, outputs).parameters())
    needed, memory = count * (2 * dtype.itemsize + 8), psutil.virtual_memory().total
    if needed > memory:
        got = f"{count:,} parameters, which take {decimal(needed)}"
        remedy = "make the model smaller"
        raise InputError("the model does not fit", expected=f"at most {decimal(memory)}", got=got, remedy=remedy)


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Skip torch's initialisations: that of an embedding on ``meta`` imports torch._dynamo, which takes seconds."""
    from torch.overrides import TorchFunctionMode

    class Skipping(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__module__", "") == "torch.nn.init":
                return (*args, *(kwargs or {}).values())[0]
            return function(*args, **(kwargs or {}))

    with Skipping():
        yield


def _watch(model: FlatModel) -> None:
    """Look at what the user's module changes.

    Raises:
        InputError: its ``train`` or ``eval`` raises an error, which may be any.
    """
    try:
        model.watch()
    except InputError:
        raise
    except RAISED as error:
        got = f"{type(error).__name__}: {error} ({place_of(error) or 'outside of your files'})"
        raise InputError("the model's train() or eval() raises an error", got=got) from error


def _check_outputs(
    model: FlatModel,
    federation: Federation,
    outputs: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_own_loss: bool,
    by_gradients: bool,
) -> Findings:
    """Run the model on two samples of zeros, and compare its output with them and the federation's targets; return what
    else that showed.

    A loss of the user's may take outputs of any shape, which its trial decides on.
    """
    import torch

    from hpcfed.models.flat import Findings

    samples, _ = zeros(2, federation, dtype, device)
    unsteady, gives_probabilities, unused = "", False, list[str]()
    initial = model.vector.clone()
    with model.evaluation():
        output = _output(model, samples)
    model.load(initial)  # undoes what the call did to parameters and buffers
    if model.attributes is not None and isinstance(output, torch.Tensor) and output.ndim:
        unsteady = _unsteady(model, samples)
        model.load(initial)
    wanted = f"{outputs} classes" if federation.num_classes else f"{outputs} outputs"
    if not isinstance(output, torch.Tensor):
        got = type(output).__name__ + (f" of {len(output)}" if isinstance(output, Sized) else "")
        what, remedy = "the model's output", "return the tensor alone"
        if isinstance(output, Mapping) and output:
            key = "logits" if "logits" in output else next(iter(output))
            remedy = f"return one tensor alone, such as output[{key!r}]; its loss is loss.factory (docs/own-project.md)"
        wanted = "a tensor" if is_own_loss else f"a tensor of {wanted}"
        raise InputError(what, expected=wanted, got=f"a {got}", remedy=remedy)
    shape = tuple(output.shape)
    is_one_logit = federation.task == "classification" and outputs == 2 and shape[1:] == (1,)
    is_known = len(shape) > 1 and (prod(shape[1:]) == outputs or is_one_logit)
    fits = is_known and not is_one_logit
    if not shape or shape[0] != len(samples) or not (fits or is_own_loss):
        wanted = "one output" if is_own_loss else wanted
        what, wanted = "the model's output does not fit the federation", f"{wanted} for each of {len(samples)} samples"
        remedy = "" if fits or is_own_loss else "a loss of your own (loss.factory) may take another shape"
        raise InputError(what, expected=wanted, got=f"shape {shape}", remedy=remedy)
    if outputs > 1 and fits:
        sums = output.detach().flatten(1).sum(1)
        gives_probabilities = bool((output >= 0).all() and torch.allclose(sums, torch.ones_like(sums)))
    if by_gradients and not torch.is_inference_mode_enabled():
        unused = _unused(model, samples, output)
    return Findings(is_known, gives_probabilities, unused, unsteady)


def _unused(model: FlatModel, samples: torch.Tensor, output: torch.Tensor) -> list[str]:
    """Return the parameters that the model's output for `samples`, in evaluation and in training, does not depend on.

    Raises:
        InputError: it depends on none.
    """
    import torch

    unused = _check_leaves(model, samples, output)
    if output.requires_grad and not unused:
        return []
    initial = model.vector.clone()
    in_training = _output(model, samples)  # a module may leave gradients out in evaluation alone
    if not (isinstance(in_training, torch.Tensor) and in_training.requires_grad):
        what = "the model's output does not depend on its parameters"
        remedy = "look for no_grad, detach or .data in it"
        raise InputError(what, expected="an output with a gradient", remedy=remedy)
    unused_in_training = _check_leaves(model, samples, in_training)
    model.load(initial)
    return [name for name in unused if name in unused_in_training]


def _unsteady(model: FlatModel, like: torch.Tensor) -> str:
    """Return what a module's output for a sample depends on in evaluation beside the sample, "" for nothing.

    A copy is called: what a module counts or keeps in its calls stays as it was.
    """
    import torch

    count = 2
    numbers = torch.arange(count * like[0].numel()).view(count, *like.shape[1:])
    samples = (numbers % 7 + 1).to(like) / 8 if like.is_floating_point() else like[:1].expand(count, *like.shape[1:])
    try:
        with model.evaluation(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            module = copy.deepcopy(model.module)
            together, again, alone = (module(each.clone()) for each in (samples, samples, samples[:1]))
            is_same, is_alone = (
                torch.allclose(one, other, 1e-3, 1e-5, equal_nan=True)
                for one, other in ((together, again), (together[:1], alone))
            )
    except RAISED:  # it cannot be copied, wants other values, or has no tensors of one shape
        return ""
    if not is_same:
        return "depends on random draws (functional.dropout takes training=self.training)"
    return "" if is_alone else "depends on the samples beside it"


def _check_leaves(model: FlatModel, samples: torch.Tensor, output: torch.Tensor) -> list[str]:
    """Refuse an output that depends on tensors with a gradient that are no parameters of the module, as those of layers
    in a list are; return the trainable parameters that it does not depend on.

    A tensor that each call makes anew is not refused: a copy of the samples, of which the module takes a gradient.

    Raises:
        InputError: naming the shape of one.
    """
    from torch import Tensor, nn

    from hpcfed.models.trial import leaves

    found = {id(leaf): leaf for leaf in leaves(output)}
    parameters = {id(parameter): name for name, parameter in model.module.named_parameters()}
    others = {key: leaf for key, leaf in found.items() if model.bindings is not None and key not in parameters}
    if others:
        initial, again = model.vector.clone(), _output(model, samples)
        model.load(initial)
        lasting = {id(leaf) for leaf in leaves(again)} if isinstance(again, Tensor) else set()
    for key, leaf in others.items():
        if key in lasting or isinstance(leaf, nn.Parameter):
            what = f"the model's output depends on a tensor of shape {tuple(leaf.shape)} that is none of its parameters"
            remedy = "register it: nn.Parameter in place of a tensor, nn.ModuleList in place of a list of layers"
            raise InputError(what, expected="parameters, which alone are trained and saved", remedy=remedy)
    trained = {id(one): name for name, one in model.module.named_parameters() if one.requires_grad}
    return [name for key, name in trained.items() if key not in found]


def _output(model: FlatModel, samples: torch.Tensor) -> Any:
    """Return what the model makes of samples, with gradients.

    Raises:
        InputError: it raises an error, which may be any.
    """
    import torch

    try:
        with torch.enable_grad():
            return model.module(samples)
    except RAISED as error:
        kind = str(samples.dtype).partition(".")[2]
        what = f"the model cannot take a sample of shape {tuple(samples.shape[1:])} in {kind}"
        place = place_of(error)
        got = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
        wants_numbers = samples.is_floating_point() and any(words in str(error) for words in ("Long", "indices"))
        remedy = (
            f"tokens and codes are {kind} as all samples are: x.long() makes whole numbers" if wants_numbers else ""
        )
        raise InputError(what, got=got, remedy=remedy) from error


def zeros(
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
