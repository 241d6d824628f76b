"""Modules as people write them: what published code looks like, and its oddities.

Each is an entry of `MODULES`: how it is built, the shape of a sample (integers below `TOKENS` where its name says
``tokens``), and why it is not read, a pattern; None where it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

TOKENS = 7


class Public(NamedTuple):
    """One module."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    refused: str | None = None
    tokens: bool = False


class Writes(nn.Module):
    """A module that has parts, and a function of them and the minibatch as its forward pass."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | nn.Parameter):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def lin(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs)


class InAHurry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc3 = nn.Linear(8, 4)  # another order than that of use
        self.fc2 = nn.Linear(10, 8)
        self.fc1 = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 12)
        x = torch.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Listed(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (12, 9, 9, 4)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number < len(self.layers) - 1:
                x = x.relu_()
        return x


class Residual(nn.Module):
    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.head = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(self.norm(x))))
        y = self.b(F.gelu(self.a(self.norm(x))))  # the same layers again
        y += x
        return self.head(y)


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 8, 3)
        self.pool = nn.AvgPool2d(2)
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.tanh(self.conv1(x)))
        x = self.pool(torch.tanh(self.conv2(x)))
        x = x.view(x.size(0), -1)
        return self.fc2(torch.tanh(self.fc1(x)))


class Tutorial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(6, 10)
        self.fc2 = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.relu(self.conv2(x))[:, :, :2, :2]
        x = torch.flatten(x, 1)
        return self.fc2(F.relu(self.fc1(x)))


class Examples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3, 1), nn.Conv2d(3, 4, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(4 * 4 * 4 // 4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x)
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, 2, 1, bias=False)
        self.deep, self.point = nn.Conv2d(4, 4, 3, 1, 1, groups=4, bias=False), nn.Conv2d(4, 8, 1)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem(x))
        x = F.hardswish(self.norm(self.point(self.deep(x))))
        return self.head(x.mean([2, 3]))


class Squeezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up, self.head = nn.Conv2d(1, 6, 3), lin(6, 3), lin(3, 6), lin(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c, _, _ = x.shape
        gate = F.adaptive_avg_pool2d(x, 1).view(b, c)
        gate = torch.sigmoid(self.up(F.relu(self.down(gate)))).view(b, c, 1, 1)
        x = x * gate.expand_as(x)
        return self.head(F.adaptive_max_pool2d(x, 1).squeeze(-1).squeeze(-1))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(1 + 2 * k, 2, 3, padding=1) for k in range(3))
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.cat([x, torch.relu(conv(x))], 1)
        return self.head(x.amax(dim=(2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.up = (
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Conv2d(6, 1, 1),
        )
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.down(x).relu()
        inner = self.inner(F.max_pool2d(outer, 2)).relu()
        inner = F.interpolate(inner, scale_factor=2, mode="nearest")
        return self.head(self.up(torch.cat((outer, inner), dim=1)).flatten(1))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv1d(3, 4, 2, dilation=1), nn.Conv1d(4, 4, 2, dilation=2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = F.elu(self.a(F.pad(x, (1, 0))))
        x = F.elu(self.b(F.pad(x, (2, 0))))
        return self.head(x[:, :, -1])


class Attention(nn.Module):
    def __init__(self, d: int = 8, heads: int = 2, length: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Characters(nn.Module):
    def __init__(self, d: int = 8, length: int = 6) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, d), nn.Embedding(length, d)
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return self.lm_head(self.ln_f(x)[:, -1])


class Vision(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, d, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, d)), nn.Parameter(0.1 * torch.randn(1, 5, d))
        self.qkv, self.out, self.norm, self.head = lin(d, 3 * d), lin(d, d), nn.LayerNorm(d), lin(d, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(x[:, 0])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm, self.head = lin(6, 6), lin(8, 8), nn.LayerNorm(8), lin(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + F.silu(self.channels(self.norm(x)))
        return self.head(x.mean(dim=1))


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 5)
        self.convs = nn.ModuleList([nn.Conv2d(1, 3, (k, 5)) for k in (2, 3)])
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unsqueeze(1)
        found = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        found = [F.max_pool1d(one, one.size(2)).squeeze(2) for one in found]
        return self.fc(torch.cat(found, 1))


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gamma, self.head = nn.Parameter(torch.ones(12)), nn.Parameter(torch.tensor(0.5)), lin(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.head(x + self.gamma * normal)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 5, dtype=x.dtype, device=x.device)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return self.head(h)


class Elman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.i2o = lin(3 + 5, 5), lin(3 + 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.size(0), 5)
        for step in x.unbind(1):
            combined = torch.cat((step, hidden), 1)
            hidden, output = torch.tanh(self.i2h(combined)), self.i2o(combined)
        return output


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=[1, 2, 3], keepdim=True)
        weight = weight / (weight.flatten(1).std(dim=1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = lin(12, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.h = lin(12, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.h = (0.5 * self.h + self.fc(x).mean(0)).detach()
        return self.fc(x) + self.h


class Skipping(nn.Module):
    """Now and then leaves out a layer, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body, self.draws = lin(12, 4), lin(12, 12), [random.Random(0)]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x if self.draws[0].random() < 1e-6 else self.body(x))


def outliers(self: nn.Module, x: Tensor) -> Tensor:
    """Looks how many samples are far out; none of small ones is."""
    far = x[x.abs().amax(1) > 50]
    return self.fc(x) * (2 if len(far) else 1)


def outliers_by_index(self: nn.Module, x: Tensor) -> Tensor:
    (far,) = torch.where(x.abs().amax(1) > 50)
    return self.fc(x) * (2 if far.numel() else 1)


def masked_rows(self: nn.Module, x: Tensor) -> Tensor:
    """Treats rows apart, and never looks how many there are."""
    h, out = self.a(x), torch.zeros(len(x), 8, dtype=x.dtype)
    rows = h.sum(1) > 0
    out[rows], out[~rows] = torch.relu(h[rows]), torch.tanh(h[~rows])
    return self.b(out)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = lin(12, 4), lin(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 2:
            return self.other(x.flatten(1))
        if self.training and x.shape[1] == 12:
            return self.fc(x)
        return self.other(x)


def hooked() -> nn.Module:
    module = nn.Sequential(lin(12, 8), nn.ReLU(), lin(8, 4))
    module[0].register_forward_hook(lambda part, x, y: y * 2)
    return module


def rebinding(self: nn.Module, x: Tensor) -> Tensor:
    self.fc.weight.data = self.fc.weight.data.clamp(-1, 1)
    return self.fc(x)


def written(self: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.fc.weight.clamp_(-1, 1)
    return self.fc(x)


def clipped_in_place(self: nn.Module, x: Tensor) -> Tensor:
    y = self.a(x)
    y[:, 0] = 0
    y[y < -1] = -1
    return self.b(y)


def stale(self: nn.Module, x: Tensor) -> Tensor:
    y = self.a(x)
    view = y.view(-1, 2, 4)
    y.mul_(2)
    return self.b(view.flatten(1))


def sometimes(self: nn.Module, x: Tensor) -> Tensor:
    return self.fc(x) * (1.0 if random.random() < 0.5 else 2.0)


def by_sample(self: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([self.fc(row) for row in x])


def frozen_body(self: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = self.a(x)
    return self.b(x.detach())


def runge_kutta(self: nn.Module, x: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        return torch.tanh(self.f(x))

    for _ in range(2):
        k1 = f(x)
        k2 = f(x + 0.5 * k1)
        x = x + k2
    return self.head(x)


def factorised(self: nn.Module, x: Tensor) -> Tensor:
    pairs = (x @ self.v).pow(2) - (x.pow(2) @ self.v.pow(2))
    return self.fc(x) + 0.5 * pairs.sum(1, keepdim=True)


def maxout(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(self.a(x).view(x.shape[0], 4, 2).max(dim=-1)[0])


def bag(self: nn.Module, x: Tensor) -> Tensor:
    return self.head(self.embed(x).mean(1))


def rearranged(self: nn.Module, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, h * w // 4, 4 * c)
    return self.b(F.relu(self.a(x)).mean(dim=1))


def pooled_attention(self: nn.Module, x: Tensor) -> Tensor:
    weights = torch.softmax(self.score(x), dim=1)
    return self.head((weights * x).sum(dim=1))


def by_einsum(self: nn.Module, x: Tensor) -> Tensor:
    q, k = self.q(x), self.k(x)
    return self.head(torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(-1), x).flatten(1))


def highway(self: nn.Module, x: Tensor) -> Tensor:
    gate = torch.sigmoid(self.t(x))
    return self.head(gate * F.relu(self.h(x)) + (1 - gate) * x)


def centred(self: nn.Module, x: Tensor) -> Tensor:
    x = self.a(x)
    return self.b(x - x.mean(dim=0, keepdim=True))


def checkpointed(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(checkpoint(self.a, x, use_reentrant=False))


def doubled(self: nn.Module, x: Tensor) -> Tensor:
    return self.fc(x.float() / 255.0).float()


def recurrent_layer(self: nn.Module, x: Tensor) -> Tensor:
    return self.head(self.lstm(x)[0][:, -1])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), lin(48, 4))


def shared_layer() -> nn.Module:
    inner = lin(8, 8)
    return nn.Sequential(lin(12, 8), nn.ReLU(), inner, nn.Tanh(), inner, nn.ReLU(), lin(8, 4))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 4), (4, 4)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), lin(16, 4))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(12, 6))
        self.head = lin(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ self.frequencies
        return self.head(torch.cat([angles.sin(), angles.cos()], -1))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-1, 1, 12))
        self.a, self.weight = lin(12, 6), nn.Parameter(torch.randn(4, 6))
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a((x - self.mean) / 0.5)
        return self.scale * F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1))


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias, self.head = lin(12, 6), nn.Parameter(torch.zeros(12)), lin(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.sigmoid(self.encoder(x)), self.encoder.weight.t(), self.bias))


class OneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(12, track_running_stats=False), lin(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x))


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(lin(12, 8), activation, lin(8, 4))


IMAGE, SEQUENCE, ROW = (1, 8, 8), (6, 8), (12,)
MODULES: dict[str, Public] = {
    "sequential": Public(lambda: nn.Sequential(nn.Flatten(), lin(12, 8), nn.ReLU(), lin(8, 4)), (3, 4)),
    "in a hurry": Public(InAHurry, (3, 4)),
    "module list, relu_": Public(Listed, ROW),
    "residual, shared, in place": Public(Residual, ROW),
    "shared layer": Public(shared_layer, ROW),
    "nested": Public(lambda: nn.Sequential(nn.Sequential(lin(12, 8), nn.ReLU(True)), nn.Sequential(lin(8, 4))), ROW),
    "LeNet": Public(LeNet, IMAGE),
    "tutorial": Public(Tutorial, IMAGE),
    "examples, dropout": Public(lambda: Examples(), IMAGE),
    "VGG, group norm": Public(vgg, IMAGE),
    "separable": Public(Separable, IMAGE),
    "squeeze and excite": Public(Squeezing, IMAGE),
    "dense": Public(Dense, IMAGE),
    "U-Net": Public(UNet, IMAGE),
    "weight standardisation": Public(
        lambda: nn.Sequential(Standardised(1, 3, 3), nn.ReLU(), nn.Flatten(), lin(108, 4)), IMAGE
    ),
    "pixel shuffle": Public(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.PixelShuffle(2), nn.Flatten(), lin(144, 4)), IMAGE
    ),
    "instance norm": Public(
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), lin(108, 4)), IMAGE
    ),
    "transposed convolution": Public(
        lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 2, 2), nn.ReLU(), nn.Flatten(), lin(512, 4)), IMAGE
    ),
    "same padding": Public(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), nn.Flatten(), lin(128, 4)), IMAGE
    ),
    "replicate padding": Public(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="replicate"), nn.Flatten(), lin(128, 4)), IMAGE
    ),
    "causal 1-D": Public(Causal, (6, 3)),
    "nanoGPT, tied": Public(Characters, (6,), tokens=True),
    "vision transformer": Public(Vision, IMAGE),
    "mixer": Public(Mixer, SEQUENCE),
    "transformer encoder": Public(transformer, SEQUENCE),
    "einsum": Public(lambda: Writes(by_einsum, q=lin(8, 8), k=lin(8, 8), head=lin(48, 4)), SEQUENCE),
    "pooled attention": Public(lambda: Writes(pooled_attention, score=lin(8, 1), head=lin(8, 4)), SEQUENCE),
    "rearranged": Public(lambda: Writes(rearranged, a=lin(4, 6), b=lin(6, 4)), IMAGE),
    "texts": Public(Texts, (6,), tokens=True),
    "bag of words": Public(lambda: Writes(bag, embed=nn.Embedding(TOKENS, 5), head=lin(5, 4)), (6,), tokens=True),
    "padding token": Public(
        lambda: Writes(bag, embed=nn.Embedding(TOKENS, 5, padding_idx=0), head=lin(5, 4)), (6,), tokens=True
    ),
    "sparse gradient": Public(
        lambda: Writes(bag, embed=nn.Embedding(TOKENS, 5, sparse=True), head=lin(5, 4)), (6,), tokens=True
    ),
    "RMS norm": Public(RmsNorm, ROW),
    "GRU cell": Public(Recurrence, (6, 3)),
    "Elman": Public(Elman, (6, 3)),
    "highway": Public(lambda: Writes(highway, t=lin(12, 12), h=lin(12, 12), head=lin(12, 4)), ROW),
    "factorisation machine": Public(
        lambda: Writes(factorised, v=nn.Parameter(0.1 * torch.randn(12, 3)), fc=lin(12, 4)), ROW
    ),
    "maxout": Public(lambda: Writes(maxout, a=lin(12, 8), b=lin(4, 4)), ROW),
    "Runge-Kutta": Public(lambda: Writes(runge_kutta, f=lin(12, 12), head=lin(12, 4)), ROW),
    "tied auto-encoder": Public(AutoEncoder, ROW),
    "cosine classifier": Public(Normalised, ROW),
    "Fourier features": Public(Fourier, ROW),
    "PReLU": Public(lambda: mlp(nn.PReLU(8)), ROW),
    "GLU": Public(lambda: nn.Sequential(lin(12, 8), nn.GLU(), lin(4, 4)), ROW),
    "ELU": Public(lambda: mlp(nn.ELU()), ROW),
    "SELU": Public(lambda: mlp(nn.SELU(inplace=True)), ROW),
    "leaky": Public(lambda: mlp(nn.LeakyReLU(0.1)), ROW),
    "SiLU": Public(lambda: mlp(nn.SiLU(inplace=True)), ROW),
    "GELU": Public(lambda: mlp(nn.GELU()), ROW),
    "softplus": Public(lambda: mlp(nn.Softplus()), ROW),
    "bilinear": Public(lambda: Writes(lambda s, x: s.b(x, x), b=nn.Bilinear(12, 12, 4)), ROW),
    "weight norm": Public(lambda: nn.Sequential(parametrizations.weight_norm(lin(12, 8)), nn.ReLU(), lin(8, 4)), ROW),
    "several returns": Public(Two, ROW),
    "set items": Public(lambda: Writes(clipped_in_place, a=lin(12, 8), b=lin(8, 4)), ROW),
    "frozen body": Public(lambda: Writes(frozen_body, a=lin(12, 8), b=lin(8, 4)), ROW),
    "batch statistics": Public(OneByOne, ROW),
    "centred batch": Public(lambda: Writes(centred, a=lin(12, 8), b=lin(8, 4)), ROW),
    "masked rows": Public(lambda: Writes(masked_rows, a=lin(12, 8), b=lin(8, 4)), ROW),
    "checkpointed": Public(lambda: Writes(checkpointed, a=lin(12, 8), b=lin(8, 4)), ROW),
    "dropout": Public(lambda: nn.Sequential(lin(12, 8), nn.ReLU(), nn.Dropout(0.3), lin(8, 4)), ROW),
    "LSTM": Public(
        lambda: Writes(recurrent_layer, lstm=nn.LSTM(3, 5, batch_first=True), head=lin(5, 4)),
        (6, 3),
        "torch's own LSTM",
    ),
    "hooks": Public(hooked, ROW, r"hooks, 0 \(Linear\)"),
    "branches": Public(
        lambda: Writes(lambda s, x: s.fc(x) if x.sum() > 0 else s.fc(-x), fc=lin(12, 4)),
        ROW,
        "branches on data, public",
    ),
    "item": Public(
        lambda: Writes(lambda s, x: s.fc(x) * x.max().item(), fc=lin(12, 4)), ROW, "branches on data|numbers"
    ),
    "counter": Public(Counting, ROW, "a call changes calls"),
    "own generator": Public(Skipping, ROW, "a call changes draws"),
    "outliers": Public(lambda: Writes(outliers, fc=lin(12, 4)), ROW, "shapes depend on data, public_modules.py, line"),
    "outliers by index": Public(lambda: Writes(outliers_by_index, fc=lin(12, 4)), ROW, "shapes depend on data"),
    "float32 by name": Public(lambda: Writes(lambda s, x: s.fc(x).float(), fc=lin(12, 4)), ROW, "outputs would differ"),
    "hidden state": Public(Remembering, ROW, "a call changes h"),
    "rebinding": Public(lambda: Writes(rebinding, fc=lin(12, 4)), ROW, r"sets \.data.*public_modules.py, line"),
    "writes to a weight": Public(lambda: Writes(written, fc=lin(12, 4)), ROW, "writes to a parameter"),
    "spectral norm": Public(
        lambda: nn.Sequential(parametrizations.spectral_norm(lin(12, 4))), ROW, "writes to|in place"
    ),
    "stale view": Public(lambda: Writes(stale, a=lin(12, 8), b=lin(8, 4)), ROW, "after a write to its memory"),
    "random module": Public(lambda: Writes(sometimes, fc=lin(12, 4)), ROW, "random numbers outside of torch"),
    "noise": Public(
        lambda: Writes(lambda s, x: s.fc(x + torch.randn_like(x)), fc=lin(12, 4)), ROW, "draws random numbers, public"
    ),
    "dropout of channels": Public(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout2d(0.5), nn.Flatten(), lin(72, 4)), IMAGE, "draws random"
    ),
    "by sample": Public(lambda: Writes(by_sample, fc=lin(12, 4)), ROW, "another number of samples"),
    "straight through": Public(
        lambda: Writes(lambda s, x: s.fc(Straight.apply(s.a(x))), a=lin(12, 8), fc=lin(8, 4)), ROW, "would differ"
    ),
    "NumPy": Public(
        lambda: Writes(lambda s, x: s.fc(torch.from_numpy(x.numpy() * 2)), fc=lin(12, 4)), ROW, "takes numbers out"
    ),
    "squeeze all": Public(lambda: Writes(lambda s, x: s.fc(x.squeeze()).view(-1, 4), fc=lin(12, 4)), ROW, None),
    "scripted": Public(lambda: nn.Sequential(torch.jit.script(lin(12, 8)), lin(8, 4)), ROW, "a scripted module"),
}
