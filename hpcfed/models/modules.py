"""The torch modules behind the models' specs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcfed.errors import InputError

Shape = tuple[int, int, int]
"""(C, H, W)."""


class FlatLinear(nn.Linear):
    """A linear layer on samples of any shape: (B, …) → (B, outputs)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class FlatSequential(nn.Sequential):
    """Layers one after another on samples of any shape: (B, …) → (B, outputs)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class ImageSequential(nn.Sequential):
    """Layers one after another on images of shape (C, H, W), or (H, W) for C = 1.

    The memory layout is channels last, which on a CPU makes convolutions and pooling faster by a fifth and more.
    """

    def forward(self, input: Tensor) -> Tensor:
        images = input if input.dim() == 4 else input.unsqueeze(1)
        return super().forward(images.movedim(1, -1).contiguous().movedim(-1, 1))


class CornerMean(nn.Module):
    """(B, C, H, W) → (B, C): mean of the first `side` rows and columns, or of all, with a deterministic gradient."""

    def __init__(self, side: int | None = None):
        super().__init__()
        self._side = side

    def forward(self, input: Tensor) -> Tensor:
        return input[:, :, : self._side, : self._side].mean((2, 3))


class StemPool(nn.Module):
    """3×3 max-pool of stride 2 and padding 1 of numbers ≥ 0: (B, C, H, W) → (B, C, ⌈H/2⌉, ⌈W/2⌉).

    Windows overlap, where the gradient of torch's max-pool adds in any order on a GPU; this one's order is fixed.
    """

    def forward(self, input: Tensor) -> Tensor:
        height, width = input.shape[2:]
        padded = functional.pad(input, (1, width % 2, 1, height % 2))  # 0 is no larger than any number of a window
        rows = _larger_of_three(padded[:, :, 0:-1:2], padded[:, :, 1::2], padded[:, :, 2::2])
        return _larger_of_three(rows[..., 0:-1:2], rows[..., 1::2], rows[..., 2::2])


def _larger_of_three(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return torch.maximum(torch.maximum(first, second), third)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, the first with the stride, each with GroupNorm, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            narrow = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.GroupNorm(groups, outputs))

    def forward(self, input: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(input)).relu()
        return (self.norm2(self.conv2(inner)) + self.shortcut(input)).relu()


class NextToken(nn.Module):
    """Tokens (B, T) int64 in 0 … V−1 → scores (B, V) of the one that follows."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, input: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(input))
        return self.head(outputs[:, -1])


def perceptron_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Return linear layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def pooled_cnn(shape: Shape, channels: Sequence[int], hidden: Sequence[int], outputs: int) -> nn.Module:
    """Return 5×5 convolutions of `channels`, 2×2 max-pool and ReLU after each, and a perceptron on top.

    The papers' code pools after ReLU: the same bits, gradients included, at four times the entries.

    Raises:
        InputError: the images are too small.
    """
    layers: list[nn.Module] = []
    depth, height, width = shape
    for wider in channels:
        layers += [nn.Conv2d(depth, wider, 5), nn.MaxPool2d(2), nn.ReLU()]
        depth, height, width = wider, (height - 4) // 2, (width - 4) // 2
        _refuse_nothing(shape, height, width)
    return ImageSequential(*layers, nn.Flatten(), *perceptron_layers([depth * height * width, *hidden, outputs]))


def dropout_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Return Reddi et al.'s network of two 3×3 convolutions with dropout.

    Raises:
        InputError: the images are too small.
    """
    height, width = ((side - 4) // 2 for side in shape[1:])
    _refuse_nothing(shape, height, width)
    return ImageSequential(
        *(nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * height * width, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, outputs)),
    )


def resnet18(shape: Shape, groups: int, outputs: int, *, wide_stem: bool, pool: int | None) -> nn.Module:
    """Return ResNet-18 with GroupNorm.

    Args:
        shape: of the images.
        groups: of each normalisation.
        outputs: classes.
        wide_stem: 7×7 with stride 2 and a max-pool; else 3×3 with stride 1.
        pool: rows and columns of the last map that count; None for all.

    Raises:
        InputError: the last map has fewer rows or columns than `pool`, or twice as many.
    """
    size, stride, padding = (7, 2, 3) if wide_stem else (3, 1, 1)
    stem = nn.Conv2d(shape[0], 64, size, stride, padding, bias=False)
    layers: list[nn.Module] = [stem, nn.GroupNorm(groups, 64), nn.ReLU(), *([StemPool()] if wide_stem else [])]
    for inputs, width in pairwise((64, 64, 128, 256, 512)):
        layers += [ResidualBlock(inputs, width, width // inputs, groups), ResidualBlock(width, width, 1, groups)]
    last = tuple(-(-side // (32 if wide_stem else 8)) for side in shape[1:])
    if pool is not None and not all(pool <= side < 2 * pool for side in last):
        expected = f"a last map of {pool} to {2 * pool - 1} rows and columns"
        raise InputError(f"model.pool: {pool}", expected=expected, got=f"{last} of images {shape}")
    return ImageSequential(*layers, CornerMean(pool), nn.Linear(512, outputs))


def _refuse_nothing(shape: Shape, height: int, width: int) -> None:
    if min(height, width) < 1:
        raise InputError("the model's convolutions leave nothing of images (C, H, W)", got=f"shape {shape}")
