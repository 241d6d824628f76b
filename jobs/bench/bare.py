"""The bare PyTorch loop that a round is measured against: a module, torch.optim.SGD, tensors in memory, one thread.

Usage: bare.py MODEL FOLDER [ROUNDS] [WARM-UP ROUNDS] [DEVICE] [BATCH SIZE]

MODEL is mlp, cnn, logistic, fedexp, resnet18, lstm, lstm256, pfl, residual, transformer, or a ``module:function`` of
the working folder, for which the batch size is. FOLDER holds ``federation.h5`` and ``cohorts.json``, as `hpcfed bench`
and ``hpcfed.lab.bench.workloads.write_workload(MODEL, FOLDER)`` write them. Prints one JSON object: the median
milliseconds of a round after the warm-up, by the clock (``ms_med``) and of CPU (``cpu_ms_med``), and the number of
rounds; where there is a test set, every tenth round evaluates on it, and the times are means (``ms_mean``). DEVICE is
cpu, cuda, or auto for a GPU if there is one. It uses nothing of hpcfed.
"""

import argparse
import copy
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import h5py
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
LR, WEIGHT_DECAY = 0.1, 1e-4


def perceptron() -> nn.Module:
    """784-200-100-10."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))


def convolutional(first: int = 64, hidden: int = 394) -> nn.Module:
    """Two 5×5 convolutions of `first` and 64 channels with a max-pool each, then `hidden`-192-10, for 3×32×32."""
    return nn.Sequential(
        *(nn.Conv2d(3, first, 5), nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(nn.Conv2d(first, 64, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()),
        *(nn.Linear(64 * 5 * 5, hidden), nn.ReLU(), nn.Linear(hidden, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


class Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        narrow = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Sequential(narrow, nn.GroupNorm(2, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) → (B, C', H', W')."""
        return (self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


def residual() -> nn.Module:
    """ResNet-18 with a 3×3 stem and GroupNorm, for 3×32×32 and 10 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
    for inputs, width in pairwise((64, 64, 128, 256, 512)):
        layers += [Block(inputs, width, width // inputs), Block(width, width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Recurrent(nn.Module):
    """Two LSTM layers of `hidden` on an embedding of 8, for 80 tokens."""

    def __init__(self, hidden: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) → (B, 80)."""
        return self.head(self.lstm(self.embedding(x.long()))[0][:, -1])


def with_dropout() -> nn.Module:
    """Two 3×3 convolutions of 32 and 64 channels, a max-pool, 128-10, and dropout of ¼ and ½, for 3×32×32."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


class Inner(nn.Module):
    """x + W₂ gelu(W₁ norm(x))."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, width) → (B, width)."""
        return x + self.second(functional.gelu(self.first(self.norm(x))))


def residual_perceptron(width: int = 64) -> nn.Module:
    """Three blocks of `width` with LayerNorm, 60 → 5."""
    inner = [Inner(width) for _ in range(3)]
    return nn.Sequential(nn.Linear(60, width), *inner, nn.LayerNorm(width), nn.Linear(width, 5))


class Layer(nn.Module):
    """Causal attention of 4 heads and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, width) → (B, T, width)."""
        b, t, width = x.shape
        parts = self.taken(self.norm1(x)).split(width, dim=2)
        q, k, v = (one.view(b, t, 4, width // 4).transpose(1, 2) for one in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.given(y.transpose(1, 2).reshape(b, t, width))
        return x + self.inner(self.norm2(x))


class Transformer(nn.Module):
    """Two layers of 140 on 80 characters: 0.5 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(80, 140), nn.Embedding(80, 140)
        self.layers = nn.Sequential(Layer(140), Layer(140))
        self.norm, self.head = nn.LayerNorm(140), nn.Linear(140, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) → (B, 80)."""
        x = self.embed(x.long()) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(x))[:, -1])


MODELS = {
    "mlp": (perceptron, 50),
    "cnn": (convolutional, 50),
    "logistic": (lambda: nn.Linear(60, 5), 5),
    "fedexp": (lambda: convolutional(32, 384), 50),
    "resnet18": (residual, 50),
    "lstm": (Recurrent, 50),
    "lstm256": (lambda: Recurrent(256), 50),
    "pfl": (with_dropout, 10),
    "residual": (residual_perceptron, 5),
    "transformer": (Transformer, 10),
}
DECAYS = {"pfl": 0.0}
"""Weight decay where it is not `WEIGHT_DECAY`."""
EVALUATE_EVERY, TESTED_AT_ONCE = 10, 1000


class Data:
    """A workload's files on a device.

    Attributes:
        x, y: samples of all clients, one client's after another's.
        bounds: of each client's samples in them.
        clients: x (n, …) and y (n,) of each.
        cohorts: clients of each round.
        tests: x and y of the test set in parts; empty without one.
    """

    def __init__(self, folder: str, device: torch.device):
        with h5py.File(Path(folder) / "federation.h5") as file:
            self.x, self.y = self._of(file, "train", device)
            self.bounds = file["train/offsets"][()].tolist()
            self.tests = []
            if "test" in file:
                parts = (part.split(TESTED_AT_ONCE) for part in self._of(file, "test", device))
                self.tests = list(zip(*parts, strict=True))
        self.clients = [(self.x[a:b], self.y[a:b]) for a, b in pairwise(self.bounds)]
        self.cohorts = json.loads((Path(folder) / "cohorts.json").read_text())

    def _of(self, file: h5py.File, part: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (torch.from_numpy(file[f"{part}/{name}"][()]).to(device) for name in "xy")
        tokens = file.attrs["task"] == "next-token"
        if tokens:
            x = x.long()
        return x / 255 if x.dtype == torch.uint8 else x, y.long().flatten()


def train_client(model: nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int, decay: float) -> None:
    """One epoch over a client's samples, in a random order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=decay)
    order = torch.randperm(len(y), device=y.device)
    for start in range(0, len(y), batch_size):
        batch = order[start : start + batch_size]
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def train_round(
    server: nn.Module,
    model: nn.Module,
    clients: list,
    cohort: list[int],
    batch_size: int,
    decay: float = WEIGHT_DECAY,
) -> None:
    """One round of FedAvg, weighted by samples, into `server`."""
    ours, theirs = list(server.parameters()), list(model.parameters())
    sums, total = [torch.zeros_like(p) for p in ours], 0
    for client in cohort:
        x, y = clients[client]
        with torch.no_grad():
            for mine, parameter in zip(theirs, ours, strict=True):
                mine.copy_(parameter)
        train_client(model, x, y, batch_size, decay)
        total += len(y)
        with torch.no_grad():
            for added, mine in zip(sums, theirs, strict=True):
                added.add_(mine, alpha=len(y))
    with torch.no_grad():
        for added, parameter in zip(sums, ours, strict=True):
            parameter.copy_(added / total)


@torch.no_grad()
def evaluate(model: nn.Module, tests: list) -> tuple[float, float]:
    """Return the mean loss and the accuracy on the test set."""
    model.eval()
    found = [(model(x), y) for x, y in tests]
    sums = [(cross_entropy(scores, y, reduction="sum"), (scores.argmax(1) == y).sum()) for scores, y in found]
    model.train()
    loss, right = (float(sum(part)) / sum(len(y) for _, y in tests) for part in zip(*sums, strict=True))
    return loss, right


def device_of(name: str) -> torch.device:
    """Return the device by its name in ``hpcfed bench``."""
    on_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if on_gpu else "cpu")


def timed(round_of: Callable[[int], object], rounds: int, warm_up: int, device: torch.device, *, mean: bool) -> None:
    """Run rounds 0, 1, …, and print the milliseconds of one after the warm-up, median or mean."""
    seconds, of_cpu = [], []
    for number in range(rounds + warm_up):
        started, worked = time.perf_counter(), time.process_time()
        round_of(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        of_cpu.append(time.process_time() - worked)
    name, middle = ("ms_mean", fmean) if mean else ("ms_med", median)
    times = {name: 1e3 * middle(seconds[warm_up:]), f"cpu_{name}": 1e3 * middle(of_cpu[warm_up:])}
    print(json.dumps({**times, "rounds": rounds, "torch": torch.__version__}))


def named(reference: str) -> Callable[[], nn.Module]:
    """Return a ``module:function`` of the working folder."""
    sys.path.insert(0, str(Path.cwd()))
    module, _, function = reference.partition(":")
    return getattr(importlib.import_module(module), function)


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of what this script and `floors.py` both take."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int, nargs="?", default=25)
    parser.add_argument("warm_up", type=int, nargs="?", default=5)
    parser.add_argument("device", choices=("cpu", "auto", "cuda"), nargs="?", default="cpu")
    parser.add_argument("--precision", choices=("float32", "tf32"), default="float32")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what the script is asked for, or end it by what is wrong with that. Set the precision of products."""
    asked = parser.parse_args()
    # torch's own default convolves in TF32, and multiplies in float32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = asked.precision == "tf32"
    if asked.model not in MODELS and not (":" in asked.model and getattr(asked, "batch_size", 0)):
        parser.error(f"no model {asked.model!r} with a batch size; known: {', '.join(MODELS)}")
    if missing := [name for name in ("federation.h5", "cohorts.json") if not (asked.folder / name).is_file()]:
        parser.error(f"{asked.folder} has no {missing[0]}")
    return asked


def main() -> None:
    """Run the loop and print the milliseconds of a round."""
    parser = parser_of(__doc__)
    parser.add_argument("batch_size", type=int, nargs="?", default=0)
    asked = parsed(parser)
    build, batch_size = (named(asked.model), asked.batch_size) if ":" in asked.model else MODELS[asked.model]
    place = device_of(asked.device)
    data = Data(asked.folder, place)
    torch.manual_seed(0)
    server = build().to(place)
    model = copy.deepcopy(server)
    decay = DECAYS.get(asked.model, WEIGHT_DECAY)

    def round_of(number: int) -> None:
        train_round(server, model, data.clients, data.cohorts[number], batch_size, decay)
        if data.tests and (number + 1) % EVALUATE_EVERY == 0:
            evaluate(server, data.tests)

    timed(round_of, asked.rounds, asked.warm_up, place, mean=bool(data.tests))


if __name__ == "__main__":
    main()
