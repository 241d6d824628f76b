"""A program's values and gradients beside the module's own, in float64.

The tolerance is `TOLERANCE` of the largest entry: sums in another order, nothing more. Minibatches are drawn, and small
where a sample takes many operations; so are images, if the module takes smaller ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcfed.client.batched.matmul import Blas
from hpcfed.client.batched.operators.build import Mask, Operators, operators_of
from hpcfed.client.batched.operators.dropping import GivenMasks
from hpcfed.client.batched.operators.general import gradients_of
from hpcfed.client.batched.operators.network import OperatorNetwork
from hpcfed.errors import RAISED
from hpcfed.models.losses import Loss
from hpcfed.models.reading.program import Program, Unreadable, mapped

TOLERANCE = 1e-9
MOST_SAMPLES, SLOTS = 256, 3
WORK = 3e7
"""Multiplications of a minibatch that is compared, forwards, beyond three samples."""
LITTLE, MUCH = 3e6, 1e8
"""Multiplications of a sample, forwards, up to which several clients may be trained at once on a CPU; and above which
one sample is all that is compared, of smaller images where that can be done, and a GPU trains clients one by one."""
SMALLEST, PIECE, BLOCK = 8, 1 << 16, 1 << 22
"""Pixels of a smaller image's sides, at least; numbers that are compared at a time, in the core's own cache; and of a
gradient that there are at a time."""


class CheckResult(NamedTuple):
    """Result of a check.

    Attributes:
        by_slot: whether several clients lie in one pass.
        mixes: whether a sample's output depends on others of its minibatch.
    """

    by_slot: bool
    mixes: bool


def check(module: nn.Module, program: Program, simplified: Program, like: Tensor, batch: int) -> CheckResult:
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
    sample = _sampler(like, program, tokens, draws)
    is_little = operators.work <= most_work
    most = max(3, min(batch, MOST_SAMPLES, int(WORK / max(1, operators.work))))
    sizes = (most, 2, 1) if is_little else (2, 1) if operators.work <= MUCH else (1, 2)
    compare = partial(_compare_with, module, operators, trained, constants, draws=draws)
    refuses_one = False
    with _float64():
        if operators.work > MUCH:
            smaller = _smaller(like, operators)
            if smaller is None or not _is_alike(compare, _sampler(smaller, program, tokens, draws)(1)):
                try:
                    compare(sample(1))
                except ModuleRaises:
                    compare(sample(2))
            return CheckResult(by_slot=False, mixes=True)
        for size in sizes:
            try:
                compare(sample(size))
            except ModuleRaises:
                if size > 1:
                    raise
                refuses_one = True
        if refuses_one or not is_little:
            return CheckResult(by_slot=False, mixes=True)
        with torch.no_grad():
            return _facts(operators, trained, sample, max(2, most // SLOTS), draws)


class ModuleRaises(Unreadable):
    """The module does not take a minibatch."""


def _compare_with(
    module: nn.Module,
    operators: Operators,
    trained: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    x: Tensor,
    *,
    draws: torch.Generator,
) -> None:
    """Compare operators with their module on a minibatch.

    Raises:
        Unreadable: they differ, or one raises an error.
    """
    masks = _masks(operators.masks, len(x), draws)
    try:
        with torch.enable_grad():
            expected, slope, gradients = _of_module(module, trained, constants, x, masks, draws)
    except RAISED as error:
        raise ModuleRaises(f"in float64 it raises {type(error).__name__}: {_line(error)}") from error
    with torch.no_grad():
        own = [tensor.unsqueeze(0) for tensor in trained.values()]
        network = OperatorNetwork(operators, Loss(_no_loss, "sum"), Blas(), mixes=False)
        with _errors_named():
            run, found = network.outputs(own, x.unsqueeze(0), masks)
        if not expected.dim() or len(expected) != len(x):
            raise Unreadable("it has no row of outputs for each sample")
        _compare("outputs", expected, found, _largest([expected]))
        with _errors_named():
            network.back(run, slope, _Compared(dict(zip(trained, gradients, strict=True)), operators.shared))


def _smaller(like: Tensor, operators: Operators) -> Tensor | None:
    """Return a smaller image of which a pass takes `MUCH` multiplications; None where sides have no such part."""
    if like.dim() != 4:
        return None
    part = 2
    while operators.work > MUCH * part**2:
        part *= 2
    sides = like.shape[2:]
    fits = all(side % part == 0 and side // part >= SMALLEST for side in sides)
    return like[..., : sides[0] // part, : sides[1] // part] if fits else None


def _is_alike(compare: Callable[[Tensor], None], x: Tensor) -> bool:
    """Whether a minibatch of smaller images has the same values and gradients; many modules take none."""
    try:
        compare(x)
    except Unreadable:
        return False
    return True


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
    """Return the number of tokens: the rows of the smallest embedding whose indices follow from the minibatch."""
    of_data = {0}
    for call in program.calls:
        if of_data & {*call.values}:
            of_data |= {number for number in call.outputs if number is not None}
    rows = [
        shapes[name][0]
        for call in program.calls
        if call.name in ("embedding", "embedding_bag") and of_data & {*call.values}
        for name in call.names
        if name in shapes
    ]
    return min(rows, default=2)


def _takes_whole_numbers(program: Program) -> bool:
    """Whether the module converts floating-point numbers to whole ones, as one of tokens does by ``x.long()``."""
    return any(
        call.name in ("long", "int", "to", "type")
        and any(program.floats[number] for number in call.values)
        and not any(program.floats[number] for number in call.outputs if number is not None)
        for call in program.calls
    )


def _sampler(like: Tensor, program: Program, tokens: int, draws: torch.Generator) -> Callable[[int], Tensor]:
    is_whole = _takes_whole_numbers(program)

    def sample(size: int) -> Tensor:
        shape = size, *like.shape[1:]
        if like.is_floating_point() and not is_whole:
            return torch.randn(shape, generator=draws, dtype=torch.float64)
        whole = torch.randint(tokens, shape, generator=draws)
        if not like.is_floating_point():
            return whole
        fractions = 0.49 * torch.rand(shape, generator=draws, dtype=torch.float64)
        return whole + fractions * torch.randint(2, shape, generator=draws)  # half of them are whole

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
        value = tensors[name]  # whoever writes to it has been refused
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
    network, sink = OperatorNetwork(operators, Loss(_no_loss, "sum"), Blas(), mixes=False), _Kept()
    with _errors_named():
        run, output = network.outputs(own, x, masks)
        kept = output.clone()
        network.back(run, slope.clone(), sink)
    return kept, [sink.found[k] if k in sink.found else torch.zeros_like(one) for k, one in enumerate(own)]


@contextmanager
def _errors_named() -> Iterator[None]:
    """Name errors of a program's operations.

    Raises:
        Unreadable: for any other error.
    """
    try:
        yield
    except Unreadable:
        raise
    except RAISED as error:
        raise Unreadable(f"its operations raise {type(error).__name__}: {_line(error)}") from error


class _Kept:
    """A `Sink` that keeps gradients as they come.

    Attributes:
        found: of each parameter that has one, (R, …).
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def product(self, weight: int, outgoing: Tensor, incoming: Tensor) -> None:
        """Take a product; see `Sink`."""
        self.add(weight, torch.bmm(outgoing.transpose(1, 2), incoming))

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take a gradient; see `Sink`."""
        before = self.found.get(parameter)
        self.found[parameter] = gradient if before is None else before + gradient

    def end(self) -> None:
        """Do nothing."""


class _Compared(_Kept):
    """A `Sink` that compares gradients of one client with the module's, as soon as they are whole: memory is little."""

    def __init__(self, expected: Mapping[str, Tensor], shared: frozenset[int]):
        super().__init__()
        self._expected, self._shared = list(expected.items()), shared
        self._scale, self._missing = _largest([*expected.values()]), set(range(len(expected)))

    def product(self, weight: int, outgoing: Tensor, incoming: Tensor) -> None:
        """Take a product, a block of its rows after the other: all of it would take as much memory as the weight."""
        if weight in self._shared:
            super().product(weight, outgoing, incoming)
            return
        self._missing.remove(weight)
        name, expected = self._expected[weight]
        rows = max(1, BLOCK // max(1, incoming.shape[2]))
        for part, own in zip(expected.split(rows), outgoing[0].T.split(rows), strict=True):
            _compare(f"gradient of {name}", part, own @ incoming[0], self._scale)

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take a gradient; see `Sink`."""
        if parameter in self._shared:
            super().add(parameter, gradient)
        else:
            self._compare(parameter, gradient)

    def end(self) -> None:
        """Compare what has waited, and what has no gradient."""
        for parameter, gradient in self.found.items():
            self._compare(parameter, gradient)
        for parameter in self._missing.copy():
            self._compare(parameter, torch.zeros_like(self._expected[parameter][1]).unsqueeze(0))

    def _compare(self, parameter: int, gradient: Tensor) -> None:
        self._missing.remove(parameter)
        name, expected = self._expected[parameter]
        _compare(f"gradient of {name}", expected, gradient[0], self._scale)


def _no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise NotImplementedError


def _compare(what: str, expected: Tensor, found: Tensor, scale: float) -> None:
    is_alike = (expected.shape, expected.dtype) == (found.shape, found.dtype)
    if not (is_alike and _is_near(expected, found, scale)):
        raise Unreadable(f"its {what} would differ from the module's")


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest finite magnitude."""
    return max((_magnitude(one) for one in tensors if one.numel()), default=0.0)


def _magnitude(tensor: Tensor) -> float:
    low, high = (float(end) for end in tensor.aminmax())
    if isfinite(low) and isfinite(high):
        return max(-low, high)
    return float(tensor.abs().nan_to_num(0.0, 0.0).max())


def _is_near(expected: Tensor, found: Tensor, scale: float) -> bool:
    size = PIECE
    if expected.shape != found.shape or (expected.is_contiguous() and found.is_contiguous()):
        expected, found = expected.reshape(-1), found.reshape(-1)
    else:  # in rows: one that is channels last would be copied as a whole
        size = max(1, PIECE * len(expected) // expected.numel()) if expected.numel() else 1
    pairs = zip(expected.split(size), found.split(size), strict=True)
    return all(_is_piece_near(one, other, scale) for one, other in pairs)


def _is_piece_near(expected: Tensor, found: Tensor, scale: float) -> bool:
    if not found.numel():
        return True
    low, high = (float(end) for end in (expected - found).aminmax())
    if max(-low, high) <= TOLERANCE * scale:  # in an eighth of the time that all others take
        return True
    return torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def _facts(
    operators: Operators,
    trained: Mapping[str, Tensor],
    sample: Callable[[int], Tensor],
    batch: int,
    draws: torch.Generator,
) -> CheckResult:
    """Try whether samples, and slots, are each computed by themselves."""
    own = [tensor.unsqueeze(0) for tensor in trained.values()]
    x, masks = sample(3), _masks(operators.masks, 3, draws)
    network = OperatorNetwork(operators, Loss(_no_loss, "sum"), Blas(), mixes=False)
    together = network.outputs(own, x.unsqueeze(0), masks)[1]
    apart = [network.outputs(own, x[k : k + 1].unsqueeze(0), [mask[k : k + 1] for mask in masks])[1] for k in range(3)]
    mixes = not _is_near(together, torch.cat(apart), _largest([together]))
    return CheckResult(operators.by_slot and not mixes and _stacks(operators, trained, sample, batch, draws), mixes)


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
