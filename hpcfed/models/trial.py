"""A trial of the user's loss and metrics before the first round, so that their mistakes show at once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hpcfed.config.user_code.blame import place_of
from hpcfed.errors import RAISED, InputError
from hpcfed.models.losses import Each, Loss


def try_own(loss: Loss, metrics: Mapping[str, Callable[[Tensor, Tensor], Any]], output: Tensor, target: Tensor) -> None:
    """Call the user's loss and metrics once, so that their errors show before the first round.

    Raises:
        InputError: one of them raises, or returns something invalid.
    """
    functions: dict[str, Callable[[Tensor, Tensor], Any]] = {
        f"evaluate.metrics.{name}": metrics[name] for name in metrics
    }
    if loss.is_own:
        functions["loss.factory"] = loss.each
    for key, function in functions.items():
        try:
            function(output, target)
            if function is loss.each:
                _check_modules(loss.each, output, target)
                _check_gradient(loss.each, output, target)
            _check_pairs(key, function, output, target)
        except InputError:
            raise
        except RAISED as error:  # the user's function may raise anything
            got = f"output {tuple(output.shape)} {output.dtype} and target {tuple(target.shape)} {target.dtype}"
            place = place_of(error)
            what = f"{key} raised {type(error).__name__}: {error}" + (f" ({place})" if place else "")
            raise InputError(what, remedy=f"it was called with {got}") from error


def _check_pairs(key: str, function: Callable[[Tensor, Tensor], Any], output: Tensor, target: Tensor) -> None:
    """Refuse a loss or a metric of one number per sample that pairs each output with every target: outputs (B, 1) less
    targets (B,) are (B, B).

    It does if four samples have another value together than two by two, and outputs in the shape of the targets have
    the same value in both.

    Raises:
        InputError: it does.
    """
    if output.ndim == target.ndim or output[0].numel() != 1 or target[0].numel() != 1:
        return
    x = torch.tensor([0.25, 0.5, 0.75, 0.375], dtype=output.dtype).view(4, *output.shape[1:])
    y = torch.tensor([0.875, 0.125, 0.5, 0.25]).to(target.dtype).view(4, *target.shape[1:])
    try:
        with torch.no_grad():
            sums = [_is_sum_of_parts(function, outputs, y) for outputs in (x, x.view(y.shape))]
    except RAISED:  # it wants other values, or another device
        return
    if sums == [False, True]:
        raise InputError(
            f"{key}: four samples have another value together than two by two",
            expected="each output with its own target",
            got=f"output {tuple(x.shape)} and target {tuple(y.shape)}, as if every output belonged to every target",
            remedy="reshape one like the other in it: output.reshape(target.shape)",
        )


def _is_sum_of_parts(function: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor) -> bool:
    """Whether the value for four samples is the sum of those for two and two."""
    whole, *halves = (_summed(function(x[part], y[part])) for part in (slice(4), slice(2), slice(2, 4)))
    sums = zip(whole, map(sum, zip(*halves, strict=True)), strict=True)
    return all(math.isclose(one, both, rel_tol=1e-3, abs_tol=1e-3) for one, both in sums)


def _summed(answer: Any) -> tuple[float, ...]:
    """Return the sum of a loss per sample, or a metric's sum and count."""
    return (float(answer.sum()),) if isinstance(answer, Tensor) else tuple(map(float, answer))


def _check_gradient(each: Each, output: Tensor, target: Tensor) -> None:
    """Refuse a loss without a gradient by the output, from which nothing can be learned.

    Raises:
        InputError: it does not depend on the output, or is detached from it; or it depends on a tensor of its own that
            has a gradient.
    """
    with torch.enable_grad():
        inner = output.detach().clone().requires_grad_()
        total = each(inner.clone(), target).sum()  # of a copy: a loss may change its argument in place
        for leaf in leaves(total):
            if leaf is not inner:
                _refuse_parameter(f"a tensor of shape {tuple(leaf.shape)}")
        found = torch.autograd.grad(total, inner, allow_unused=True)[0] if total.requires_grad else None
    if found is None:
        raise InputError(
            "loss.factory: the loss does not depend on the model's parameters",
            expected="a loss computed from the output by torch",
            got="one without a gradient",
            remedy="look for detach, item, numpy, argmax or torch.no_grad in it",
        )


def _check_modules(each: Each, output: Tensor, target: Tensor) -> None:
    """Refuse a loss that is a module, or calls one that it holds, with parameters to be trained, or with buffers that a
    call changes.

    Raises:
        InputError: naming the tensor.
    """
    modules = [*_modules_of(getattr(each, "function", each), depth=3)]
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                _refuse_parameter(f"{name!r} of {type(module).__name__}")
    before = [{name: buffer.clone() for name, buffer in module.named_buffers()} for module in modules]
    each(output, target)
    for module, known in zip(modules, before, strict=True):
        for name, buffer in module.named_buffers():
            if name not in known or not torch.equal(buffer.nan_to_num(), known[name].nan_to_num()):
                raise InputError(
                    f"loss.factory: a call changes the buffer {name!r} of {type(module).__name__}",
                    expected="a loss that remembers nothing, since it passes from client to client",
                    remedy="compute it from the output and the target, or keep it in the model",
                )


def _modules_of(function: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that a function is, is bound to, or holds in its closure, arguments or attributes."""
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, partial):
        for held in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(held, depth - 1) if depth else ()
    elif inspect.ismethod(function):
        yield from _modules_of(function.__self__, depth - 1) if depth else ()
    elif inspect.isfunction(function):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield from _modules_of(cell.cell_contents, depth - 1) if depth else ()
    elif depth and hasattr(function, "__dict__") and not inspect.isclass(function) and not inspect.ismodule(function):
        for held in vars(function).values():
            yield from _modules_of(held, depth - 1)


def leaves(total: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to which a gradient of `total` goes."""
    pending, seen = [total.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        pending += [following for following, _ in node.next_functions]


def _refuse_parameter(which: str) -> NoReturn:
    raise InputError(
        f"loss.factory: the loss has a parameter of its own, {which}",
        expected="a function of the output and the target alone: a loss is not trained",
        remedy="put it into the model, whose output may hold what the loss needs; or set its requires_grad to False",
    )
