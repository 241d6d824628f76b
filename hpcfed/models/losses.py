"""Losses, minimised on minibatches, and metrics, added up exactly by evaluations.

A metric is a function of the outputs and targets of B samples that returns a sum and a count; its value over many
pieces of a data set is Σ sums / Σ counts, for any pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcfed.config.factory import imported, made
from hpcfed.config.metrics import Metric, summed
from hpcfed.config.recipe import LossSection
from hpcfed.errors import InputError

Each = Callable[[Tensor, Tensor], Tensor]
"""output (B, …) and target (B, …) → the loss of each sample, (B,)."""
Encode = Callable[[Tensor, Tensor], Tensor]
"""target (B, …) and a tensor of the output's dtype with last axis C → the target as numbers, (B, C)."""
BatchMetric = Callable[[Tensor, Tensor], tuple[float, float]]
"""output (B, …) and target (B, …) → (sum, count)."""

REGISTER_BYTES = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability(), 0)
"""Of a vector register of torch's kernels; 0 where it is not known."""
LANES = 16
"""A multiple of the numbers in a register."""

OF_TASK = {
    "classification": "cross-entropy",
    "multi-label": "binary-cross-entropy",
    "next-token": "cross-entropy",
    "regression": "squared",
    "survival": "cox",
}


@dataclass(frozen=True)
class Loss:
    """A loss, and its reduction over the samples of a minibatch.

    Attributes:
        each: one loss per sample.
        reduction: ``mean`` or ``sum``.
        fused: torch's one kernel for `each` and the reduction, called with ``reduction=``; None if it has none.
        inverse_link, encode: for a canonical link, functions of the output (…, C) and of the target such that the
            derivative of `each` by the output is inverse_link(output) − encode(target); else None.
            A sample's weight, if it has one, multiplies both `each` and this derivative.
        weight_of: target (B,) → the weight of each sample, (B,), which `each` has in it; None: 1.
        whole: whether a sample's loss depends on the other samples: then the loss of a data set is no sum of pieces.
        by_client: client → its loss in training, where the weights of classes are its own.
    """

    each: Each
    reduction: str
    fused: Callable[..., Tensor] | None = None
    inverse_link: Callable[[Tensor], Tensor] | None = None
    encode: Encode | None = None
    whole: bool = False
    by_client: Callable[[int], Loss] | None = None
    weight_of: Callable[[Tensor], Tensor] | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the user's."""
        return isinstance(self.each, _OwnLoss)

    def of_client(self, client: int) -> Loss:
        """Return the loss with which a client trains: this one, unless its weights are the client's."""
        return self if self.by_client is None else self.by_client(client)

    def batch(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the scalar loss of a minibatch of B samples, averaged or summed over them."""
        in_any_order = output.ndim > 2 and output.device.type != "cpu"  # as a GPU adds the losses of several labels
        if self.fused is not None and not in_any_order:
            return self.fused(output, target, reduction=self.reduction)
        losses = self.each(output, target)
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def summed(self, output: Tensor, target: Tensor) -> tuple[float, float]:
        """Return the loss as a metric: its sum over the samples, in float64, and their number."""
        return float(self.total(output, target)), len(target)

    def total(self, output: Tensor, target: Tensor) -> Tensor:
        """Return that sum, (), where the output lies."""
        return self.each(self._apart(output), target).sum(dtype=torch.float64)

    def by_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample, summed over its axes, (B,), in float64."""
        return self.each(self._apart(output), target).reshape(len(target), -1).sum(1, dtype=torch.float64)

    def _apart(self, output: Tensor) -> Tensor:
        """Return an output that the user's loss may write to: metrics take the same one."""
        return output.clone() if self.is_own else output

    def of_all(self, output: Tensor, target: Tensor) -> float:
        """Return the mean loss of all samples of a data set, (n, …) each, in float64."""
        return float(self.each(output.double(), target.double()).mean())


def squared(output: Tensor, target: Tensor) -> Tensor:
    """½‖output − target‖² of each sample, (B,)."""
    return 0.5 * (output.reshape(target.shape) - target).square().reshape(len(target), -1).sum(1)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """−log softmax(output)_target of each sample, (B, …), where output (B, C, …) are the classes' log-odds.

    Rows that do not fill a vector register are computed number by number; so where no gradient is to be taken they are
    transposed, padded with samples to whole registers. This takes a fifth of the time, and has the same bits.
    """
    fills = output.shape[1] * output.element_size() >= REGISTER_BYTES
    if fills or output.ndim > 2 or output.device.type != "cpu" or torch.is_grad_enabled():
        return functional.cross_entropy(output, target, reduction="none")
    samples, classes = output.shape
    columns = output.new_zeros(classes, -(-samples // LANES) * LANES)
    columns[:, :samples] = output.t()
    return functional.nll_loss(columns.log_softmax(0)[:, :samples].t(), target, reduction="none")


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """−Σ_c log p(target_c) of each sample, (B,), where output (B, C) are the log-odds of C independent labels."""
    each = partial(functional.binary_cross_entropy_with_logits, reduction="none")
    return (each(output, target) if torch.is_grad_enabled() else in_whole_registers(each, output, target)).sum(1)


def in_whole_registers(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Apply an elementwise function to tensors of one shape, none of whose entries is in a partial register.

    torch computes such an entry by another function, with other last bits; so zeros are added until all registers are
    whole.
    """
    shape, count = arguments[0].shape, arguments[0].numel()
    missing = -count % (2 * LANES)
    if not missing:
        return function(*arguments)
    flat = [torch.cat([argument.reshape(-1), argument.new_zeros(missing)]) for argument in arguments]
    return function(*flat)[:count].view(shape)


def sigmoid(output: Tensor) -> Tensor:
    """The logistic function of each number."""
    return in_whole_registers(torch.sigmoid, output)


def cox(output: Tensor, target: Tensor) -> Tensor:
    """−log of each sample's factor of the partial likelihood, (B,), by descending time; 0 for censored ones.

    A sample with an event adds log Σ_{j at risk} exp(output_j) − output. At risk are the samples that come before it in
    the stable order by descending time, and itself; so among equal times the order of the samples decides, as in
    FLamby's loss. A sample's own risk is taken out of the logarithm, log(1 + Σ_before exp(output_j − output)), so that
    the gradient of an event at the last time is 0 and no rounding error, which Adam would scale to a whole step.
    Reference: Cox, "Regression models and life-tables", 1972.

    Args:
        output: log hazards, (B, 1).
        target: event (0 or 1) and time, (B, 2).
    """
    order = target[:, 1].argsort(descending=True, stable=True)
    risk, event = output.reshape(-1)[order], target[order, 0]
    before = torch.cat([risk.new_full((1,), -torch.inf), risk[:-1].logcumsumexp(0)])
    return torch.logaddexp(before - risk, risk.new_zeros(())) * event


def weighted(each: Each, weights: Tensor, output: Tensor, target: Tensor) -> Tensor:
    """Each sample's loss times the weight of its class, (B,)."""
    return weights_of(weights, target) * each(output, target)


def weights_of(weights: Tensor, target: Tensor) -> Tensor:
    """The weight of each sample's class, (B,); a column of zeros and ones stands for two classes."""
    return weights[(target if target.ndim == 1 else target[:, 0]).long()]


def mean_squared(output: Tensor, target: Tensor) -> Tensor:
    """‖output − target‖² / C of each sample of C numbers, (B,)."""
    return (output.reshape(target.shape) - target).square().reshape(len(target), -1).mean(1)


def sum_squared(output: Tensor, target: Tensor) -> Tensor:
    """‖output − target‖² of each sample, (B,)."""
    return 2 * squared(output, target)


def mean_binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """`binary_cross_entropy` / C of each sample of C labels, (B,)."""
    return binary_cross_entropy(output, target) / output[0].numel()


def softmax(output: Tensor) -> Tensor:
    """The softmax over classes, the last axis."""
    return output.softmax(-1)


def one_hot(target: Tensor, like: Tensor) -> Tensor:
    """Classes (B,) → (B, C), 1 where the class is the target's and else 0."""
    if target.device.type != "cpu":  # where torch's own may look at the classes, for which the host would wait
        return (target.unsqueeze(-1) == torch.arange(like.shape[-1], device=target.device)).to(like.dtype)
    return functional.one_hot(target, like.shape[-1]).to(like.dtype)


def as_rows(target: Tensor, like: Tensor) -> Tensor:
    """Numbers (B, …) → (B, C)."""
    return target.reshape(len(target), like.shape[-1])


def classes_right(output: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the number of samples whose largest output is the target's, and of all samples; nan is never right.

    One output, (B, 1), is the log-odds of the second of two classes.
    """
    return int(_classes_right(output, target).sum()), len(target)


def _classes_right(output: Tensor, target: Tensor) -> Tensor:
    """Return how many classes of each sample are right, (B,)."""
    if output.shape[1:] == (1,):
        return _labels_right(output, target.unsqueeze(1)).to(torch.int64)
    predicted = output.argmax(1, keepdim=True)
    known = ~output.gather(1, predicted).isnan()  # nan counts as the largest output, of whatever class
    return (known & (predicted == target.unsqueeze(1))).reshape(len(target), -1).sum(1)


def labels_right(output: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the number of samples with every label right (p > ½ for a 1), and of all: the subset accuracy."""
    return int(_labels_right(output, target).sum()), len(target)


def _labels_right(output: Tensor, target: Tensor) -> Tensor:
    """Return whether all labels of each sample are right, (B,)."""
    return (((output > 0) == (target > 0)) & ~output.isnan()).all(1)


LOSSES: Mapping[str, Callable[[str], Loss]] = {
    "cross-entropy": partial(
        Loss,
        cross_entropy,
        fused=functional.cross_entropy,
        inverse_link=softmax,
        encode=one_hot,
    ),
    "binary-cross-entropy": partial(Loss, binary_cross_entropy, inverse_link=sigmoid, encode=as_rows),
    "squared": partial(Loss, squared, inverse_link=torch.clone, encode=as_rows),
    "cox": partial(Loss, cox, whole=True),
}
ACCURACY: Mapping[str, BatchMetric] = {
    "classification": classes_right,
    "multi-label": labels_right,
    "next-token": classes_right,
}
"""The accuracy of each task that has one."""
RIGHT: Mapping[str, Each] = {
    "classification": _classes_right,
    "multi-label": _labels_right,
    "next-token": _classes_right,
}
"""What `ACCURACY` adds up, sample by sample."""


@contextmanager
def unwritten(key: str, *tensors: Tensor) -> Iterator[None]:
    """Refuse a function of the user's that writes to what it is called with, since other metrics take the same.

    Raises:
        InputError: naming the metric.
    """
    before = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    yield
    if before != [None if tensor.is_inference() else tensor._version for tensor in tensors]:
        what = f"{key} writes to its arguments, which other metrics take, too"
        raise InputError(what, remedy="compute in new tensors: output.sigmoid(), not output.sigmoid_()")


def loss_for(
    section: LossSection,
    task: str,
    python_path: Sequence[Path],
    class_weights: Tensor | None = None,
    columns: int = 1,
) -> Loss:
    """Return the recipe's loss; ``auto`` is the task's.

    Each class's samples are multiplied by its weight, (C,); where clients have weights, (N, C), in training alone.
    `columns` are the numbers of a target.

    Raises:
        InputError: a loss that does not fit the task, or a factory that cannot be found or called.
    """
    if section.factory is not None:
        function = _made(section.factory, section.args, python_path)
        known = _of_torch(function, section.reduction, OF_TASK[task], columns)
        return known or Loss(_OwnLoss(section.factory, function), section.reduction)
    name = OF_TASK[task] if section.name == "auto" else section.name
    if name != OF_TASK[task]:
        raise InputError(f"loss.name {name!r} does not fit a {task} federation", remedy=f"use {OF_TASK[task]!r}")
    loss = LOSSES[name](section.reduction)
    if loss.whole and section.reduction == "sum":
        raise InputError(f"loss.reduction: sum with {name}", remedy="use mean")
    if class_weights is None:
        return loss
    if class_weights.ndim == 1:
        each, weight_of = partial(weighted, loss.each, class_weights), partial(weights_of, class_weights)
        return replace(loss, each=each, fused=None, weight_of=weight_of)
    return replace(
        loss,
        by_client=lambda client: Loss(partial(weighted, loss.each, class_weights[client]), section.reduction),
    )


def _of_torch(function: Each, reduction: str, usual: str, columns: int) -> Loss | None:
    """Return the loss that one of torch's modules is, with its slope; None for any other function.

    Those that are no sum over samples, such as class weights with ``mean``, and those of options are functions as any
    other. ``reduction: none`` of several numbers a sample gives no loss a sample.
    """
    of_module, share = getattr(function, "reduction", None), 1 / columns if reduction == "mean" else 1.0
    if of_module != reduction and (of_module != "none" or columns > 1):
        return None
    if type(function) is nn.CrossEntropyLoss and usual == "cross-entropy":
        is_plain = function.weight is None and function.ignore_index == -100 and not function.label_smoothing
        return LOSSES[usual](reduction) if is_plain else None
    if type(function) is nn.BCEWithLogitsLoss and usual == "binary-cross-entropy":
        is_plain = function.weight is None and function.pos_weight is None
        each = mean_binary_cross_entropy if reduction == "mean" else binary_cross_entropy
        return _scaled(each, reduction, sigmoid, share) if is_plain else None
    if type(function) is nn.MSELoss and usual == "squared":
        return _scaled(mean_squared if reduction == "mean" else sum_squared, reduction, torch.clone, 2 * share)
    return None


def _scaled(each: Each, reduction: str, link: Callable[[Tensor], Tensor], factor: float) -> Loss:
    """Return a loss whose derivative by the output is factor · (link(output) − target)."""
    return Loss(
        each,
        reduction,
        inverse_link=lambda output: link(output).mul_(factor),
        encode=lambda target, like: as_rows(target, like) * factor,
    )


def of_torch(name: str, reduction: str, **args: Any) -> Each:
    """Return one of torch's losses by its name, of each sample: its ``mean`` or ``sum`` over the sample's outputs.

    Outputs of numbers have the targets' shape, as in `squared`.
    """
    each = getattr(torch.nn, name)(reduction="none", **args)

    def of_samples(output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            output = output.reshape(target.shape)
        losses = each(output, target).reshape(len(target), -1)
        return losses.mean(1) if reduction == "mean" else losses.sum(1)

    return of_samples


def metrics_for(metrics: Mapping[str, Metric], python_path: Sequence[Path]) -> dict[str, BatchMetric]:
    """Return those of the recipe's ``evaluate.metrics`` that are sums: functions of the user's.

    Raises:
        InputError: one cannot be found.
    """
    keys = {name: f"evaluate.metrics.{name}" for name in metrics}
    return {
        name: _OwnMetric(keys[name], imported(reference, python_path, keys[name]))
        for name, metric in metrics.items()
        if (reference := summed(metric)) is not None
    }


@dataclass(frozen=True)
class _OwnLoss:
    """The user's loss, with a check of what it returns."""

    reference: str
    function: Each

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        losses = self.function(output, target)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else None
        if shape != (len(target),):
            got = type(losses).__name__ if shape is None else f"shape {shape}"
            expected = f"one loss per sample, a tensor ({len(target)},)"
            raise InputError(f"loss.factory {self.reference!r}", expected=expected, got=got)
        return losses


@dataclass(frozen=True)
class _OwnMetric:
    """The user's metric, with a check of what it returns."""

    key: str
    function: Callable[[Tensor, Tensor], Any]

    def __call__(self, output: Tensor, target: Tensor) -> tuple[float, float]:
        with unwritten(self.key, output, target):
            result = self.function(output, target)
        try:
            total, count = map(float, result)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(self.key, expected="two numbers, (sum, count)", got=repr(result)[:100]) from None
        if not 0 <= count < math.inf:
            raise InputError(self.key, expected="(sum, count) with a finite count from 0", got=repr(result)[:100])
        return total, count


def _made(reference: str, args: Mapping[str, Any], python_path: Sequence[Path]) -> Each:
    remedy = "check loss.args; a factory returns the function of output and target"
    function = made(reference, args, python_path, "loss.factory", remedy)
    if not callable(function):
        expected = "a function of output and target"
        raise InputError(f"loss.factory {reference!r}", expected=expected, got=type(function).__name__)
    return function
