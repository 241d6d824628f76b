"""A program's values and gradients beside the module's own, in float64.

The tolerance is `TOLERANCE` of the largest entry: sums in another order, nothing more. Minibatches are drawn, and small
where a sample takes many operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcfed.client.batched.matmul import Blas
from hpcfed.client.batched.operators.base import IntoGradients
from hpcfed.client.batched.operators.build import Mask, Operators, operators_of
from hpcfed.client.batched.operators.dropping import GivenMasks
from hpcfed.client.batched.operators.general import gradients_of
from hpcfed.client.batched.operators.network import OperatorNetwork
from hpcfed.errors import RAISED
from hpcfed.models.losses import Loss
from hpcfed.models.reading.program import Named, Program, Unreadable, Value, mapped

TOLERANCE = 1e-9
MOST_SAMPLES, SLOTS = 256, 3
WORK = 3e7
"""Multiplications of a minibatch that is compared, forwards, beyond three samples."""
LITTLE, MUCH = 3e6, 1e8
"""Multiplications of a sample, forwards, up to which several clients may be trained at once on a CPU; and above which
one sample is all that is compared, and a GPU trains clients one by one."""


class Checked(NamedTuple):
    """What a check has found.

    Attributes:
        by_slot: whether several clients lie in one pass.
        mixes: whether a sample's output depends on others of its minibatch.
    """

    by_slot: bool
    mixes: bool


def check(module: nn.Module, program: Program, simplified: Program, like: Tensor, batch: int) -> Checked:
    """Compare a program with its module.

    Args:
        module: in training mode, with the parameters that the program names.
        program, simplified: as it was recorded, and as it is computed.
        like: one sample, (1, …).
        batch: samples of a minibatch.

    Raises:
        Unreadable: the values or the gradients differ, or one of the two raises an error.
    """
    most_work, like = LITTLE if like.device.type == "cpu" else MUCH, like.cpu()
    trained = {name: _double(p) for name, p in module.named_parameters() if p.requires_grad}
    constants = {name: _double(p) for name, p in module.named_parameters() if not p.requires_grad}
    constants |= {name: _double(buffer) for name, buffer in module.named_buffers()}
    shapes = {name: tensor.shape for name, tensor in trained.items()}
    operators = operators_of(simplified, shapes, constants)
    draws = torch.Generator().manual_seed(0)
    tokens = _tokens(program, {name: tensor.shape for name, tensor in module.named_parameters()})
    sample = _sampler(like, tokens, draws)
    is_little = operators.work <= most_work
    most = max(3, min(batch, MOST_SAMPLES, int(WORK / max(1, operators.work))))
    sizes = (most, 2, 1) if is_little else (2, 1) if operators.work <= MUCH else (1, 2)
    refuses_one = False
    with _float64():
        for size in sizes:
            x, masks = sample(size), _masks(operators.masks, size, draws)
            try:
                with torch.enable_grad():
                    expected, slope, gradients = _of_module(module, trained, constants, x, masks, draws)
            except RAISED as error:
                if size > 1:
                    raise Unreadable(f"in float64 it raises {type(error).__name__}: {_line(error)}") from error
                refuses_one = True
                continue
            with torch.no_grad():
                own = [tensor.unsqueeze(0) for tensor in trained.values()]
                found, of_own = _of_operators(operators, own, x.unsqueeze(0), masks, slope)
            if not expected.dim() or len(expected) != size:
                raise Unreadable("it has no row of outputs for each sample")
            _compare("outputs", expected, found, _largest([expected]))
            scale = _largest(gradients)
            for name, one, other in zip(trained, gradients, of_own, strict=True):
                _compare(f"gradient of {name}", one, other[0], scale)
            if operators.work > MUCH:
                break
        if refuses_one or not is_little:
            return Checked(by_slot=False, mixes=True)
        with torch.no_grad():
            return _facts(operators, trained, sample, max(2, most // SLOTS), draws)


@contextmanager
def _float64() -> Iterator[None]:
    """Make tensors without a stated dtype in float64, as they are in the run's dtype in a run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _double(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, numbers in float64: no device's kernels are compared."""
    host = tensor.detach().cpu()
    return host.double() if host.is_floating_point() else host


def _tokens(program: Program, shapes: Mapping[str, torch.Size]) -> int:
    """Return how many tokens the module knows: the rows of its smallest embedding."""
    rows = [
        shapes[argument.name][0]
        for call in program.calls
        if call.name == "embedding"
        for argument in (*call.args, *call.kwargs.values())
        if isinstance(argument, Named) and argument.name in shapes and Value(0) in call.args
    ]
    return min(rows, default=2)


def _sampler(like: Tensor, tokens: int, draws: torch.Generator) -> Callable[[int], Tensor]:
    def sample(size: int) -> Tensor:
        shape = size, *like.shape[1:]
        if like.is_floating_point():
            x = torch.randn(shape, generator=draws, dtype=torch.float64)
        else:
            x = torch.randint(tokens, shape, generator=draws)
        return x

    return sample


def _masks(masks: Sequence[Mask], samples: int, draws: torch.Generator) -> list[Tensor]:
    return [
        (torch.rand(samples, *mask.shape, generator=draws, dtype=torch.float64) >= mask.p) / (1 - mask.p)
        for mask in masks
    ]


class _Dropping(GivenMasks):
    """Takes given masks in the place of dropout's draws, and float64 in that of float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = mapped((args, kwargs or {}), lambda leaf: torch.float64 if leaf is torch.float32 else leaf)
        return super().__torch_function__(Tensor.double if func is Tensor.float else func, types, args, kwargs)


def _of_module(
    module: nn.Module,
    trained: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    x: Tensor,
    masks: Sequence[Tensor],
    draws: torch.Generator,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return a module's outputs, a drawn slope by them, and the gradients of the parameters."""
    with _in_place_of(module, {**trained, **constants}) as leaves, _Dropping(masks):
        output = module(x.clone())
        slope = torch.randn(output.shape, generator=draws, dtype=torch.float64)
        found = gradients_of([output], [slope], [leaves[name] for name in trained])
    gradients = [torch.zeros_like(a) if b is None else b for a, b in zip(trained.values(), found, strict=True)]
    return output.detach(), slope, gradients


@contextmanager
def _in_place_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, nn.Parameter]]:
    """Put other tensors in the place of a module's parameters and buffers, and back; yield its parameters by name.

    ``torch.func.functional_call`` leaves a parameter behind where one layer has two names.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    other: dict[int, Tensor] = {}
    for name, tensor in named:
        value = tensors[name].clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        other[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    held = [(table, own, tensor) for table in tables for own, tensor in table.items() if tensor is not None]
    try:
        for table, own, tensor in held:
            table[own] = other.get(id(tensor), tensor)
        yield dict(module.named_parameters())
    finally:
        for table, own, tensor in held:
            table[own] = tensor


def _of_operators(
    operators: Operators, own: Sequence[Tensor], x: Tensor, masks: Sequence[Tensor], slope: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the operators' outputs, and the gradients of the parameters (R, …)."""
    network = OperatorNetwork(operators, Loss(_no_loss, "sum"), Blas(), mixes=False)
    try:
        run, output = network.outputs(own, x, masks)
        out, kept = [torch.zeros_like(one) for one in own], output.clone()
        network.back(run, slope.clone(), IntoGradients(out, Blas()))
    except Unreadable:
        raise
    except RAISED as error:
        raise Unreadable(f"its operations raise {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return kept, out


def _no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise NotImplementedError


def _compare(what: str, expected: Tensor, found: Tensor, scale: float) -> None:
    if expected.shape != found.shape or not _is_near(expected, found, scale):
        raise Unreadable(f"its {what} would differ from the module's")


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest finite magnitude."""
    return max((float(one.abs().nan_to_num(0.0, 0.0).max()) for one in tensors if one.numel()), default=0.0)


def _is_near(expected: Tensor, found: Tensor, scale: float) -> bool:
    return torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def _facts(
    operators: Operators,
    trained: Mapping[str, Tensor],
    sample: Callable[[int], Tensor],
    batch: int,
    draws: torch.Generator,
) -> Checked:
    """Try whether samples, and slots, are each computed by themselves."""
    own = [tensor.unsqueeze(0) for tensor in trained.values()]
    x, masks = sample(3), _masks(operators.masks, 3, draws)
    network = OperatorNetwork(operators, Loss(_no_loss, "sum"), Blas(), mixes=False)
    together = network.outputs(own, x.unsqueeze(0), masks)[1]
    apart = [network.outputs(own, x[k : k + 1].unsqueeze(0), [mask[k : k + 1] for mask in masks])[1] for k in range(3)]
    mixes = not _is_near(together, torch.cat(apart), _largest([together]))
    return Checked(operators.by_slot and not mixes and _stacks(operators, trained, sample, batch, draws), mixes)


def _stacks(
    operators: Operators,
    trained: Mapping[str, Tensor],
    sample: Callable[[int], Tensor],
    batch: int,
    draws: torch.Generator,
) -> bool:
    """Whether clients with parameters of their own have the same values and gradients together as one by one."""
    each = [
        [tensor + 0.1 * torch.randn(tensor.shape, generator=draws, dtype=torch.float64) for tensor in trained.values()]
        for _ in range(SLOTS)
    ]
    stacks = [torch.stack(tensors) for tensors in zip(*each, strict=True)]
    x = torch.stack([sample(batch) for _ in range(SLOTS)])
    masks = _masks(operators.masks, batch * SLOTS, draws)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # vmap's, of a function that it maps one by one
            return _are_apart(operators, each, stacks, x, masks, draws)
    except (Unreadable, *RAISED):
        return False


def _are_apart(
    operators: Operators,
    each: Sequence[Sequence[Tensor]],
    stacks: Sequence[Tensor],
    x: Tensor,
    masks: Sequence[Tensor],
    draws: torch.Generator,
) -> bool:
    shape = OperatorNetwork(operators, Loss(_no_loss, "sum"), Blas(), mixes=False).outputs(stacks, x, masks)[1].shape
    slope = torch.randn(shape, generator=draws, dtype=torch.float64)
    output, gradients = _of_operators(operators, stacks, x, masks, slope)
    for slot in range(SLOTS):
        rows = slice(x.shape[1] * slot, x.shape[1] * (slot + 1))
        of_own = [tensor.unsqueeze(0) for tensor in each[slot]]
        of_slot = [mask[rows] for mask in masks]
        alone, own_gradients = _of_operators(operators, of_own, x[slot : slot + 1], of_slot, slope[rows])
        scale = _largest(own_gradients)
        near = [_is_near(one[0], many[slot], scale) for one, many in zip(own_gradients, gradients, strict=True)]
        if not (_is_near(alone, output[rows], _largest([alone])) and all(near)):
            return False
    return True
