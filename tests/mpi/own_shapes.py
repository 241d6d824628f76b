"""Models whose outputs have shapes of their own, losses that take them, and losses that are refused, by ``factory``.

Worked examples: segmentation with a Dice loss, mean and variance, quantiles, and one logit of two classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

Each = Callable[[Tensor, Tensor], Tensor]
CLASSES = 3


def segmenter() -> nn.Module:
    """(B, 1, H, W) → logits of each pixel's class, (B, C, H, W)."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 3, padding=1))


def overlap(output: Tensor, target: Tensor) -> Tensor:
    """The mean Dice coefficient of a sample's classes, (B,), of labels (B, H, W): 2|A ∩ B| / (|A| + |B|)."""
    present = functional.one_hot(target.long(), CLASSES).movedim(-1, 1).to(output.dtype)
    probability = output.softmax(1)
    both, all_pixels = ((probability * present).sum((2, 3)), (probability + present).sum((2, 3)))
    return ((2 * both + 1) / (all_pixels + 1)).mean(1)


def dice() -> Each:
    """1 − Dice plus the cross-entropy of a sample's pixels."""

    def each(output: Tensor, target: Tensor) -> Tensor:
        entropy = functional.cross_entropy(output, target.long(), reduction="none")
        return 1 - overlap(output, target) + entropy.mean((1, 2))

    return each


def dice_score(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The Dice coefficient of hard labels, as a sum over samples and their number."""
    hard = functional.one_hot(output.argmax(1), CLASSES).movedim(-1, 1) * 100.0
    return overlap(hard, target).sum(), len(target)


def spread() -> nn.Module:
    """Mean and log variance of each sample, (B, 2)."""
    return nn.Linear(4, 2)


def gaussian() -> Each:
    """−log N(target; mean, variance) without its constant."""
    return lambda output, target: (
        0.5 * (output[:, 1] + (target.flatten() - output[:, 0]).square() * (-output[:, 1]).exp())
    )


def quantiles() -> nn.Module:
    """The 10, 50 and 90 % quantiles of each sample, (B, 3)."""
    return nn.Linear(4, 3)


def pinball() -> Each:
    """The quantile loss: Koenker, Bassett, "Regression quantiles", Econometrica 46, 1978."""
    levels = torch.tensor([0.1, 0.5, 0.9])

    def each(output: Tensor, target: Tensor) -> Tensor:
        left, of = target.reshape(-1, 1) - output, levels.to(output.device)
        return torch.maximum(of * left, (of - 1) * left).sum(1)

    return each


def logit() -> nn.Module:
    """The log-odds of the second of two classes, (B, 1)."""
    return nn.Linear(4, 1)


def scalar_logit() -> nn.Module:
    """The same, (B,)."""
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def bce() -> Each:
    return lambda output, target: functional.binary_cross_entropy_with_logits(
        output.flatten(), target.to(output.dtype), reduction="none"
    )


def three() -> nn.Module:
    """Three numbers for two classes, (B, 3)."""
    return nn.Linear(4, 3)


def evidence() -> Each:
    """A loss of two scores and an abstention."""
    return lambda output, target: functional.cross_entropy(output, target, reduction="none")


class Temperature(nn.Module):
    """Cross-entropy with a temperature that should be learned."""

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1), requires_grad=trains)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output * self.log_scale.exp(), target, reduction="none")


class Idle(nn.Module):
    """Uses its parameter from the tenth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(2, 2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, reduction="none")


class Running(nn.Module):
    """Weights classes by the counts of all targets that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += torch.bincount(target, minlength=2)
        return functional.cross_entropy(output, target, reduction="none") / self.seen[target]


class Holder:
    """Holds its module in an attribute."""

    def __init__(self) -> None:
        self.inner = Temperature()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target)

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target)


SCALE = torch.zeros(1, requires_grad=True)


def scaled(output: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor:
    return functional.cross_entropy(output * (SCALE if scale is None else scale).exp(), target, reduction="none")


def closed_over() -> Each:
    """A function over a module in its closure."""
    inner = Temperature()
    return lambda output, target: inner(output, target)


def with_parameter(kind: str) -> Each:
    """A loss with a parameter of its own, kept in one of several ways."""
    kinds: dict[str, Callable[[], Each]] = {
        "module": Temperature,
        "idle": Idle,
        "running": Running,
        "attribute": Holder,
        "method": lambda: Holder().each,
        "closure": closed_over,
        "global": lambda: scaled,
        "partial": lambda: partial(scaled, scale=torch.zeros(1, requires_grad=True)),
        "list": lambda: nn.Sequential(nn.Identity(), Temperature()).__getitem__(1),
        "constant": lambda: Temperature(trains=False),
        "weighted": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]), reduction="none"),
    }
    return kinds[kind]()
