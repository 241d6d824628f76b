"""Losses: what a minibatch minimises, and the sums that an evaluation adds up exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hpcfed.config.recipe import Loss as LossSection
from hpcfed.errors import InputError

OF_TASK = {"classification": "cross-entropy", "next-token": "cross-entropy", "regression": "squared"}


@dataclass(frozen=True)
class Loss:
    """A loss by name, with the reduction over the samples of a minibatch.

    ``cross-entropy``: −log softmax(output)[target], targets int64.
    ``squared``: ½‖output − target‖² per sample, targets as floating numbers.
    """

    name: str
    reduction: str

    def batch(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the scalar loss of a minibatch of B samples, averaged or summed over them."""
        if self.name == "cross-entropy":
            return functional.cross_entropy(output, target, reduction=self.reduction)
        squares = 0.5 * (output.reshape(target.shape) - target).square().sum()
        return squares / len(target) if self.reduction == "mean" else squares

    def sums(self, output: Tensor, target: Tensor) -> tuple[float, int]:
        """Return the summed loss and the number of right answers (0 for a regression) over a chunk of samples."""
        if self.name == "cross-entropy":
            each = functional.cross_entropy(output, target, reduction="none")
            return float(each.sum(dtype=torch.float64)), int((output.argmax(1) == target).sum())
        return float(0.5 * (output.reshape(target.shape) - target).square().sum(dtype=torch.float64)), 0


def loss_for(section: LossSection, task: str) -> Loss:
    """Return the recipe's loss; ``auto`` is the task's own.

    Raises:
        InputError: a loss that does not fit the task.
    """
    name = OF_TASK[task] if section.name == "auto" else section.name
    if name != OF_TASK[task]:
        raise InputError(f"loss.name {name!r} does not fit a {task} federation", remedy=f"use {OF_TASK[task]!r}")
    return Loss(name, section.reduction)
