"""A trial of the user's loss and metrics before the first round, so that their mistakes show at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
        InputError: it does not depend on the output, or is detached from it.
    """
    with torch.enable_grad():
        inner = output.detach().clone().requires_grad_()
        total = each(inner.clone(), target).sum()  # of a copy: a loss may change its argument in place
        found = torch.autograd.grad(total, inner, allow_unused=True)[0] if total.requires_grad else None
    if found is None:
        raise InputError(
            "loss.factory: the loss does not depend on the model's parameters",
            expected="a loss computed from the output by torch",
            got="one without a gradient",
            remedy="look for detach, item, numpy, argmax or torch.no_grad in it",
        )
