"""The workloads' networks in PyTorch as users write them, for recipes that name them by ``factory``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp() -> nn.Module:
    """Return the MLP 784-200-100-10 as a sequence of layers."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))


class Perceptron(nn.Module):
    """The MLP 784-200-100-10 as a class that calls functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 200), nn.Linear(200, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 784) → (B, 10)."""
        x = x.view(-1, 784)
        x = torch.relu(self.fc1(x))
        return self.fc3(torch.relu(self.fc2(x)))


class Convolutional(nn.Module):
    """CNN as a class: conv5(64)-pool-conv5(64)-pool-394-192-10 with ReLU; conv5 has 5×5 kernels."""

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
    """Logistic regression with 60 inputs and 5 outputs, as a class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(60, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 60) → (B, 5)."""
        return self.linear(x)


class Block(nn.Module):
    """A residual block: x ↦ x + W₂ gelu(W₁ norm(x))."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → (B, width)."""
        return x + self.second(functional.gelu(self.first(self.norm(x))))


def residual(width: int = 64, blocks: int = 3) -> nn.Module:
    """Return a residual MLP with LayerNorm: 60 inputs, `blocks` blocks of `width` units, 5 outputs."""
    inner = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(60, width), *inner, nn.LayerNorm(width), nn.Linear(width, 5))


class Attention(nn.Module):
    """Causal self-attention, by default with 4 heads."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads, self.taken, self.given = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T tokens, width) → (B, T, width)."""
        b, t, width = x.shape
        q, k, v = self.taken(x).split(width, dim=2)
        q, k, v = (one.view(b, t, self.heads, width // self.heads).transpose(1, 2) for one in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.given(y.transpose(1, 2).contiguous().view(b, t, width))


class Layer(nn.Module):
    """A transformer layer: attention, then an MLP, each with a LayerNorm before it and a residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T tokens, width) → (B, T, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Transformer(nn.Module):
    """Transformer with 2 layers of width 140, for 80 tokens from a vocabulary of 80: 0.5 M parameters."""

    def __init__(self, width: int = 140, layers: int = 2, tokens: int = 80, length: int = 80):
        super().__init__()
        self.embed, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens, (B, T) → scores of the next token, (B, 80)."""
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, -1])


class Recurrent(nn.Module):
    """LSTM of the GeL paper: 2 layers of width 256, embedding width 8, vocabulary of 80."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(80, 8), nn.LSTM(8, 256, 2, batch_first=True), nn.Linear(256, 80)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens, (B, T) → scores of the next token, (B, 80)."""
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def convolutional() -> nn.Module:
    """Return the network of `Convolutional` as a sequence of layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(nn.Flatten(), nn.Linear(64 * 5 * 5, 394), nn.ReLU(), nn.Linear(394, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


def logistic() -> nn.Module:
    """Return logistic regression with 60 inputs and 5 outputs, as one layer."""
    return nn.Linear(60, 5)


def with_dropout() -> nn.Module:
    """Return pfl's CIFAR-10 network: conv3(32)-conv3(64)-pool-128-10, dropout ¼ after pooling and ½ after the 128."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )
