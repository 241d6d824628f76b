"""The workloads' networks as people write them, for recipes that name them by ``factory``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp() -> nn.Module:
    """784-200-100-10, as layers."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))


class Perceptron(nn.Module):
    """784-200-100-10, as a class with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 200), nn.Linear(200, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 784) → (B, 10)."""
        x = x.view(-1, 784)
        x = torch.relu(self.fc1(x))
        return self.fc3(torch.relu(self.fc2(x)))


class Convolutional(nn.Module):
    """conv5(64)-pool-conv5(64)-pool-394-192-10, ReLU before the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(64 * 5 * 5, 394), nn.Linear(394, 192), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) → (B, 10)."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = x.view(-1, 64 * 5 * 5)
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))


class Logistic(nn.Module):
    """60 → 5."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(60, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 60) → (B, 5)."""
        return self.linear(x)


class Block(nn.Module):
    """x + W₂ gelu(W₁ norm(x))."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → (B, width)."""
        return x + self.second(functional.gelu(self.first(self.norm(x))))


def residual(width: int = 64, blocks: int = 3) -> nn.Module:
    """A residual perceptron with LayerNorm, 60 → 5."""
    inner = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(60, width), *inner, nn.LayerNorm(width), nn.Linear(width, 5))
