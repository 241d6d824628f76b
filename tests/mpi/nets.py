"""Modules, most with BatchNorm, and a method, for recipes that name them by ``factory``."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, RoundContext, State, Tilt


def mlp(inputs: int = 12, hidden: int = 8, outputs: int = 4) -> nn.Module:
    """A perceptron; 2 is its BatchNorm, 4 its head."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def counting() -> nn.Sequential:
    """With a counter that float64 does not hold."""
    net = mlp()
    net[2].num_batches_tracked -= 1 << 60
    return net


class Norms(nn.Module):
    """A perceptron with a constant table, a mask of booleans, and a counter that each forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12, momentum=None)
        self.head = nn.Linear(12, 4)
        self.register_buffer("table", torch.linspace(0.1, 1.2, 12))
        self.register_buffer("mask", torch.arange(12) % 2 == 0)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(input)
        return self.head(self.norm(input) * self.table * self.mask)


class Unkept(nn.Sequential):
    """A linear model behind a BatchNorm without running statistics: it normalises by the batch in evaluation, too."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(3, track_running_stats=False)
        super().__init__(nn.Unflatten(1, (3, 4)), norm, nn.Flatten(), nn.Linear(12, 4))


def centred() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss factory: squared distances of samples' losses from their mean, so that each depends on all."""

    def losses(output: Tensor, target: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return (each - each.mean()).square()

    return losses


class Block(nn.Module):
    """A residual block of torchvision's shape and names."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, input: Tensor) -> Tensor:
        inner = self.bn1(self.conv1(input)).relu()
        return (self.bn2(self.conv2(inner)) + self.downsample(input)).relu()


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's layers and names; `width` is that of its first block, 64 in the paper."""

    def __init__(self, width: int = 64, outputs: int = 4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            inputs, outputs_ = widths[number - 1], widths[number]
            blocks = Block(inputs, outputs_, 1 if number == 1 else 2), Block(outputs_, outputs_, 1)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(8 * width, outputs)

    def forward(self, input: Tensor) -> Tensor:
        y = self.maxpool(self.bn1(self.conv1(input)).relu())
        for number in range(1, 5):
            y = getattr(self, f"layer{number}")(y)
        return self.fc(y.mean((2, 3)))


class Fragile(nn.Linear):
    """A linear model whose passes fail on minibatches once the environment says so, not on a sample or two."""

    def __init__(self) -> None:
        super().__init__(12, 4)

    def forward(self, input: Tensor) -> Tensor:
        if len(input) > 2 and "HPCFED_TEST_FAILS" in os.environ:
            raise RuntimeError("no such pass")
        return super().forward(input)


class Settled(ClientRule):
    """A rule whose clients keep the state that they began with, and see no other."""

    stateful = True

    def begin(self, w: Tensor) -> State:
        return {"began": w.clone()}

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        (began,) = client.values()
        return Tilt(mu=0.1, anchor=began.to(w))


def settled() -> Method:
    return Method("settled", Settled(), ServerStep())


class Normed(nn.Module):
    """A residual block with LayerNorm and dropout."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.drop(self.second(nn.functional.gelu(self.first(self.norm(input)))))


def residual() -> nn.Module:
    """A residual perceptron, read as operators and trained in tiles."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), Normed(8), Normed(8), nn.Linear(8, 4))


def convolutional() -> nn.Module:
    """A network of one-dimensional convolutions with dropout, read as operators."""
    layers = [nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(30, 4)]
    return nn.Sequential(nn.Unflatten(1, (1, 12)), *layers)


def normed() -> nn.Module:
    """Read as operators, without random draws."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def perceptron() -> nn.Module:
    """The test recipes' built-in perceptron, as layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
